"""Options that nothing in a growth reads: what is called so has no effect, and is not accepted."""

import warnings

import pytest
import torch

import growkern
from growkern.errors import FunctionChangedWarning, GrowthWarning
from growkern.growth.options import GrowthOptions
from growkern.growth.plan.advice import idle_options, uses
from growkern.growth.plan.growth_plan import plan_growth
from growkern.growth.plan.tensors.tensor import build_tensor
from growkern.growth.source.source import open_source
from testbed.models import BERT, GPT2, LLAMA, random_model

WIDE = {"hidden_size": 24, "num_attention_heads": 12, "num_key_value_heads": 4}
DEEP = {"num_hidden_layers": 4}
REFUSED = [
    ({"aki": "eq16"}, WIDE),
    ({"aki": "eq16"}, {**WIDE, "method": "direct_copy"}),
    ({"identity_gain": 1e-6}, {**WIDE, **DEEP}),
    ({"identity_gain": 1e-6}, WIDE),
    ({"maps": "balanced"}, {**WIDE, "scheme": "paper"}),
    ({"maps": "balanced"}, {**WIDE, "method": "random"}),
    ({"maps": "balanced"}, {**WIDE, "method": "direct_copy"}),
    ({"maps": "balanced"}, DEEP),
    ({"noise": 0.1}, {**WIDE, "method": "random", "symmetry": "noise"}),
    ({"routing": 0.5}, {**WIDE, "method": "direct_copy"}),
    ({"carry": 0.5}, WIDE),
    ({"stream": "padded"}, DEEP),
]
WARNED = [
    ({"depth": "stack"}, WIDE),
    ({"depth": "interleave"}, WIDE),
    ({"symmetry": "split"}, {**WIDE, "method": "direct_copy"}),
    ({"symmetry": "noise"}, DEEP),
    ({"scheme": "paper"}, {**WIDE, "method": "direct_copy"}),
]
# options that are read, or whose value asks for nothing
ACCEPTED = [
    ({"aki": "eq16"}, {**WIDE, "method": "aki"}),
    ({"maps": "balanced"}, WIDE),
    ({"symmetry": "none"}, DEEP),
    ({"symmetry": "routing"}, {**WIDE, "method": "random"}),
    ({"depth": "identity"}, WIDE),
    ({"depth": "stack"}, {**WIDE, "method": "direct_copy"}),
    ({"depth": "stack"}, DEEP),
    ({"seed": 3}, DEEP),
]


@pytest.fixture(scope="module")
def llama():
    return random_model("LlamaForCausalLM", LLAMA)


@pytest.mark.parametrize("option, how", REFUSED)
def test_tuning_of_what_is_not_there_is_refused(llama, option, how):
    (name,) = option
    with pytest.raises(growkern.GrowthError, match=f"^{name}=.* has no effect.*: leave it out"):
        growkern.plan(llama, **how, **option)


@pytest.mark.parametrize("option, how", WARNED)
def test_a_way_to_grow_that_is_not_needed_leads_to_a_warning(llama, option, how):
    (name,) = option
    with pytest.warns(GrowthWarning, match=f"^{name}=.* has no effect.*: leave it out"):
        growkern.grow(llama, **how, **option)


@pytest.mark.parametrize("option, how", ACCEPTED)
def test_options_that_are_read_pass_without_a_word(llama, option, how):
    with warnings.catch_warnings():
        warnings.simplefilter("error", GrowthWarning)
        warnings.simplefilter("ignore", FunctionChangedWarning)
        growkern.grow(llama, **how, **option)


VALUES = {
    "stream": "padded",
    "carry": 0.5,
    "aki": "eq16",
    "noise": 0.1,
    "routing": 0.5,
    "maps": "balanced",
    "identity_gain": 1e-3,
    "depth": "interleave",
    "symmetry": "split",
    "scheme": "paper",
    # of a dense model that becomes a mixture
    "router": "zero",
    "drop": 0.5,
}
METHODS = [{"method": m} for m in ("fpi", "fresh", "aki", "direct_copy", "random")] + [
    {"scheme": "paper"}
]
MODELS = [
    ("LlamaForCausalLM", LLAMA, [WIDE, DEEP, {**WIDE, **DEEP}]),
    ("BertForMaskedLM", BERT, [{"hidden_size": 20, "num_attention_heads": 5}, DEEP]),
    ("GPT2LMHeadModel", GPT2, [{"n_embd": 16, "n_head": 4}, {"n_layer": 4}, {"vocab_size": 60}]),
]


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("class_name, sizes, targets", MODELS)
def test_what_is_called_idle_changes_no_weight(class_name, sizes, targets, name):
    source = open_source(random_model(class_name, sizes))
    for target in targets:
        for method in METHODS:
            needed = {"symmetry": "noise"} if name == "noise" else {}
            needed |= {"symmetry": "routing"} if name == "routing" else {}
            try:
                given = GrowthOptions(**{**method, **needed, name: VALUES[name]})
            except growkern.GrowthError:
                continue
            plan = plan_growth(source, given, dict(target), judged=False)
            assert VALUES.keys() - {"aki", "noise", "routing"} == uses(plan).keys()
            if name in dict(idle_options(plan)):
                without = GrowthOptions(**{**needed, **method})
                other = plan_growth(source, without, dict(target), judged=False)
                for one, same in zip(plan.tasks, other.tasks, strict=True):
                    assert torch.equal(build_tensor(plan, one), build_tensor(other, same)), method
