"""A run says what it is before its first step, and where its model is after the last."""

import json
import os
import re
import sys

import datasets
import pytest
import torch
import transformers
from huggingface_hub.utils import are_progress_bars_disabled
from transformers.utils import logging

from growkern import GrowthError, run as train
from growkern.cli.main import main as command
from growkern.errors import GrowthWarning, counted, human, listed, warn
from growkern.train.run.start import resume_command
from growkern.train.safety.checkpoints import checkpoints_in
from testbed import warm
from tests.train.run.test_run import RUN, workplace  # noqa: F401

ONE = pytest.mark.parametrize("workplace", ["bert"], indirect=True)


def values(text):
    """The names and values that a run printed, one pair per line."""
    pairs = [line.partition("  ") for line in text.splitlines() if not line.startswith("{")]
    return {name: value.strip() for name, _, value in pairs}


@ONE
def test_a_run_prints_a_header_and_an_end(workplace, monkeypatch, capsys):  # noqa: F811
    model = transformers.BertForMaskedLM.from_pretrained(workplace / "model")
    model.bfloat16().save_pretrained(workplace / "model")
    file, out = workplace / "run.toml", workplace / "out"
    file.write_text(RUN.replace("batch_size = 4", 'batch_size = 4\nprecision = "bf16"'))
    monkeypatch.setattr(sys, "argv", ["growkern", "train", str(file)])
    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 0
    header, finished, end = capsys.readouterr().out.partition("finished  ")
    found, end = values(header), values(finished + end)
    parameters = human(sum(p.numel() for p in model.parameters()))
    assert found["model"] == f"BertForMaskedLM from {workplace / 'model'}, {parameters} parameters"
    autocast = "bfloat16 autocast over float32 weights"
    assert found["precision"] == f"{autocast}; the checkpoint is bfloat16"
    assert found["device"] in ("cpu, 1 process", "cuda:0, 1 process") or torch.cuda.is_available()
    assert found["steps"] == "6, of 4 x 16 tokens, 384 in all"
    assert found["saves"] == (
        f"{out}, every 2 steps and every 10 minutes and at the end; the last 9 checkpoints are kept"
    )
    assert found["to resume"] == f"growkern train {file}"
    assert "resumes" not in found
    assert end["finished"].startswith("6 steps, label loss ")
    assert end["model"] == f"{out} (bfloat16)"
    assert end["next"] == f"growkern plot {out}"

    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 0
    again = capsys.readouterr().out
    (done,) = values(again).values()
    assert done.startswith(f"{out} is trained already; nothing was done")


def switches():
    """Which libraries show bars in this process."""
    logging.set_tqdm_hook(hook := logging.set_tqdm_hook(None))
    off = [are_progress_bars_disabled(), datasets.are_progress_bars_disabled()]
    return [hook, logging.is_progress_bar_enabled(), *off]


def main(folder):
    """Two runs of a rank: the second finds a finished run. The second rank has a warning."""
    before = switches()
    for message in ("of all", "of this one") if os.environ.get("RANK") == "1" else ("of all",):
        warn(message)
    for steps in (6, None):
        result = train(folder / "run.toml", progress=False)
        assert (result and result.global_step) == steps
    assert switches() == before
    warn("before a failure")
    with pytest.raises(GrowthError, match="nothere"):
        train(folder / "nothere.toml")


@ONE
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_without_progress_prints_nothing(workplace, ranks):  # noqa: F811
    # text that is no validation text, of which it would warn
    (workplace / "run.toml").write_text(RUN.replace("*.txt", "b.txt"))
    done = warm.run("testbed.forked_ranks", ranks, __name__, workplace)
    warned = ["GrowthWarning: of all", "GrowthWarning: rank 1: of this one"][:ranks]
    assert (done.returncode, done.stdout) == (0, "")
    said = re.findall(r"(?:GrowthWarning|^growkern: warning): .*", done.stderr, re.M)
    # others than the first one print theirs if a run fails before they were compared
    alone = ["growkern: warning: rank 1: before a failure"][: ranks - 1]
    assert sorted(said) == sorted([*warned, "GrowthWarning: before a failure", *alone])
    state = json.loads((workplace / "out" / "trainer_state.json").read_text())
    assert len([line for line in state["log_history"] if "label_loss" in line]) == 6


@ONE
def test_the_header_counts_what_the_log_counts(workplace, capsys):  # noqa: F811
    """Every token has a label here, so that the estimate has nothing to guess."""
    length = "sequence_length = 16"
    text = RUN.replace(length, f"{length}\nmasking_probability = 0.999999")
    text = text.replace("[two_stage]\nlayers_per_block = 1\nstage1_steps = 3\n", "")
    text = text.replace('[inheritance]\nend_step = 4\n[teacher]\npaths = ["teacher"]\n', "")
    (workplace / "run.toml").write_text(text)
    train(workplace / "run.toml")
    header = values(capsys.readouterr().out)["FLOPs"]
    state = json.loads((workplace / "out" / "trainer_state.json").read_text())
    number, unit = header.removesuffix(" in a full step").split(" ")
    estimate = float(number) * {"k": 1e3, "M": 1e6}[unit]
    # [CLS] and [SEP] are never masked
    assert estimate == pytest.approx(state["total_flos"] / 6, rel=0.1)


@ONE
def test_a_cut_model_is_not_a_finished_run(workplace, capsys):  # noqa: F811
    file, out = workplace / "run.toml", workplace / "out"
    train(file, progress=False)
    model = out / "model.safetensors"
    whole = model.read_bytes()
    for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), b""):
        model.write_bytes(damaged)
        with pytest.warns(GrowthWarning, match=r"the trained model in .* is damaged"):
            train(file, progress=False)
        assert model.read_bytes() == whole
    for checkpoint in checkpoints_in(out):
        checkpoint.rename(workplace / checkpoint.name)
    model.write_bytes(whole[:-1])
    with pytest.raises(GrowthError, match=r"damaged \(model.safetensors has .* no checkpoints"):
        train(file, progress=False)
    assert model.read_bytes() == whole[:-1]


def test_the_command_to_resume(monkeypatch, tmp_path):
    file = tmp_path / "my run.toml"
    assert resume_command(file) == f"growkern train '{file}'"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert resume_command(file) == f"torchrun --nproc_per_node=2 -m growkern train '{file}'"
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert resume_command(file).startswith("torchrun --nproc_per_node=4 ... (as before")
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert resume_command(file) == f"srun --ntasks=8 ... (as before) growkern train '{file}'"
    # srun has started torchrun
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert resume_command(file).startswith("torchrun")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *((0, "0"), (999, "999"), (1000, "1 k"), (8390, "8.39 k"), (110e6, "110 M"), (1e15, "1 P")),
        # rounded to three digits it has the next prefix; and FLOPs of a large training
        *((999.7, "1 k"), (999_600, "1 M"), (-999_600, "-1 M"), (3.2e24, "3.2 Y")),
    ],
)
def test_numbers_are_short(number, text):
    assert human(number) == text


def test_counts_and_lists_are_english():
    words = [counted(n, noun) for noun in ("row", "process") for n in (0, 1, 2)]
    assert words == ["0 rows", "1 row", "2 rows", "0 processes", "1 process", "2 processes"]
    assert [listed(["a", "b", "c"], n) for n in (1, 3)] == ["a and 2 more", "a, b, c"]
