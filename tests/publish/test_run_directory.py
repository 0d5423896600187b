"""What `--overwrite` deletes in the output directory of a run, and what keeps all of it."""

import json
import shutil

import pytest

import growkern
from growkern import GrowthError
from growkern.publish.manifest import write_manifest
from growkern.train.run import resolve
from growkern.train.run.resolve import claim_output, is_ours

OTHER = {"run": {"training": {"steps": 6}}, "inputs": {"data.train": "ab"}}
MINE = {"run": {"training": {"steps": 5}}, "inputs": {"data.train": "ab"}}
# of other programs, or of the user
FOREIGN = ["thesis.txt", "photos/a.jpg", "checkpoint-4/notes.md", "checkpoint-best/model.bin"]
FOREIGN += ["runs/plots/loss.png", "empty/", "damaged-checkpoint-2/mine.txt", ".git/HEAD"]
FOREIGN += ["generator/mine.txt", "checkpoint-6/model.safetensors", "README.md", "best.pt"]
FOREIGN += ["checkpoint-4/notes/manifest.json", "runs/manifest.json"]


def marker(identity):
    return {"format": 1, "growkern": growkern.__version__, **identity}


@pytest.fixture
def out(tmp_path):
    """The directory of a finished run, as it is left by one that has logs and a damaged save."""
    out = tmp_path / "out"
    for folder in ("generator", "runs/Jan1_host", "runs/Jan2_host"):
        (out / folder).mkdir(parents=True)
    (out / "run.json").write_text(json.dumps(marker(OTHER)))
    files = ["config.json", "model.safetensors", "trainer_state.json", "vocab.txt", "figure.png"]
    for name in (*files, "generator/config.json"):
        (out / name).write_text("of the model")
    for name in ("checkpoint-2", "checkpoint-4", "damaged-checkpoint-3"):
        (out / name / "generator").mkdir(parents=True)
        for file in (*files, "generator/config.json"):
            (out / name / file).write_text("of a checkpoint")
        write_manifest(out / name)
    write_manifest(out)
    (out / "runs" / "Jan1_host" / "events.out.tfevents.1.host.2.0").write_text("log")
    return out


def snapshot(path):
    return {str(p.relative_to(path)): p.is_file() and p.read_bytes() for p in path.rglob("*")}


def overwrite(out):
    """The two calls of `train`."""
    if not is_ours(out, MINE, overwrite=True):
        claim_output(out, MINE)


def test_a_run_is_overwritten(out):
    (out / "loss_vs_flops.png").write_text("of growkern plot")
    with pytest.raises(GrowthError, match=r"steps 6 -> 5.*=True \(--overwrite\) would delete"):
        is_ours(out, MINE, overwrite=False)
    overwrite(out)
    assert snapshot(out) == {"run.json": json.dumps(marker(MINE), indent=1).encode()}
    assert is_ours(out, MINE, overwrite=False)


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_that_no_record_lists_keeps_the_whole_directory(out, name):
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).mkdir() if name.endswith("/") else (out / name).write_text("mine")
    before = snapshot(out)
    with pytest.raises(GrowthError, match=r"is no file of .*by hand") as refused:
        overwrite(out)
    assert (out / name).name in str(refused.value)
    assert snapshot(out) == before


@pytest.mark.parametrize("place", [".", "checkpoint-4"])
def test_a_manifest_of_another_program_lists_nothing_and_stays(out, place):
    files = dict.fromkeys((p.name for p in (out / place).iterdir()), 1) | {"thesis.txt": 1}
    (out / place / "thesis.txt").write_text("mine")
    manifest = out / place / "manifest.json"
    manifest.write_text(json.dumps({"name": "my web app", "files": files}))
    for left in ("thesis.txt", "nothing"):
        before = snapshot(out)
        with pytest.raises(GrowthError, match=r"is no file of .*by hand"):
            overwrite(out)
        assert snapshot(out) == before
        (out / place / left).unlink(missing_ok=True)


@pytest.mark.parametrize(
    "text",
    [
        *('{"made by": "another program"}', "", "{", "[]", "3", '{"run": {}}'),
        *('{"run": 1, "inputs": 2}', '{"run": {}, "inputs": {}, "name": "x"}'),
        json.dumps(marker({"run": 1, "inputs": {}})),
        json.dumps(marker(OTHER) | {"format": 2, "growkern": "9.1"}),
    ],
)
def test_a_marker_that_is_none_of_ours_is_refused_for_ever(out, text):
    (out / "run.json").write_text(text)
    before = snapshot(out)
    for allowed in (False, True):
        with pytest.raises(GrowthError) as refused:
            is_ours(out, MINE, overwrite=allowed)
        assert "run.json" in str(refused.value) and "overwrite" not in str(refused.value)
        assert ("use growkern 9.1" in str(refused.value)) == ("9.1" in text)
    assert snapshot(out) == before


def test_a_file_that_comes_during_the_checks_is_kept(out):
    """They take minutes where models are loaded."""
    assert not is_ours(out, MINE, overwrite=True)
    (out / "thesis.txt").write_text("mine")
    before = snapshot(out)
    with pytest.raises(GrowthError, match=r"thesis\.txt"):
        claim_output(out, MINE)
    assert snapshot(out) == before


def test_a_directory_that_is_emptied_can_be_emptied_again_after_every_kill(out, monkeypatch):
    whole = snapshot(out)
    for moves in range(20):
        left = iter(range(moves))

        def move(path, place, real=resolve.move, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            real(path, place)

        with monkeypatch.context() as patched:
            patched.setattr(resolve, "move", move)
            try:
                claim_output(out, MINE)
                break
            except KeyboardInterrupt:
                assert json.loads((out / "run.json").read_text()) == marker(OTHER)
        overwrite(out)
        assert list(snapshot(out)) == ["run.json"]
        for name, content in whole.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).mkdir(exist_ok=True) if content is False else (
                (out / name).write_bytes(content)
            )
    assert moves == 11


def test_a_model_that_was_half_saved_at_a_kill_goes_too(out):
    """Its files are moved to their place one by one, and the record comes last."""
    (out / "manifest.json").unlink()
    (out / "model.safetensors").rename(out / "model-00001-of-00002.safetensors")
    (out / ".saving" / "model").mkdir(parents=True)
    (out / ".saving" / "model" / "half").write_text("x")
    overwrite(out)
    assert list(snapshot(out)) == ["run.json"]


def test_links_are_not_followed(out, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.txt").write_text("mine")
    shutil.rmtree(out / "generator")
    (out / "runs" / "Jan2_host" / "events.out.tfevents.3").symlink_to(tmp_path / "data")
    overwrite(out)
    assert (tmp_path / "data" / "mine.txt").read_text() == "mine"
