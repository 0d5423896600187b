"""A wider hidden size whose new entries hold nothing, in place of copies (`stream="padded"`)."""

import pytest
import torch

import growkern
from testbed.families import FAMILIES
from testbed.models import BERT, GPT2, LLAMA, Float64Everywhere, random_model, relative_error
from tests.growth.plan.test_matrix import ANY_WIDTH, EXACT, width


@pytest.mark.parametrize("model_type", FAMILIES)
def test_it_is_the_default_where_it_is_exact(model_type):
    class_name, sizes = FAMILIES[model_type]
    source = random_model(class_name, sizes)
    found = growkern.plan(source, **width(model_type, "even")).options.stream
    assert found == ("padded" if model_type in ANY_WIDTH else "copies")


@pytest.mark.parametrize(
    "new, symmetry", [(24, "none"), (36, "noise"), (40, "split"), (40, "routing")]
)
@pytest.mark.parametrize(
    "class_name, sizes, field",
    [("GPT2LMHeadModel", GPT2, "n_embd"), ("LlamaForCausalLM", LLAMA, "hidden_size")],
)
def test_any_width_is_exact(class_name, sizes, field, new, symmetry):
    source = random_model(class_name, sizes)
    grown = growkern.grow(source, symmetry=symmetry, **{field: new})
    assert grown.growth_plan.options.stream == "padded" and grown.growth_plan.exact
    assert relative_error(source, grown) <= EXACT
    report = growkern.verify(source, grown)
    assert report.ok, report.failure


def states(model):
    """The hidden states between the blocks, (layers, tokens, hidden size)."""
    ids = torch.arange(3, 21).view(2, 9)
    with torch.no_grad(), Float64Everywhere():
        found = model.base_model(ids, output_hidden_states=True).hidden_states
    return torch.stack(found[:-1]).flatten(1, 2)


@pytest.mark.parametrize(
    "class_name, field", [("GPT2Model", "n_embd"), ("LlamaModel", "hidden_size")]
)
def test_new_entries_hold_nothing(class_name, field):
    """0 under RMSNorm, and under LayerNorm the mean of the others, which it takes away."""
    source = random_model(class_name, GPT2 if field == "n_embd" else LLAMA)
    grown = growkern.grow(source, **{field: 24})
    small, large = states(source), states(grown)
    old, new = large.split(12, -1)
    torch.testing.assert_close(old, 2**0.5 * small)
    nothing = old.mean(-1, keepdim=True) if field == "n_embd" else torch.zeros(1)
    torch.testing.assert_close(new, nothing.to(new.dtype).expand_as(new), atol=1e-12, rtol=0)


def test_what_reads_new_entries_is_the_old_weight_with_random_signs():
    """Other signs for every line and for every repetition, or two new entries would be copies."""
    sizes = {**LLAMA, "intermediate_size": 1000}
    source = random_model("LlamaForCausalLM", sizes)
    grown = growkern.grow(source, hidden_size=36, intermediate_size=1000)
    name = "model.layers.0.mlp.up_proj.weight"
    weight, wide = source.get_parameter(name), grown.get_parameter(name)
    first, *new = wide.split(12, 1)
    assert torch.equal(first, weight)
    signs = [part / weight for part in new]
    for sign in signs:
        # the common part of both signs is 1/256
        assert ((sign.abs() - 1).abs() < 0.01).all()
    rows = torch.cat([torch.ones_like(weight), *(sign.sign() for sign in signs)], 1)
    correlation = rows.t() @ rows / 1000 - torch.eye(36).repeat_interleave(1, 0)
    # the standard deviation of such a mean is 0.03
    assert correlation[12:, 12:].abs().max() < 0.2


def test_copies_get_the_same_signs_only_if_asked():
    grown = growkern.grow(random_model("LlamaModel", LLAMA), hidden_size=24, symmetry="none")
    old, new = grown.get_parameter("layers.0.mlp.up_proj.weight").split(12, 1)
    assert torch.equal(old, new)


def test_behind_blocks_it_is_close_if_asked():
    source = random_model("BertForMaskedLM", BERT)
    grown = growkern.grow(source, hidden_size=24, stream="padded")
    (width_found, *_) = grown.growth_plan.findings
    assert width_found.level == "approximate"
    error = relative_error(source, grown)
    report = growkern.verify(source, grown)
    assert report.ok and 1e-9 < error <= report.bound


@pytest.mark.parametrize(
    "how, why",
    [
        ({"scheme": "paper", "hidden_size": 24}, 'no effect with scheme="paper"'),
        ({"method": "direct_copy", "hidden_size": 24}, "no effect with method='direct_copy'"),
        ({"intermediate_size": 40}, "the hidden size stays"),
    ],
)
def test_it_is_refused_where_it_would_do_nothing(how, why):
    with pytest.raises(growkern.GrowthError, match=why):
        growkern.plan(random_model("LlamaForCausalLM", LLAMA), stream="padded", **how)
