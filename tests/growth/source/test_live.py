"""Models in memory that compute something else than their config says."""

import types

import pytest
import torch
from torch.nn.utils import parametrizations, prune

import growkern
from growkern.errors import GrowthWarning
from growkern.growth.outputs import Float64
from testbed.models import BERT, GPT2, LLAMA, random_model


def function_as_activation(model):
    intermediate = model.bert.encoder.layer[1].intermediate
    del intermediate.intermediate_act_fn
    intermediate.intermediate_act_fn = torch.nn.functional.relu


def function_inside_activation(model):
    model.transformer.h[0].mlp.act.act = torch.relu


def forward_of_a_subclass(model):
    kind = type(model.transformer.h[0].mlp)
    forward = kind.forward

    class Doubled(kind):
        def forward(self, states):
            return 2 * forward(self, states)

    model.transformer.h[0].mlp.__class__ = Doubled


def subclass_of_the_model(model):
    model.__class__ = type(type(model).__name__, (type(model),), {"__module__": "mine"})


def one_more_block(model):
    model.model.layers.append(torch.nn.Identity())


GELU = {**GPT2, "activation_function": "gelu"}
EDITS = [
    (
        "BertForMaskedLM",
        BERT,
        function_as_activation,
        "intermediate_act_fn: .* is relu, but .*GELU",
    ),
    ("GPT2LMHeadModel", GELU, function_inside_activation, r"mlp\.act: act is relu, but .* gelu"),
    ("GPT2LMHeadModel", GPT2, forward_of_a_subclass, r"h\.0\.mlp: .*Doubled, but .*GPT2MLP"),
    ("GPT2LMHeadModel", GPT2, subclass_of_the_model, r"the module is mine\.GPT2LMHeadModel"),
    ("LlamaForCausalLM", LLAMA, one_more_block, r"model\.layers: the number of modules is 3"),
]


@pytest.mark.parametrize("class_name, sizes, edit, message", EDITS)
def test_a_module_that_was_replaced_is_refused(class_name, sizes, edit, message):
    source = random_model(class_name, sizes)
    wide = {"n_embd" if class_name.startswith("GPT2") else "hidden_size": 24}
    assert growkern.plan(source, **wide).exact
    edit(source)
    with pytest.raises(growkern.GrowthError, match=message):
        growkern.plan(source, **wide)


def test_a_method_that_was_replaced_is_warned_of():
    source = random_model("GPT2LMHeadModel", GPT2)
    attention = source.transformer.h[1].attn
    attention.forward = types.MethodType(type(attention).forward, attention)
    with pytest.warns(GrowthWarning, match=r"h\.1\.attn has .* a method of its own"):
        growkern.plan(source, n_embd=24)


def undone(message):
    return message[message.index("call ") + 5 :].removesuffix(" first")


CHANGES = [
    parametrizations.weight_norm,
    torch.nn.utils.spectral_norm,
    lambda module: prune.l1_unstructured(module, "weight", 0.5),
    pytest.param(
        torch.nn.utils.weight_norm,
        marks=pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"),
    ),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_that_is_computed_is_refused_with_the_call_that_undoes_it(change):
    source = random_model("LlamaForCausalLM", LLAMA)
    change(source.model.layers[0].mlp.up_proj)
    source.eval()
    tokens = torch.arange(8).reshape(2, 4)
    with Float64():
        expected = source(input_ids=tokens).logits
    with pytest.raises(growkern.GrowthError, match=r"layers\.0\.mlp\.up_proj\.weight") as raised:
        growkern.plan(source, hidden_size=24)
    exec(undone(str(raised.value)), {"torch": torch, "model": source})
    grown = growkern.grow(source, hidden_size=24)
    with Float64():
        assert (grown(input_ids=tokens).logits - expected).abs().max() < 1e-9


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_dynamically_quantised_model_is_refused():
    source = random_model("BertForMaskedLM", BERT, dtype=torch.float32)
    quantised = torch.ao.quantization.quantize_dynamic(source, {torch.nn.Linear})
    with pytest.raises(growkern.GrowthError, match=r"query is a quantised Linear: use the full"):
        growkern.plan(quantised, hidden_size=24)
