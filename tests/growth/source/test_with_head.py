"""A config.json that names a class without the head in the files. Truth: the class saved there."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import growkern
from growkern.errors import GrowthWarning
from testbed.families import FAMILIES
from testbed.models import random_model, relative_error
from testbed.relatives import RELATIVES

ALL = FAMILIES | {name: case[:2] for name, case in RELATIVES.items()}
# family -> the class that was saved, and the one in its config
NAMED = {
    "llama": ("LlamaForCausalLM", "LlamaModel"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    "bert": ("BertForPreTraining", "BertModel"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Model"),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Model"),
}


def renamed(directory, class_name):
    file = directory / "config.json"
    config = json.loads(file.read_text()) | {"architectures": [class_name]}
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("family", NAMED)
def test_the_class_that_has_all_tensors_is_taken(family, tmp_path):
    saved, named = NAMED[family]
    sizes = ALL[family][1]
    model = random_model(saved, {**sizes, "tie_word_embeddings": False})
    field = "n_embd" if family == "gpt2" else "hidden_size"
    model.save_pretrained(tmp_path / "small")
    renamed(tmp_path / "small", named)
    how = {field: 24, "progress": False}
    plan = growkern.grow_checkpoint(tmp_path / "small", tmp_path / "large", **how).plan
    assert plan.large.class_name == saved
    config = json.loads((tmp_path / "large" / "config.json").read_text())
    assert config["architectures"] == [saved]
    loader = getattr(transformers, saved)
    grown = loader.from_pretrained(tmp_path / "large", dtype="auto", experts_implementation="eager")
    grown.growth_plan = plan
    assert relative_error(model, grown.eval()) <= 1e-12


def test_a_body_alone_stays_one(tmp_path):
    random_model("LlamaModel", ALL["llama"][1]).save_pretrained(tmp_path)
    assert growkern.plan(tmp_path, hidden_size=24).large.class_name == "LlamaModel"


def test_files_that_are_of_no_class_are_refused(tmp_path):
    """A pooler and one of two heads: each class of the family would leave something out."""
    random_model("BertForPreTraining", ALL["bert"][1]).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {k: v for k, v in load_file(file).items() if "seq_relationship" not in k}
    save_file(tensors, file, metadata={"format": "pt"})
    renamed(tmp_path, "BertModel")
    with pytest.raises(growkern.GrowthError, match=r"BertModel.*cls\.predictions.*BertFor"):
        growkern.plan(tmp_path, hidden_size=24)
    # sentence-transformers reads the body alone
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.warns(GrowthWarning, match="cls.predictions"):
        assert growkern.plan(tmp_path, hidden_size=24).large.class_name == "BertModel"


def test_a_class_with_a_head_is_suggested_where_none_is_named(tmp_path):
    model = random_model("LlamaForCausalLM", ALL["llama"][1], dtype=torch.float32)
    model.save_pretrained(tmp_path)
    renamed(tmp_path, None)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": None}))
    with pytest.raises(growkern.GrowthError, match="LlamaForCausalLM"):
        growkern.plan(tmp_path, hidden_size=24)
