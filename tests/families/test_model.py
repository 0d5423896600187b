"""Models that growth describes: never those of an older config. Truth: transformers itself."""

import copy

import pytest
import torch
import transformers

import growkern
from growkern.families.model import ModelSpec
from testbed.models import BERT, GPT2, LLAMA, random_model

PLAIN = {**LLAMA, "mlp_bias": False}
LISTS = {**PLAIN, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
GROWTHS = [
    ("BertForMaskedLM", BERT, {"hidden_size": 24, "num_hidden_layers": 3}),
    ("GPT2LMHeadModel", GPT2, {"n_embd": 24, "n_layer": 3, "pad_vocab_to_multiple_of": 32}),
    ("LlamaForCausalLM", LLAMA, {"hidden_size": 24, "num_key_value_heads": 6}),
    ("Qwen3ForCausalLM", PLAIN, {"head_dim": 8, "num_hidden_layers": 3}),
    ("Gemma2ForCausalLM", LISTS, {"hidden_size": 24, "num_hidden_layers": 3}),
]


def shapes_of(class_name, config):
    with torch.device("meta"):
        state = getattr(transformers, class_name)(copy.deepcopy(config)).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


@pytest.mark.parametrize("class_name, sizes, growth", GROWTHS)
def test_a_plan_describes_both_models(class_name, sizes, growth):
    source = random_model(class_name, sizes, dtype=torch.float32)
    before = source.config.to_dict()
    plan = growkern.plan(source, **growth)
    assert plan.small.shapes == shapes_of(class_name, source.config)
    assert plan.large.shapes == shapes_of(class_name, plan.target_config)
    assert source.config.to_dict() == before
    # a config that the user gives stays the user's
    given = copy.deepcopy(plan.target_config)
    again = growkern.plan(source, target_config=given, dtype=torch.bfloat16)
    assert again.large.shapes == plan.large.shapes
    assert again.target_config.dtype == torch.bfloat16 != given.dtype


def test_another_config_has_its_own_tensors():
    config = transformers.BertConfig(**BERT)
    model = ModelSpec.of(config, "BertForMaskedLM")
    assert model.ties and model.shapes == shapes_of("BertForMaskedLM", config)
    other = copy.deepcopy(config)
    other.num_hidden_layers, other.hidden_size, other.tie_word_embeddings = 5, 24, False
    assert model.with_config(other).shapes == shapes_of("BertForMaskedLM", other)
    assert not model.with_config(other).ties
    assert model.shapes == shapes_of("BertForMaskedLM", config)
