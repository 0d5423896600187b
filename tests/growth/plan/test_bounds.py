"""What is only nearly exact: how far it moves outputs is measured on the source, by `verify`."""

import math

import pytest
import torch
import transformers

import growkern
from growkern.growth.plan.tensors.gather import Gather
from growkern.growth.plan.tensors.norm import Norm
from growkern.growth.record.verdict import measured_level
from testbed.families import FAMILIES
from testbed.models import BERT, GPT2, random_model, relative_error

EXACT = 1e-12
TOKENS = "new tokens (nats)"
PLANNED = "error of inexact norms"


@pytest.mark.parametrize("std", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("class_name", ["BertModel", "RobertaModel"])
def test_errors_of_an_uneven_width_are_those_of_a_source_with_the_same_norms(class_name, std):
    source = random_model(class_name, BERT, std=std)
    for how in ({"hidden_size": 16, "carry": 0.5}, {"hidden_size": 20, "carry": 0.1}):
        grown = growkern.grow(source, **how)
        (said,) = (f for f in grown.growth_plan.findings if f.level != "exact")
        report = growkern.verify(source, grown)
        error = report.outputs["relative error"]
        assert said.level == report.level == "approximate" and report.ok and said.bound is None
        planned = report.outputs[PLANNED]
        assert 1e-9 < error == pytest.approx(planned, rel=0.2)
        wrong = measured_level(
            grown.growth_plan, {**report.outputs, "relative error": 2.1 * planned}, torch.float64
        )[1]
        assert "planned approximate" in wrong


WRONG = [
    ("BertModel", {"hidden_size": 20}),
    ("BertModel", {"hidden_size": 20, "carry": 0.1}),
    ("RobertaModel", {"num_hidden_layers": 5, "depth": "identity"}),
]


@pytest.mark.parametrize("class_name, how", WRONG)
@pytest.mark.parametrize("kind, build", [(Norm, "values"), (Gather, "gather")])
def test_a_growth_wrong_on_purpose_is_no_error_of_norms(class_name, how, kind, build, monkeypatch):
    """A rebuild by the same wrong rule shows nothing: the outputs alone do."""
    source = random_model(class_name, BERT, std=0.3)
    assert growkern.verify(source, growkern.grow(source, **how)).ok
    right = getattr(kind, build)

    def norm(own, *args):
        return right(own, *args) * (1.1 if own.task.name.endswith("weight") else 1.0)

    def weight(own, axes, read, part, out, work):
        right(own, axes, read, part, out, work)
        if own.task.name.endswith("intermediate.dense.bias"):
            work.then(lambda: out.mul_(1.5))

    monkeypatch.setattr(kind, build, norm if kind is Norm else weight)
    report = growkern.verify(source, growkern.grow(source, **how))
    # wrong norms show in outputs alone, and other tensors by their inverse too
    assert not report.ok and (kind is not Norm or "outputs differ" in report.failure)
    assert all(group.rebuilt_error == 0 for group in report.groups)


def test_a_text_with_a_small_output_is_compared_beside_others():
    """One label: single texts may have outputs near 0, and were compared relative to these."""
    source = random_model("BertForSequenceClassification", {**BERT, "num_labels": 1})
    grown = growkern.grow(source, hidden_size=20, carry=0.1)
    texts = torch.randint(3, 50, (2000, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        old, new = (model(input_ids=texts).logits[:, 0] for model in (source, grown))
    smallest = int(old.abs().argmin())
    report = growkern.verify(source, grown, tokens=texts[smallest : smallest + 1])
    assert report.ok and report.level == "approximate", report.failure
    alone = ((new - old).abs() / old.abs())[smallest]
    assert report.outputs["relative error"] < alone / 2


def _sharp(seed, sharpness, gamma=1.0):
    """A RoBERTa whose attention picks few tokens, and with norm weights around `gamma`."""
    source = random_model("RobertaModel", BERT, seed=seed, num_hidden_layers=4, layer_norm_eps=1e-5)
    with torch.no_grad():
        for name, weight in source.named_parameters():
            if name.endswith(("query.weight", "key.weight")):
                weight *= sharpness
            elif name.endswith("LayerNorm.weight"):
                weight *= gamma
    return source


@pytest.mark.parametrize("seed, sharpness, gamma", [(0, 1, 1), (1, 1, 0.05), (6, 3, 1), (7, 10, 1)])
def test_errors_of_identity_blocks_are_those_of_a_source_with_such_norms(seed, sharpness, gamma):
    source = _sharp(seed, sharpness, gamma)
    grown = growkern.grow(source, num_hidden_layers=6, depth="identity")
    for text in range(2):
        tokens = torch.randint(3, 50, (4, 16), generator=torch.Generator().manual_seed(text))
        report = growkern.verify(source, grown, tokens=tokens)
        assert report.ok and report.level == "approximate", report.failure
        assert report.outputs["relative error"] == pytest.approx(report.outputs[PLANNED], rel=0.2)


EPS = {"layer_norm_eps": 1e-12, "embedding_size": 8}


@pytest.mark.parametrize("gain", [1.0, 1e-8])
@pytest.mark.parametrize("class_name", ["BertForMaskedLM", "ElectraModel", "RobertaModel"])
def test_identity_blocks_behind_inputs_of_a_small_variance(class_name, gain):
    source = random_model(class_name, {**BERT, **EPS})
    with torch.no_grad():
        for name, weight in source.named_parameters():
            # the norms in front of the inserted blocks get small inputs
            if name.endswith("output.dense.weight") or "LayerNorm" in name:
                weight *= 0.1
    grown = growkern.grow(source, num_hidden_layers=5, identity_gain=gain)
    assert grown.growth_plan.exact
    report = growkern.verify(source, grown)
    assert report.ok and report.level == "exact"
    # the smallest gain is exact to the last digit
    assert gain == 1.0 or report.outputs["relative error"] <= EXACT


def test_norms_that_move_the_outputs_far_fail():
    source = random_model("BertModel", BERT)
    for name, weight in source.named_parameters():
        if name.endswith("LayerNorm.weight"):
            weight.data *= torch.linspace(-5, 5, len(weight))
    report = growkern.verify(source, growkern.grow(source, hidden_size=20))
    assert not report.ok and report.level == "changed"


def test_a_plan_runs_no_source():
    how = {"num_hidden_layers": 5, "depth": "identity"}
    with torch.device("meta"):
        source = transformers.RobertaModel(_sharp(0, 1).config)
    (said,) = (f for f in growkern.plan(source, **how).findings if f.level != "exact")
    assert said.level == "approximate"


def test_extra_coordinates_of_norms_with_equal_weights_are_exact():
    config = transformers.BertConfig(**BERT)
    source = transformers.BertModel(config).double().eval()
    grown = growkern.grow(source, hidden_size=20)
    assert grown.growth_plan.exact and relative_error(source, grown) <= EXACT


def test_an_error_that_layers_enlarge_is_called_changed():
    """ModernBERT's layers enlarge the error of the norm after its embeddings."""
    source = random_model("ModernBertModel", FAMILIES["modernbert"][1], std=1.0)
    grown = growkern.grow(source, hidden_size=20)
    (said,) = (f for f in grown.growth_plan.findings if f.level != "exact")
    report = growkern.verify(source, grown)
    assert said.level == "changed" and said.bound is None and "enlarge this" in said.why
    assert not report.ok and report.outputs["relative error"] > 0.01


OUTPUT_ROWS = [
    ("LlamaForCausalLM", {**FAMILIES["llama"][1], "tie_word_embeddings": False}, "hidden_size"),
    ("GPT2LMHeadModel", FAMILIES["gpt2"][1], "n_embd"),
    ("BertForMaskedLM", BERT, "hidden_size"),
]


def offset_model(class_name, sizes, offset, dtype):
    """A model whose rows of output weights have a part in common, and the rows' mean is rounded."""
    source = random_model(class_name, sizes, std=0.3)
    rows = source.get_output_embeddings().weight
    shared = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(1)).to(rows)
    with torch.no_grad():
        rows += offset * shared
    return source.to(dtype)


@pytest.mark.parametrize(
    "dtype, offset",
    [(torch.bfloat16, 0.0), (torch.float16, 5.0), (torch.bfloat16, 20.0), (torch.float16, 100.0)],
)
@pytest.mark.parametrize("class_name, sizes, width", OUTPUT_ROWS)
def test_rows_of_new_tokens_cost_what_rounding_explains(class_name, sizes, width, dtype, offset):
    source = offset_model(class_name, sizes, offset, dtype)
    vocabulary = source.config.vocab_size
    for how in ({}, {width: 2 * sizes[width]}):
        grown = growkern.grow(source, vocab_size=vocabulary + 14, **how)
        (said,) = (f for f in grown.growth_plan.findings if f.measure == TOKENS)
        report = growkern.verify(source, grown)
        most = said.bound + 0.1 * math.log(vocabulary)
        assert report.ok == (report.outputs[TOKENS] <= most + 1e-9), report.failure
        assert report.ok or offset >= 20
        # a row that is wrong costs more
        if report.ok:
            with torch.no_grad():
                grown.get_output_embeddings().weight[-1] *= 30
            assert not growkern.verify(source, grown).ok


def test_many_new_tokens_cost_what_was_asked_for():
    """In any dtype: as much as a guess costs, with 100 times as many tokens."""
    source = random_model("GPT2LMHeadModel", GPT2)
    for times, level in ((20, "approximate"), (100, "changed")):
        plan = growkern.plan(source, vocab_size=times * 50)
        (said,) = (f for f in plan.findings if f.measure == TOKENS)
        assert said.level == level and f"{math.log(times):.2g} nats" in said.why
        assert said.asked == (level == "changed")
    with pytest.warns(growkern.errors.FunctionChangedWarning, match="that guessing costs"):
        grown = growkern.grow(source, vocab_size=100 * 50)
    report = growkern.verify(source, grown)
    assert report.ok and report.level == "changed"


def test_gains_of_inserted_blocks_are_rounded_in_16_bits():
    """Where K is small beside the norms' epsilon, their gains do not cancel any more."""
    source = random_model("BertModel", BERT, dtype=torch.bfloat16, layer_norm_eps=1e-2)
    grown = growkern.grow(source, num_hidden_layers=4, identity_gain=1e-8)
    said = {finding.what: finding.level for finding in grown.growth_plan.findings}
    assert said["2 -> 4 layers"] == "exact" and said["bfloat16"] == "approximate"
    report = growkern.verify(source, grown)
    assert report.ok and report.outputs["relative error"] > 1e-4
    # with the usual epsilon all gains are 1
    usual = random_model("BertModel", BERT, dtype=torch.bfloat16, layer_norm_eps=1e-12)
    said = growkern.plan(usual, num_hidden_layers=4).findings
    assert said[-1].what == "bfloat16" and said[-1].level == "exact"


def test_blocks_that_float16_cannot_hold_are_refused():
    source = random_model("BertModel", BERT, dtype=torch.float16)
    with pytest.raises(growkern.GrowthError, match=r"identity_gain=1e-08 is below 6\.1e-05"):
        growkern.plan(source, num_hidden_layers=4, identity_gain=1e-8)
    assert growkern.plan(source, num_hidden_layers=4, identity_gain=1e-3)
    # norms in front of blocks need no gain, and random weights neither
    ahead = random_model("GPT2LMHeadModel", GPT2, dtype=torch.float16)
    for how in ({"source": ahead, "n_layer": 4}, {"source": source, "method": "random"}):
        sizes = {} if "n_layer" in how else {"num_hidden_layers": 4}
        with pytest.raises(growkern.GrowthError, match="identity_gain=1e-08 has no effect"):
            growkern.plan(**how, **sizes, identity_gain=1e-8)


@pytest.mark.parametrize("width", [2, 8])
def test_rounding_is_unbounded_behind_norms_over_few_coordinates(width):
    """Over two coordinates a norm returns little more than a sign, which rounding can flip."""
    source = random_model("GPT2LMHeadModel", {**GPT2, "n_embd": width, "n_head": 1})
    said = growkern.plan(source, n_layer=4, dtype=torch.bfloat16).findings[-1]
    assert said.what == "bfloat16" and said.level == ("changed" if width == 2 else "approximate")


@pytest.mark.parametrize("seed", [4, 134])
def test_pairs_that_turn_slowly_are_off_by_little(seed):
    """A sharp model, one text of which moves 80 times as far as the others."""
    rope = {
        **{"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0},
        **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8},
    }
    sizes = {
        **{"vocab_size": 53, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 4},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
        **{"max_position_embeddings": 128, "rope_parameters": rope, "pad_token_id": 0},
        **{"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logits_scaling": 2.0},
        **{"attention_multiplier": 0.4, "tie_word_embeddings": False},
    }
    torch.manual_seed(seed)
    config = transformers.GraniteConfig(**sizes)
    source = transformers.GraniteForCausalLM._from_config(config, dtype=torch.float64).eval()
    for weight in source.parameters():
        drawn = torch.randn_like(weight)
        weight.data = drawn * 0.5 if weight.ndim > 1 else 1 + 0.4 * drawn
    grown = growkern.grow(source, head_dim=12)
    (said,) = (f for f in grown.growth_plan.findings if f.level != "exact")
    ids = torch.randint(3, 53, (4, 128))
    with torch.no_grad():
        old, new = source(ids).logits, grown(ids).logits
    report = growkern.verify(source, grown, tokens=ids)
    assert said.level == report.level == "approximate" and report.ok
    assert (new - old).abs().max() / old.abs().max() <= report.bound <= 0.1
