"""The bounds of plans on the outputs: they hold for other texts, and are measured for the model."""

import math

import pytest
import torch
import transformers

import growkern
from growkern.growth.plan.finding import says_something
from growkern.growth.record.verdict import measured_level
from testbed.families import FAMILIES
from testbed.models import BERT, GPT2, random_model, relative_error

EXACT = 1e-12


@pytest.mark.parametrize("std", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("class_name", ["BertModel", "RobertaModel"])
def test_the_printed_bound_of_an_uneven_width_holds(class_name, std):
    source = random_model(class_name, BERT, std=std)
    for how in ({"hidden_size": 16, "carry": 0.5}, {"hidden_size": 20, "carry": 0.1}):
        grown = growkern.grow(source, **how)
        (said,) = (f for f in grown.growth_plan.findings if f.level != "exact")
        report = growkern.verify(source, grown)
        error = report.outputs["relative error"]
        assert said.level == "approximate" and f"{said.bound:.1e}" in said.why
        assert report.ok and report.level == "approximate" and 1e-9 < error <= said.bound
        # the number that is checked is the printed one
        level, wrong = measured_level(
            grown.growth_plan, {"relative error": 1.01 * said.bound}, torch.float64
        )
        assert level == "changed" and f"planned approximate within {said.bound:.1e}" in wrong


def test_the_bound_holds_for_a_text_with_a_small_output():
    """One label: single texts may have outputs near 0, and were compared relative to these."""
    sizes = {**BERT, "num_labels": 1}
    source = random_model("BertForSequenceClassification", sizes)
    grown = growkern.grow(source, hidden_size=20, carry=0.1)
    (said,) = (f for f in grown.growth_plan.findings if f.level == "approximate")
    assert "of the largest output on random texts" in said.why
    texts = torch.randint(3, 50, (2000, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        old, new = (model(input_ids=texts).logits[:, 0] for model in (source, grown))
    smallest = int(old.abs().argmin())
    assert (new - old).abs()[smallest] > 2 * said.bound * old.abs()[smallest]
    report = growkern.verify(source, grown, tokens=texts[smallest : smallest + 1])
    assert report.ok and report.level == "approximate", report.failure
    assert report.outputs["relative error"] <= said.bound


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
def test_the_bound_of_identity_blocks_is_measured_for_the_model(seed, sharpness, gamma):
    """A factor for all models was too small for sharp attention and for small norm weights."""
    source = _sharp(seed, sharpness, gamma)
    grown = growkern.grow(source, num_hidden_layers=6, depth="identity")
    (said,) = (f for f in grown.growth_plan.findings if f.level == "approximate")
    errors = []
    for text in range(8):
        tokens = torch.randint(3, 50, (4, 16), generator=torch.Generator().manual_seed(text))
        report = growkern.verify(source, grown, tokens=tokens)
        assert report.ok and report.level == "approximate", report.failure
        errors.append(report.outputs["relative error"])
    assert max(errors) <= said.bound
    # nor is it far too large where texts do not differ
    assert gamma == 1 or max(errors) > said.bound / 20


EPS = {"layer_norm_eps": 1e-12, "embedding_size": 8}


@pytest.mark.parametrize("gain", [1.0, 1e-3, 1e-8])
@pytest.mark.parametrize("std", [0.02, 0.3])
@pytest.mark.parametrize("class_name", ["BertForMaskedLM", "ElectraModel", "RobertaModel"])
def test_identity_blocks_are_measured_for_any_eps_of_the_norms(class_name, std, gain):
    """An eps of 1e-12 was taken for exact. Inputs of a small variance make 1e-9 of it."""
    source = random_model(class_name, {**BERT, **EPS}, std=std)
    with torch.no_grad():
        for name, weight in source.named_parameters():
            # the norms in front of the inserted blocks get small inputs
            if name.endswith("output.dense.weight") or "LayerNorm" in name:
                weight *= 0.1
    grown = growkern.grow(source, num_hidden_layers=5, identity_gain=gain)
    (said,) = grown.growth_plan.findings
    assert "outputs by at most" in said.why
    error, report = relative_error(source, grown), growkern.verify(source, grown)
    error = max(error, report.outputs["relative error"])
    assert report.ok and report.level == said.level
    assert error <= (EXACT if said.level == "exact" else said.bound)
    # the default gain is not exact here, the smallest one is as good as it
    assert gain == 1e-3 or said.level == ("approximate" if gain == 1.0 else "exact")


def test_texts_that_move_the_outputs_far_more_than_others_leave_no_bound():
    source = _sharp(2, 10)
    grown = growkern.grow(source, num_hidden_layers=6, depth="identity")
    (said,) = (f for f in grown.growth_plan.findings if f.level != "exact")
    report = growkern.verify(source, grown)
    assert said.level == report.level == "changed" and not report.ok


def test_norms_over_two_coordinates_leave_no_bound():
    sizes = {**BERT, "hidden_size": 2, "num_attention_heads": 1, "layer_norm_eps": 1e-2}
    plan = growkern.plan(random_model("BertModel", sizes), num_hidden_layers=3, depth="identity")
    assert plan.findings[-1].level == "changed"


def test_a_source_that_cannot_be_run_has_no_bound():
    how = {"num_hidden_layers": 5, "depth": "identity"}
    with torch.device("meta"):
        source = transformers.RobertaModel(_sharp(0, 1).config)
    (said,) = (f for f in growkern.plan(source, **how).findings if f.level != "exact")
    assert said.level == "changed" and "cannot be run here" in said.why


def test_extra_coordinates_of_norms_with_equal_weights_are_exact():
    config = transformers.BertConfig(**BERT)
    source = transformers.BertModel(config).double().eval()
    grown = growkern.grow(source, hidden_size=20)
    assert grown.growth_plan.exact and relative_error(source, grown) <= EXACT


def test_an_error_that_no_bound_holds_for_is_called_changed():
    """ModernBERT's layers enlarge the error of the norm after its embeddings."""
    source = random_model("ModernBertModel", FAMILIES["modernbert"][1], std=1.0)
    grown = growkern.grow(source, hidden_size=20)
    (said,) = (f for f in grown.growth_plan.findings if f.level != "exact")
    report = growkern.verify(source, grown)
    assert said.level == "changed" and said.bound is None and "enlarge this" in said.why
    assert not report.ok and report.outputs["relative error"] > 0.01
    # so is a bound that says nothing
    source = random_model("BertModel", BERT)
    for name, weight in source.named_parameters():
        if name.endswith("LayerNorm.weight"):
            weight.data *= torch.linspace(-5, 5, len(weight))
    assert {f.level for f in growkern.plan(source, hidden_size=20).findings} >= {"changed"}


def test_rotary_angles_of_a_model_that_cannot_be_run_have_no_bound():
    """A bound in radians says nothing of the outputs: they may be off a hundred times as far."""
    sizes = {**FAMILIES["llama"][1], "head_dim": 4, "max_position_embeddings": 4096}
    measured = growkern.plan(random_model("LlamaForCausalLM", sizes), head_dim=6)
    assert all("measure" not in finding.why for finding in measured.findings)
    with torch.device("meta"):
        empty = random_model("LlamaForCausalLM", sizes)
    (said,) = (f for f in growkern.plan(empty, head_dim=6).findings if f.level != "exact")
    assert said.level == "changed" and "cannot be run here to measure" in said.why


OUTPUT_ROWS = [
    ("LlamaForCausalLM", {**FAMILIES["llama"][1], "tie_word_embeddings": False}, "hidden_size"),
    ("GPT2LMHeadModel", FAMILIES["gpt2"][1], "n_embd"),
    ("BertForMaskedLM", BERT, "hidden_size"),
]


TOKENS = "new tokens (nats)"


def offset_model(class_name, sizes, offset, dtype):
    """A model whose rows of output weights have a part in common, and the rows' mean is rounded."""
    source = random_model(class_name, sizes, std=0.3)
    rows = source.get_output_embeddings().weight
    shared = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(1)).to(rows)
    with torch.no_grad():
        rows += offset * shared
    return source.to(dtype)


@pytest.mark.filterwarnings("ignore::growkern.errors.FunctionChangedWarning")
@pytest.mark.parametrize("offset", [0.0, 5.0, 20.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("class_name, sizes, width", OUTPUT_ROWS)
def test_the_bound_on_new_tokens_holds_for_rounded_rows(class_name, sizes, width, dtype, offset):
    """Or the plan says "changed", as a bound that a guess would keep too says nothing."""
    source = offset_model(class_name, sizes, offset, dtype)
    vocabulary = source.config.vocab_size
    unrounded = math.log(1 + 14 / vocabulary)
    for how in ({}, {width: 2 * sizes[width]}):
        grown = growkern.grow(source, vocab_size=vocabulary + 14, **how)
        (said,) = (f for f in grown.growth_plan.findings if f.measure == TOKENS)
        report = growkern.verify(source, grown)
        assert report.level == said.level
        if said.level == "approximate":
            assert said.bound - unrounded <= 0.1 * math.log(vocabulary)
            assert report.outputs[TOKENS] <= said.bound and report.ok, report.failure
        else:
            assert offset >= 20 and said.bound is None and not report.ok


@pytest.mark.parametrize("class_name, sizes, width", OUTPUT_ROWS)
def test_a_bound_that_says_nothing_is_called_changed_everywhere(class_name, sizes, width):
    source = offset_model(class_name, sizes, 100.0, torch.bfloat16)
    vocabulary = source.config.vocab_size
    how = {"vocab_size": vocabulary + 14, width: 2 * sizes[width]}
    (said,) = (f for f in growkern.plan(source, **how).findings if f.measure == TOKENS)
    assert said.level == "changed" and not said.asked
    advised = said.why
    assert f"too much beside the {math.log(vocabulary):.2g} nats that guessing costs" in said.why
    with pytest.warns(growkern.errors.FunctionChangedWarning, match="that guessing costs"):
        grown = growkern.grow(source, **how)
    report = growkern.verify(source, grown)
    assert not report.ok and report.level == "changed" and "guessing costs" in report.failure
    # what the message recommends has a bound
    wide = growkern.grow(source, dtype=torch.float32, **how)
    (said,) = (f for f in wide.growth_plan.findings if f.measure == TOKENS)
    assert said.level == "approximate" and f"it is {said.bound:.2g} nats in float32" in advised
    assert growkern.verify(source, wide).level == "approximate"


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


def test_a_bound_must_be_below_what_it_bounds():
    assert says_something(0.1) and not says_something(0.11) and not says_something(math.nan)
    # what the sizes cost may be more, but no more than all
    assert says_something(2.3, size=4.0, asked=2.0) and not says_something(4.0, 4.0, asked=4.0)
    assert not says_something(2.5, size=4.0, asked=2.0) and not says_something(math.inf, 4.0, 1.0)


def test_gains_of_inserted_blocks_are_rounded_in_16_bits():
    """Where K is small beside the norms' epsilon, their gains do not cancel any more."""
    source = random_model("BertModel", BERT, dtype=torch.bfloat16, layer_norm_eps=1e-2)
    grown = growkern.grow(source, num_hidden_layers=4, identity_gain=1e-8)
    said = {finding.what: finding.level for finding in grown.growth_plan.findings}
    assert said["2 -> 4 layers"] == "exact" and said["bfloat16"] == "approximate"
    report = growkern.verify(source, grown)
    assert report.ok and report.outputs["relative error"] > 1e-4
    # with the usual epsilon all gains are 1
    usual = random_model("BertModel", BERT, dtype=torch.bfloat16)
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
    assert said.level == "approximate"
    assert (new - old).abs().max() / old.abs().max() <= said.bound <= 0.1
    assert growkern.verify(source, grown).ok
