"""Commands that load a model or a tokenizer refuse damaged and hostile ones in one line.

Truth: the model that was saved, and an attack's own trace where it would succeed.
"""

import json
import os
import pickle
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from growkern.errors import GrowthError, GrowthWarning
from growkern.growth.source.config import check_names
from growkern.train.model.language_model import check_fits, load_language_model, load_tokenizer
from testbed.models import BERT, GPT2, random_model
from testbed.relatives import BART
from testbed.tiny import build
from tests.train.run.test_run import save_tokenizer

KERNEL = "evil-org/evil-kernel"
CONFIGS = {
    "attention of a hub in a part": ({"x_config": {"attn_implementation": KERNEL}}, "outside"),
    "an unknown kind with code": (
        {
            "model_type": "evil",
            "architectures": ["EvilForCausalLM"],
            "auto_map": {"AutoConfig": "evil.Config"},
        },
        "has no model_type 'evil'",
    ),
    "classes that are numbers": ({"architectures": [1]}, "architectures"),
    "a class that is no model": ({"architectures": ["pipeline"]}, "unknown class: pipeline"),
    "no class": ({"architectures": []}, "unknown class"),
    "a vocabulary that is text": ({"vocab_size": "x"}, "vocab_size"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads=0 must be positive"),
    "a module as dtype": ({"torch_dtype": "os"}, "no dtype of PyTorch"),
    "more layers than tensors": ({"num_hidden_layers": 9_999}, "files have"),
    "2^20 labels": ({"num_labels": 1 << 20}, "num_labels"),
    "350,000 named labels": ({"id2label": {str(i): "a" for i in range(350_000)}}, "more than"),
    "50,000 named labels": ({"id2label": {str(i): "a" for i in range(50_000)}}, "id2label has"),
    "300,000 pruned heads": ({"pruned_heads": {str(i): [0] for i in range(300_000)}}, "more than"),
    "10,000 pruned heads": ({"pruned_heads": {str(i): [0] for i in range(10_000)}}, "pruned_heads"),
    "300,000 fields": ({f"k{i}": 0 for i in range(300_000)}, "more than"),
    "a method": ({"save_pretrained": 1}, "'save_pretrained' is no field"),
    "a special method": ({"__deepcopy__": 1}, "'__deepcopy__' is no field"),
    "a method of a part": ({"text_config": {"to_dict": 1}}, "'to_dict' is no field"),
    "weights elsewhere": ({"transformers_weights": "/etc/passwd"}, "'transformers_weights' is no"),
    "negative dropout": ({"attention_dropout": -1}, "attention_dropout=-1"),
    "more entries turned than a head has": (
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 9,
            }
        },
        "partial_rotary_factor=9 must lie in 0 .. 1",
    ),
    "2^40 positions": ({"max_position_embeddings": 1 << 40}, "max_position_embeddings"),
    "a quantised model": ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved") / "model"
    build("llama", layers=2, width=8).save_pretrained(directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture
def model(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refusal(load, *given):
    with pytest.raises(GrowthError) as error:
        load(*given)
    said = str(error.value)
    assert "\n" not in said and len(said) < 700
    return said


def plant(directory, name, class_name, base):
    """Code that leaves a file when it runs."""
    code = f"open({str(directory / 'ran')!r}, 'w')\nfrom transformers import {base}\n"
    (directory / f"{name}.py").write_text(f"{code}class {class_name}({base}): pass\n")


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_model_loads_as_transformers_loads_it(tmp_path, family, dtype):
    build(family, tied=family != "llama").save_pretrained(tmp_path, max_shard_size="10KB")
    ours = load_language_model(tmp_path, dtype)
    theirs = type(ours).from_pretrained(tmp_path, dtype=dtype or "auto")
    assert ours.config.to_dict() == theirs.config.to_dict() and not ours.training
    assert ours.name_or_path == str(theirs.name_or_path)
    assert getattr(ours, "generation_config", None) == getattr(theirs, "generation_config", None)
    found = ours.state_dict()
    assert found.keys() == theirs.state_dict().keys()
    assert all(torch.equal(found[k], v) for k, v in theirs.state_dict().items())
    tied = ours.get_input_embeddings().weight is ours.get_output_embeddings().weight
    assert tied == (family != "llama")


def test_a_loaded_model_does_not_change_with_its_files(model):
    loaded = load_language_model(model)
    before = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    with open(model / "model.safetensors", "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(size // 2)
        file.write(b"\xaa" * (size // 2))
    assert all(torch.equal(before[k], v) for k, v in loaded.state_dict().items())


@pytest.mark.parametrize("name", CONFIGS)
def test_hostile_configs_are_refused(model, name):
    change, words = CONFIGS[name]
    edit(model / "config.json", **change)
    assert words in refusal(load_language_model, model)


@pytest.mark.parametrize("name", ["a vocabulary that is text", "2^20 labels", "a method"])
def test_a_tokenizer_is_not_loaded_by_a_hostile_config(model, name):
    change, words = CONFIGS[name]
    edit(model / "config.json", **change)
    assert words in refusal(load_tokenizer, model)
    assert words in refusal(check_fits, model, None, 8)


@pytest.mark.parametrize(
    "class_name, sizes, longest",
    [
        ("BertForMaskedLM", BERT | {"max_position_embeddings": 12}, 12),
        ("GPT2LMHeadModel", GPT2 | {"n_positions": 12}, 12),
        # its positions begin at 2
        ("RobertaForMaskedLM", BERT | {"max_position_embeddings": 12, "pad_token_id": 1}, 10),
        ("BartForCausalLM", BART | {"max_position_embeddings": 12}, 12),
    ],
)
def test_the_longest_rows_are_those_that_the_model_can_read(tmp_path, class_name, sizes, longest):
    model = random_model(class_name, sizes, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    tokenizer = range(model.config.vocab_size)
    check_fits(tmp_path, tokenizer, longest)
    model(torch.full((1, longest), 5))
    text = refusal(check_fits, tmp_path, tokenizer, longest + 1)
    assert f"has {longest} positions: give {longest} or" in text
    # heads may be padded
    with pytest.warns(GrowthWarning, match="has only .* give the tokenizer") as seen:
        check_fits(tmp_path, tokenizer[1:], longest)
        check_fits(tmp_path, tokenizer[len(tokenizer) // 5 :], longest)
    assert len(seen) == 1
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, longest + 1), 5))


@pytest.mark.parametrize("class_name", ["EvilForCausalLM", "LlamaForCausalLM"])
def test_code_of_a_model_never_runs(model, monkeypatch, class_name):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    plant(model, "evil", "Config", "LlamaConfig")
    code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Config"}
    changes = {"architectures": [class_name], "auto_map": code}
    edit(model / "config.json", model_type="evil", **changes)
    if class_name == "EvilForCausalLM":
        refusal(load_language_model, model)
        refusal(load_tokenizer, model)
    else:
        # of a class of transformers
        assert type(load_language_model(model)).__module__.startswith("transformers.")
        load_tokenizer(model)
    assert not (model / "ran").exists()


@pytest.mark.parametrize("class_name", ["EvilTokenizer", "BertTokenizer"])
def test_code_of_a_tokenizer_never_runs(model, monkeypatch, class_name):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    plant(model, "evil", "EvilTokenizer", "BertTokenizer")
    code = {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]}
    edit(model / "tokenizer_config.json", tokenizer_class=class_name, auto_map=code)
    try:
        load_tokenizer(model)
    except GrowthError as error:
        assert "\n" not in str(error)
    assert not (model / "ran").exists()


TOKENIZERS = {
    "empty": ("tokenizer.json", "{}"),
    "deep": ("tokenizer.json", "[" * 100_000),
    "of no kind": ("tokenizer.json", '{"model": {"type": "x"}, "added_tokens": []}'),
    "cut": ("tokenizer.json", '{"model": {'),
    "a config that is a list": ("tokenizer_config.json", "[1]"),
    "a deep config": ("tokenizer_config.json", "[" * 100_000),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_damaged_tokenizers_are_refused(model, name):
    file, text = TOKENIZERS[name]
    (model / file).write_text(text)
    refusal(load_tokenizer, model)


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
)
def test_links_out_of_a_checkpoint_are_refused(model, tmp_path, name):
    (model / name).rename(tmp_path / "elsewhere")
    (model / name).symlink_to(tmp_path / "elsewhere")
    load = load_tokenizer if name == "tokenizer.json" else load_language_model
    assert "outside of the checkpoint" in refusal(load, model)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "vocab.txt"])
def test_pipes_are_refused_unopened(model, name):
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    refusal(load_tokenizer, model)


class Evil:
    def __reduce__(self):
        return os.mkdir, (os.environ["EVIL"],)


def test_pickled_weights_are_refused(model, tmp_path, monkeypatch):
    monkeypatch.setenv("EVIL", str(tmp_path / "ran"))
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    assert "only pickled weights" in refusal(load_language_model, model)
    assert not (tmp_path / "ran").exists()


def test_missing_tensors_are_refused_by_name(tmp_path):
    build("bert", layers=2).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = {k: v for k, v in load_file(file).items() if "layer.1.attention" not in k}
    save_file(state, file, metadata={"format": "pt"})
    said = refusal(load_language_model, tmp_path)
    assert "bert.encoder.layer.1.attention" in said and "and 7 more" in said


def test_a_head_that_is_not_there_is_refused(tmp_path):
    """transformers would give the class its random head."""
    body = build("llama", layers=1).model
    body.save_pretrained(tmp_path)
    edit(tmp_path / "config.json", architectures=["LlamaForCausalLM"])
    assert "lm_head.weight" in refusal(load_language_model, tmp_path)


def test_another_shape_is_refused_by_name(model):
    edit(model / "config.json", vocab_size=47)
    said = refusal(load_language_model, model)
    assert "embed_tokens.weight" in said or "lm_head.weight" in said


def test_a_large_generation_config_is_refused(model):
    (model / "generation_config.json").write_text(json.dumps({"x": [0] * 5_000_000}))
    assert "more than any generation config" in refusal(load_language_model, model)


def test_no_field_of_any_config_is_called_a_method():
    """The refusal of names of methods must not refuse a config that transformers writes."""
    for kind in ("bert", "llama", "t5", "gpt2", "gemma3", "qwen3_moe", "modernbert", "bart"):
        config_class = transformers.CONFIG_MAPPING[kind]
        data = json.loads(config_class().to_json_string(use_diff=False))
        check_names("config.json", data, config_class)
