"""`growkern train` with each objective: it learns, resumes to the bit, and refuses in one line."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from examples import objectives as example
from examples.objectives import MODELS, make_model
from growkern import GrowthError, ReplacedTokenDetection, grow
from growkern import run as train
from growkern.errors import GrowthWarning
from growkern.plot.curves import read_curve
from growkern.publish.manifest import differences
from growkern.train.model.load import has_tokenizer
from growkern.train.safety.export import export
from testbed import warm
from testbed.forked_ranks import on_ranks
from tests.train.distributed import run_ranks
from tests.train.objectives.places import data_of, model_of, place_of, tokenizer

# what the loss of one batch may differ from the mean
NOISE = 0.9


def history(directory):
    return json.loads((directory / "trainer_state.json").read_text())["log_history"]


def losses_in(directory):
    return [line["loss"] for line in history(directory) if "loss" in line]


@pytest.mark.parametrize("objective", MODELS)
def test_every_objective_learns_from_real_text(objective, tmp_path, capsys):
    run = place_of(tmp_path, objective)
    train(run)
    losses = losses_in(tmp_path / "out")
    assert len(losses) == 50
    assert np.mean(losses[-5:]) < NOISE * np.mean(losses[:5])
    said = capsys.readouterr().out
    assert f"\nobjective  {objective}" in said
    if objective in ("mlm+nsp", "rtd"):
        assert "through the fused loss" in said and "added plainly" in said
    # a line of the plot, with FLOPs as the header says
    curve = read_curve(tmp_path / "out")
    assert curve.validation and len(curve.losses) == 1 and curve.flops[0] > 0
    place = tmp_path / "out"
    cls = getattr(transformers, MODELS[objective][0])
    assert type(cls.from_pretrained(place)) is cls
    if objective == "rtd":
        generator = transformers.ElectraForMaskedLM.from_pretrained(place / "generator")
        first = load_file(tmp_path / "generator" / "model.safetensors")
        weight = generator.electra.embeddings.word_embeddings.weight
        assert not torch.equal(first["electra.embeddings.word_embeddings.weight"], weight)


@pytest.mark.parametrize("objective", ["mlm+nsp", "span_corruption", "rtd"])
def test_resumed_equals_straight_bit_for_bit(objective, tmp_path):
    """The draws of a batch follow from the seed, the epoch and the rows."""
    shared = "shared_embeddings = true" if objective == "rtd" else ""
    run = place_of(tmp_path, objective, steps=6, model=shared)
    train(run, progress=False)
    out = tmp_path / "out"
    files = [file.relative_to(out) for file in out.rglob("model.safetensors")]
    straight = {file: load_file(out / file) for file in files}
    assert len(files) == (6 if objective == "rtd" else 3)
    before = losses_in(out)
    # killed after step 3, its only checkpoint
    shutil.rmtree(out / "checkpoint-6")
    for path in out.iterdir():
        if path.name not in ("checkpoint-3", "run.json"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert train(run, progress=False).global_step == 6
    assert losses_in(out) == before
    for file, weights in straight.items():
        for name, value in load_file(out / file).items():
            assert torch.equal(value, weights[name]), (file, name)


def test_an_export_and_a_second_save_hold_both_models(tmp_path):
    run, out = place_of(tmp_path, "rtd", steps=2), tmp_path / "out"
    train(run, progress=False)
    (out / "model.safetensors").unlink()
    with pytest.warns(GrowthWarning, match="made again from the last whole checkpoint"):
        train(run, progress=False)
    export(out, tmp_path / "exported")
    for name in ("model.safetensors", "generator/model.safetensors"):
        one, other = (load_file(place / name) for place in (out, tmp_path / "exported"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert has_tokenizer(tmp_path / "exported" / "generator")
    assert not differences(out).wrong and not differences(tmp_path / "exported").wrong


PARTS = {"mlm+nsp": "nsp", "rtd": "rtd"}


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """A directory for each objective of PARTS, with its run file and the run of two processes."""
    folder = tmp_path_factory.mktemp("two")
    for objective in PARTS:
        (folder / objective).mkdir()
        place_of(folder / objective, objective, steps=4, training="accumulation = 2")
    script = [[f"{objective}/run.toml", None] for objective in PARTS]
    (folder / "script.json").write_text(json.dumps(script))
    on_ranks(2, run_ranks.__name__, folder)
    return folder


@pytest.mark.parametrize("objective", PARTS)
def test_two_processes_train_what_one_does(objective, two_processes):
    place = two_processes / objective
    two = history(place / "out")
    shutil.rmtree(place / "out")
    train(place / "run.toml", progress=False)
    one = history(place / "out")
    name = PARTS[objective]
    for key in ("loss", "mlm", name, f"{name}_accuracy", "eval_loss", f"eval_{name}", "flops"):
        values = [[line[key] for line in log if key in line] for log in (two, one)]
        assert values[0]
        np.testing.assert_allclose(*values, rtol=1e-3, err_msg=key)


def test_a_stage_of_sub_models_with_pairs(tmp_path):
    more = "[two_stage]\nlayers_per_block = 1\nstage1_steps = 3"
    run = place_of(tmp_path, "mlm+nsp", steps=6, more=more, data='objective = "mlm+nsp"')
    train(run, progress=False)
    lines = [line for line in history(tmp_path / "out") if "loss" in line]
    assert {line["depth"] for line in lines[:3]} <= {1.0, 2.0}
    assert all("nsp_accuracy" in line for line in lines)


def test_a_stream_of_corrupted_rows(tmp_path):
    run = place_of(tmp_path, "span_corruption", steps=4, data="streaming = true")
    train(run, progress=False)
    assert np.isfinite(losses_in(tmp_path / "out")).all()


def test_a_generator_and_a_discriminator_that_were_grown(tmp_path):
    """Growth leaves the embeddings as they are, so those that were shared still are."""
    generator = make_model("ElectraForMaskedLM", tokenizer("bert"), width=16)
    discriminator = model_of("rtd")
    names = ("word_embeddings", "position_embeddings", "token_type_embeddings")

    def tables(model):
        return [getattr(model.electra.embeddings, name).weight for name in names]

    with torch.no_grad():
        for p, q in zip(tables(generator), tables(discriminator), strict=True):
            p.copy_(q)
    run = place_of(tmp_path, "rtd", steps=4, model="shared_embeddings = true")
    grown = [
        grow(model, hidden_size=2 * width, intermediate_size=4 * width)
        for model, width in ((generator, 16), (discriminator, 32))
    ]
    for p, q in zip(*map(tables, grown), strict=True):
        assert torch.equal(p, q)
    # both predict as before
    rows, collator = data_of("rtd")
    batch = collator([rows[i] for i in range(4)])
    del batch["labels"]
    pairs = [(generator, discriminator), grown]
    before, after = (ReplacedTokenDetection(*pair).eval()(**batch) for pair in pairs)
    assert torch.equal(before.corrupted_ids, after.corrupted_ids)
    torch.testing.assert_close(before.logits, after.logits, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        before.detection_logits, after.detection_logits, atol=1e-5, rtol=1e-4
    )
    for model, folder in zip(grown, ("generator", "model"), strict=True):
        model.save_pretrained(tmp_path / folder)
    assert train(run, progress=False).global_step == 4


# ------------------------------------------------------------------- refusals

CACHE = '[teacher]\ncache = "kept"\n[inheritance]\nend_step = 4'
STAGES = "[two_stage]\nlayers_per_block = 1\nstage1_steps = 2"
GROWN = '[growth]\nsource = "model"\nsizes = { hidden_size = 64 }'
REFUSED = {
    "another class": (
        "mlm",
        {"data": 'objective = "clm"'},
        "BertForMaskedLM is trained with 'mlm'",
    ),
    "two stages": ("rtd", {"more": STAGES}, r"does not fit two stages: leave out \[two_stage\]"),
    "cached pairs": ("mlm+nsp", {"more": CACHE}, "not for pairs of passages: give the paths"),
    "cached decoder": ("denoising", {"more": CACHE}, "no decoder's predictions"),
    "a generator too many": (
        "mlm",
        {"model": 'generator = "model"'},
        "ElectraForPreTraining: leave",
    ),
    "shared without": (
        "mlm",
        {"model": "shared_embeddings = true"},
        "without generator: give both",
    ),
    "a stream of pairs": ("mlm+nsp", {"data": "streaming = true"}, "set data.streaming to false"),
    "own labels": (
        "span_corruption",
        {"data": 'objective = "span_corruption"\ninput_ids_column = "a"\nlabels_column = "b"'},
        "makes the labels itself: leave out data.labels_column",
    ),
    "rows that are not full": (
        "denoising",
        {"data": 'input_ids_column = "a"\npacking = false'},
        "needs full rows: leave out data.packing",
    ),
    "shards": ("rtd", {"more": '[distributed]\nsharding = "fsdp"'}, "set distributed.sharding to"),
    "weights": ("rtd", {"more": '[loss]\nrow_weights = "w"'}, "makes itself: leave it out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_do_not_fit_are_refused_before_any_work(case, tmp_path):
    objective, options, message = REFUSED[case]
    run = place_of(tmp_path, objective, **options)
    with pytest.raises(GrowthError, match=message) as refused:
        train(run, progress=False)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_discriminator_without_its_generator_is_refused(tmp_path):
    run = place_of(tmp_path, "rtd")
    text = run.read_text()
    run.write_text(text.replace('generator = "generator"', ""))
    done = warm.run("growkern", "train", run)
    assert done.returncode == 2
    assert "give the directory of an ElectraForMaskedLM as model.generator" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    run.write_text(text.replace('generator = "generator"', 'generator = "model"'))
    with pytest.raises(GrowthError, match="is not an ElectraForMaskedLM: give one"):
        train(run, progress=False)
    grown = text.replace('path = "model"', "") + GROWN
    run.write_text(grown)
    with pytest.raises(GrowthError, match=r"\[growth\], and grow both with growkern grow"):
        train(run, progress=False)


def test_a_generator_of_another_tokenizer_is_refused(tmp_path):
    run = place_of(tmp_path, "rtd")
    words = tokenizer("bart")
    words.save_pretrained(tmp_path / "generator")
    with pytest.raises(GrowthError, match="generator has another tokenizer than the run"):
        train(run, progress=False)


def test_a_tokenizer_without_sentinels_is_refused(tmp_path):
    run = place_of(tmp_path, "span_corruption")
    for file in (tmp_path / "model").glob("tokenizer*"):
        file.unlink()
    tokenizer("bert").save_pretrained(tmp_path / "model")
    with pytest.raises(GrowthError, match="needs a tokenizer with the tokens <extra_id_0>"):
        train(run, progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("objective", MODELS)
def test_the_example_trains_with_every_objective(objective, tmp_path):
    trainer = example.train(objective, tmp_path)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert np.mean(losses[-5:]) < NOISE * np.mean(losses[:5])
