"""Configs that are damaged or hostile are refused in one line, before any work."""

import json

import pytest
import torch
from transformers.activations import ACT2FN

import growkern
from growkern.errors import GrowthError
from growkern.growth.source.config import USUAL_ACTIVATIONS
from testbed.models import GPT2, LLAMA, random_model

CONFIGS = {
    "classes that are no list": ({"architectures": {"a": 1}}, "architectures"),
    "a padding token beyond the vocabulary": ({"pad_token_id": 10**9}, "pad_token_id"),
    "attention of a hub": ({"attn_implementation": "evil/kernel"}, "outside transformers"),
    "attention of a hub, privately": ({"_attn_implementation": "evil/kernel"}, "outside"),
    "attention of a hub, per part": ({"attn_implementation": {"text": "a/b"}}, "outside"),
    "attention that is not installed": (
        {"attn_implementation": "flash_attention_2"},
        "cannot build",
    ),
    "a billion labels": ({"num_labels": 10**9}, "num_labels"),
    "labels that are a number": ({"id2label": 10}, "config.json"),
    "a billion layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    "an epsilon that is no number": ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
    "an epsilon of 0": ({"rms_norm_eps": 0}, "rms_norm_eps=0 must be positive"),
    "negative positions": ({"max_position_embeddings": -5}, "max_position_embeddings=-5"),
    "a vocabulary of 300 digits": ({"vocab_size": 10**300}, "vocab_size"),
    "a size that is text": ({"hidden_size": "12"}, "hidden_size"),
    "a dtype that is none": ({"dtype": "evil"}, "evil"),
    "layers of no kind": ({"layer_types": ["evil"] * 2}, "layer_types"),
    "no theta": ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta=0"),
    "a theta that is no number": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}},
        "rope_theta=nan",
    ),
    "rotary positions of no kind": (
        {"rope_parameters": {"rope_type": "x", "rope_theta": 1e4}},
        "cannot build LlamaForCausalLM",
    ),
}
TEXTS = {
    "nested": (
        lambda text: text[:-1] + ',"x":' + "[" * 50_000 + "]" * 50_000 + "}",
        "not valid JSON",
    ),
    "digits": (lambda text: text[:-1] + ',"x":1' + "0" * 6000 + "}", "not valid JSON"),
    "large": (lambda text: text[:-1] + ',"x":"' + "x" * 9_000_000 + '"}', "more than any config"),
    "cut": (lambda text: text[:-1], "not valid JSON"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hostile") / "small"
    random_model("LlamaForCausalLM", LLAMA, dtype=torch.float32).save_pretrained(directory)
    return directory


def test_transformers_knows_the_usual_activations():
    assert set(USUAL_ACTIVATIONS) < set(ACT2FN)


def refusal(checkpoint, tmp_path, text):
    """The error for a checkpoint with this config.json. Without its checks some take minutes."""
    source = tmp_path / "small"
    source.mkdir()
    (source / "model.safetensors").hardlink_to(checkpoint / "model.safetensors")
    (source / "config.json").write_text(text)
    with pytest.raises(GrowthError) as error:
        growkern.grow_checkpoint(source, tmp_path / "large", hidden_size=24, progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small"]
    said = str(error.value)
    assert "\n" not in said and len(said) < 500
    return said


@pytest.mark.parametrize("name", CONFIGS)
def test_values_that_make_no_model_are_refused(checkpoint, tmp_path, name):
    change, words = CONFIGS[name]
    config = json.loads((checkpoint / "config.json").read_text()) | change
    assert words in refusal(checkpoint, tmp_path, json.dumps(config))


@pytest.mark.parametrize(
    "growth", [{"hidden_size": 24}, {"num_hidden_layers": 3}, {"vocab_size": 60}]
)
def test_key_heads_that_no_query_head_reads_are_refused(growth):
    sizes = LLAMA | {"num_attention_heads": 2, "num_key_value_heads": 4}
    with pytest.raises(GrowthError, match=r"num_attention_heads=2 .* num_key_value_heads=4"):
        growkern.grow(random_model("LlamaForCausalLM", sizes), **growth)


def test_a_size_that_is_null_is_refused(tmp_path):
    random_model("NemotronForCausalLM", LLAMA, dtype=torch.float32).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_key_value_heads": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(GrowthError, match="num_key_value_heads of the config has no value"):
        growkern.plan(tmp_path, vocab_size=60)


@pytest.mark.parametrize("name", TEXTS)
def test_texts_that_are_no_config_are_refused(checkpoint, tmp_path, name):
    change, words = TEXTS[name]
    config = (checkpoint / "config.json").read_text().strip()
    assert words in refusal(checkpoint, tmp_path, change(config))


def test_code_beside_a_checkpoint_is_not_asked_for(checkpoint, tmp_path, monkeypatch):
    """`auto_map` names it; transformers would ask on the terminal whether to run it."""
    source = tmp_path / "small"
    source.mkdir()
    (source / "model.safetensors").hardlink_to(checkpoint / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (source / "config.json").write_text(json.dumps(config))
    (source / "evil.py").write_text("raise SystemExit('the code ran')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    assert growkern.grow(source, hidden_size=24).config.hidden_size == 24


def test_dropout_that_is_none_is_refused_before_weights_are_read():
    model = random_model("GPT2LMHeadModel", GPT2, dtype=torch.float32)
    model.config.embd_pdrop = -3
    with pytest.raises(GrowthError, match="cannot build GPT2LMHeadModel"):
        growkern.grow(model, n_embd=24)
