"""Gemma divides scores by the root of a config field; runtimes such as llama.cpp take head_dim."""

import copy
import math

import pytest
import torch

import growkern
from testbed.models import GROUPED, random_model
from tests.growth.plan.test_portable import differ

SIZES = {**GROUPED, "head_dim": 4, "sliding_window": 4}
CLASSES = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")
GROWTHS = (
    {"head_dim": 8},
    {"head_dim": 16, "hidden_size": 32},
    {"head_dim": 6, "num_hidden_layers": 3},
    {"head_dim": 8, "symmetry": "split", "hidden_size": 24},
)


def gemma(class_name, dtype=torch.float64, scalar=4):
    return random_model(class_name, SIZES, dtype=dtype, query_pre_attn_scalar=scalar)


def as_llama_cpp(model):
    """The model as software sees it that divides by the root of head_dim."""
    other = copy.deepcopy(model)
    for module in other.modules():
        if hasattr(module, "q_proj"):
            module.scaling = module.head_dim**-0.5
    return other


@pytest.mark.parametrize("how", GROWTHS, ids=str)
@pytest.mark.parametrize("class_name", CLASSES)
def test_the_field_stays_equal_to_head_dim(class_name, how):
    source = gemma(class_name)
    grown = growkern.grow(source, **how)
    assert grown.config.query_pre_attn_scalar == how["head_dim"]
    limit = 1e-6 if how["head_dim"] == 6 else 1e-12  # rope_theta is rounded where it changes
    assert differ(grown, source) < limit
    assert differ(as_llama_cpp(grown), as_llama_cpp(source)) < limit


@pytest.mark.parametrize("class_name", CLASSES)
def test_a_field_of_its_own_stays(class_name):
    """As in Gemma 2 27B, where it is hidden_size / num_attention_heads."""
    source = gemma(class_name, scalar=7)
    grown = growkern.grow(source, head_dim=8)
    assert grown.config.query_pre_attn_scalar == 7
    assert differ(grown, source) < 1e-12


@pytest.mark.parametrize(
    ("class_name", "head_dim", "expected"),
    [("Gemma2ForCausalLM", 8, 4), ("Gemma2ForCausalLM", 16, 16), ("Gemma3ForCausalLM", 8, 8)],
)
def test_no_copied_weight_is_rounded_in_16_bits(class_name, head_dim, expected):
    source = gemma(class_name, torch.bfloat16)
    plan = growkern.plan(source, head_dim=head_dim)
    assert plan.target_config.query_pre_attn_scalar == expected
    grown = growkern.grow(source, head_dim=head_dim)
    name = "model.layers.0.self_attn.q_proj.weight"
    old, new = (m.get_parameter(name).float() for m in (source, grown))
    gain = math.sqrt(head_dim / 4) if class_name == "Gemma3ForCausalLM" or expected != 4 else 1
    if math.log2(gain).is_integer():
        assert set((gain * old).unique().tolist()) <= set(new.unique().tolist())


@pytest.mark.parametrize("scalar", [4, 8])
def test_a_given_config_decides(scalar, tmp_path):
    """Records of earlier versions hold configs with the source's value."""
    source = gemma("Gemma3ForCausalLM")
    config = copy.deepcopy(source.config)
    config.head_dim, config.query_pre_attn_scalar = 8, scalar
    grown = growkern.grow(source, target_config=config)
    assert grown.config.query_pre_attn_scalar == scalar
    assert differ(grown, source) < 1e-12
    source.save_pretrained(tmp_path / "small")
    how = {"target_config": config, "progress": False}
    growkern.grow_checkpoint(tmp_path / "small", tmp_path / "big", **how)
    assert growkern.verify(tmp_path / "small", tmp_path / "big").ok


@pytest.mark.parametrize("scalar", [5, 16])
def test_another_value_is_refused(scalar):
    source = gemma("Gemma2ForCausalLM")
    config = copy.deepcopy(source.config)
    config.head_dim, config.query_pre_attn_scalar = 8, scalar
    with pytest.raises(growkern.GrowthError, match="query_pre_attn_scalar"):
        growkern.plan(source, target_config=config)
