"""A refusal of a model without a table says what the model is. Truth: what its makers call it."""

import json

import pytest
import transformers

import growkern

WRAPPED = {"text_config": {"model_type": "mistral"}, "vision_config": {"model_type": "pixtral"}}


@pytest.mark.parametrize(
    ("model_type", "config", "clause"),
    [
        # other prefixes, BioGPT's blocks
        ("xglm", {}, r"nearest: biogpt \(\d+% of its tensor names\)"),
        ("persimmon", {}, r"nearest: \w+ \(\d+% .*\); growkern family draft /"),
        # sizes of a damaged file are not built
        ("xglm", {"num_layers": 10**9, "d_model": 10**12}, "nearest: biogpt"),
        ("longcat_flash", {"n_routed_experts": 4}, r"it has latent attention; nearest: \w+ \("),
        # experts, too, but another family has these
        ("jamba", {"num_experts": 4}, r"it has state-space layers \(Mamba\); .*nearest: "),
        # a class that may have experts, of which this model has none
        ("xglm", {"num_experts": 0}, "nearest: biogpt"),
        ("llava", WRAPPED, "its text_config is a mistral, which has a table"),
        ("mamba", {}, r"it has state-space layers \(Mamba\); .*growkern family draft"),
        ("nobody", {}, r"transformers [\d.]+ cannot build it .*growkern.widen"),
    ],
)
def test_a_model_without_a_table_is_described(model_type, config, clause, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **config}))
    with pytest.raises(growkern.GrowthError, match=clause) as refused:
        growkern.plan(tmp_path, hidden_size=64)
    assert f"model_type '{model_type}' has no family table" in str(refused.value)


def test_a_model_in_memory_is_described_too():
    sizes = {"vocab_size": 50, "d_model": 12, "num_layers": 2, "attention_heads": 3, "ffn_dim": 20}
    model = transformers.XGLMForCausalLM(transformers.XGLMConfig(**sizes))
    with pytest.raises(growkern.GrowthError, match=r"nearest: biogpt .*growkern.draft_family"):
        growkern.plan(model, d_model=24)
