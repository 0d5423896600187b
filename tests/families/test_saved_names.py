"""Files of another class than config.json names, or with more in front of names than the model has.

Truth: the model that was saved.
"""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import growkern
from growkern.errors import GrowthWarning
from growkern.families.model import ModelSpec
from growkern.families.table_files import as_installed, parse_family, shipped_table
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


IMAGES = {"model.": "model.language_model."}
# family, the beginning of names in the model -> in the files
CASES = [
    ("qwen3_5_text", IMAGES),
    ("qwen3_5_moe_text", IMAGES),
    ("mistral", {"": "language_model."}),
    ("llama", {"": "module."}),
    ("llama", {"model.layers.0.": "_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module."}),
    ("bert", {"": "_orig_mod.module."}),
    ("llama", {"": "model."}),
    ("gpt2", {"": "model."}),
    ("mixtral", {"": "model."}),
    ("qwen3_5_text", {"": "model."}),
    ("llama", {"": "pretrained_model."}),
    ("mixtral", {"": "module._orig_mod.base_model.model."}),
    ("gpt2", {"transformer.h.0.": "transformer.h.0._checkpoint_wrapped_module."}),
]


def with_names(directory, begins):
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for old, new in begins.items():
        tensors = {
            new + n.removeprefix(old) if n.startswith(old) else n: x for n, x in tensors.items()
        }
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize("family, begins", CASES)
def test_more_in_front_of_names_is_read_through(family, begins, tmp_path):
    class_name, sizes = ALL[family]
    model = random_model(class_name, sizes)
    model.save_pretrained(tmp_path / "small")
    with_names(tmp_path / "small", begins)
    how = {"n_embd" if family == "gpt2" else "hidden_size": 24}
    growkern.grow_checkpoint(tmp_path / "small", tmp_path / "large", progress=False, **how)
    assert growkern.verify(tmp_path / "small", tmp_path / "large").ok
    grown = type(model).from_pretrained(
        tmp_path / "large", dtype="auto", experts_implementation="eager"
    )
    assert relative_error(model, grown.eval()) <= 1e-12


def test_a_tensor_under_two_names_is_refused(tmp_path):
    model = random_model(*ALL["llama"])
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    both = tensors | {f"module.{name}": x + 1 for name, x in tensors.items()}
    save_file(both, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(growkern.GrowthError, match=r"module\.\S+ are both"):
        growkern.plan(tmp_path, hidden_size=24)


@pytest.mark.parametrize("model_type", ["dinov2", "dinov2_with_registers"])
def test_classes_of_older_versions_have_the_names_in_files(model_type):
    table = shipped_table(model_type)
    assert as_installed(table, "5.18.0") is table and as_installed(table, "6.1.0") is table
    before = parse_family(model_type, as_installed(table, "5.17.3"))
    config = transformers.AutoConfig.for_model(model_type)
    for class_name in before.classes:
        now, old = (ModelSpec.of(config, class_name, f) for f in (None, before))
        names = {name: now.stored_names.get(name, name) for name in now.shapes}
        assert any(name != stored for name, stored in names.items()) and not old.stored_names
        assert old.shapes == {names[name]: shape for name, shape in now.shapes.items()}


def test_experts_that_files_may_hold_transposed_are_read_both_ways(tmp_path):
    """As published their last two axes are swapped; transformers 5 saves them as it has them."""
    class_name, sizes, _ = RELATIVES["qwen3_vl_moe"]
    model = random_model(class_name, sizes)
    model.save_pretrained(tmp_path / "small")
    (tmp_path / "published").mkdir()
    (tmp_path / "published/config.json").write_bytes((tmp_path / "small/config.json").read_bytes())
    weights = load_file(tmp_path / "small/model.safetensors")
    turned = {n: x.mT.contiguous() if ".experts." in n else x for n, x in weights.items()}
    save_file(turned, tmp_path / "published/model.safetensors", {"format": "pt"})
    for name in ("small", "published"):
        growkern.grow_checkpoint(
            tmp_path / name, tmp_path / f"{name}-large", hidden_size=20, progress=False
        )
    one, other = (
        load_file(tmp_path / f"{name}-large/model.safetensors") for name in ("small", "published")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    # written as published: (experts, hidden size, width)
    experts = "model.language_model.layers.1.mlp.experts"
    assert one[f"{experts}.gate_up_proj"].shape == (4, 20, 18)
    assert one[f"{experts}.down_proj"].shape == (4, 9, 20)
    assert growkern.verify(tmp_path / "published", tmp_path / "published-large").ok
