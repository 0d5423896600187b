"""`verify` of models that are too large for float64; here the limit is 0 parameters.

Their outputs carry the rounding of 16-bit arithmetic, which is measured on the source.
"""

import itertools
import math

import pytest
import torch

import growkern
from growkern.growth.record import verify as verifying
from growkern.growth.record.verdict import measured_level
from testbed.families import FAMILIES
from testbed.models import random_model

ARITHMETIC = "error of 16-bit arithmetic"
WIDTH = {"gpt2": "n_embd", "t5": "d_model", "bart": "d_model"}


@pytest.fixture
def nothing_fits(monkeypatch):
    monkeypatch.setattr(verifying, "fits", lambda source: False)


def pair(model_type, dtype, into=None, **how):
    class_name, sizes = FAMILIES[model_type]
    source = random_model(class_name, sizes, dtype=dtype, seed=1)
    field = WIDTH.get(model_type, "hidden_size")
    return source, growkern.grow(source, dtype=into, **{field: 2 * sizes[field]}, **how)


def scale_outputs_of(grown, share, monkeypatch):
    """Let the grown model's outputs be off by a share of themselves; no tensor shows it."""
    load = verifying.float32_model

    def scaled(_module, _inputs, output):
        for name in ("logits", "prediction_logits", "last_hidden_state"):
            if name in output:
                output[name] = output[name] * (1 + share)
        return output

    def load_scaled(source, given):
        model = load(source, given)
        if given is grown:
            model.register_forward_hook(scaled)
        return model

    monkeypatch.setattr(verifying, "float32_model", load_scaled)


@pytest.mark.usefixtures("nothing_fits")
@pytest.mark.parametrize(
    "model_type, dtype",
    [*zip(FAMILIES, itertools.cycle((torch.bfloat16, torch.float16)), strict=False)],
)
def test_an_error_just_above_rounding_in_16_bits_is_caught(model_type, dtype, monkeypatch):
    source, grown = pair(model_type, dtype)
    plan = grown.growth_plan
    report = growkern.verify(source, grown)
    sample = report.outputs[ARITHMETIC]
    assert report.ok and report.level == ("exact" if plan.exact else "approximate")
    samples = [sample, report.outputs["error of a rounded source"] if plan.rounds_weights else 0.0]
    allowed = 1e-4 + 2 * sum(samples)
    # the rounding of the grown model itself may hide a part as large as the sample
    scale_outputs_of(grown, allowed + 1.5 * sample, monkeypatch)
    wrong = growkern.verify(source, grown)
    assert not wrong.ok and wrong.level == "changed" and "outputs differ" in wrong.failure
    assert wrong.outputs[ARITHMETIC] == sample


@pytest.mark.usefixtures("nothing_fits")
def test_a_fixed_number_of_roundings_would_hide_errors(monkeypatch):
    """16 steps of bfloat16 are an eighth of the largest output. Three steps are caught."""
    source, grown = pair("gpt2", torch.bfloat16, stream="copies")
    scale_outputs_of(grown, 3 * torch.finfo(torch.bfloat16).eps, monkeypatch)
    assert not growkern.verify(source, grown).ok


@pytest.mark.usefixtures("nothing_fits")
@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_model_of_another_dtype_is_held_against_a_source_of_that_dtype(dtypes):
    old, new = (getattr(torch, name) for name in dtypes)
    source, grown = pair("llama", old, new)
    report = growkern.verify(source, grown)
    assert report.ok and report.level == ("exact" if new == torch.float32 else "approximate")
    names = (ARITHMETIC, "error of a rounded source")
    allowed = 1e-4 + 2 * sum(report.outputs.get(name, 0.0) for name in names)
    assert 0 < report.outputs["relative error"] <= allowed


@pytest.mark.usefixtures("nothing_fits")
def test_rounded_weights_of_a_directory_are_held_against_a_rounded_source(tmp_path):
    """Its models run in float32, and no rounding of arithmetic may hide an error."""
    small, large = tmp_path / "small", tmp_path / "large"
    class_name, sizes = FAMILIES["llama"]
    random_model(class_name, sizes, dtype=torch.float32).save_pretrained(small)
    width = 2 * sizes["hidden_size"]
    growkern.grow_checkpoint(small, large, progress=False, dtype=torch.bfloat16, hidden_size=width)
    report = growkern.verify(small, large)
    sample = report.outputs["error of a rounded source"]
    assert report.ok and report.level == "approximate" and ARITHMETIC not in report.outputs
    assert report.outputs["relative error"] <= 2 * sample
    assert report.plan.rounds_weights and report.bound == pytest.approx(1e-4 + 2 * sample)


@pytest.mark.usefixtures("nothing_fits")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bound_on_new_tokens_has_room_for_rounded_logits(dtype):
    """Logits that are nearly equal, where the bound is tight, and large enough to be rounded."""
    class_name, sizes = FAMILIES["gpt2"]
    source = random_model(class_name, sizes, std=0.01)
    with torch.no_grad():
        source.lm_head.weight += 1
        source.transformer.ln_f.bias += 1
    source = source.to(dtype)
    grown = growkern.grow(source, vocab_size=2 * source.config.vocab_size)
    report = growkern.verify(source, grown)
    assert report.ok and report.level == "approximate", report.failure
    (said,) = (f for f in report.plan.findings if f.measure == "new tokens (nats)")
    rise = report.outputs["new tokens (nats)"]
    room = 2 * report.outputs["rounded logits (nats)"]
    assert 0.95 * math.log(2) < rise <= said.bound + room
    level, wrong = measured_level(
        report.plan,
        {**report.outputs, "new tokens (nats)": said.bound + room + 2e-4},
        torch.float32,
    )
    assert level == "changed" and "new tokens raise the loss" in wrong


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
@pytest.mark.usefixtures("nothing_fits")
def test_constants_of_models_stay_rounded_to_their_dtype(model_type, tmp_path):
    """Gemma multiplies by the root of its width, which bfloat16 rounds and float32 does not."""
    class_name, sizes = FAMILIES[model_type]
    small, large = tmp_path / "small", tmp_path / "large"
    random_model(class_name, sizes, dtype=torch.bfloat16).save_pretrained(small)
    width = 2 * sizes["hidden_size"]
    growkern.grow_checkpoint(small, large, progress=False, dtype=torch.float32, hidden_size=width)
    report = growkern.verify(small, large)
    assert report.plan.exact and report.ok and report.outputs["relative error"] < 1e-4
