"""A tied matrix may be stored under any of its names, as transformers reads it."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

import growkern
from growkern import GrowthError
from growkern.growth.source.loading import load_model
from growkern.growth.source.source import open_source
from testbed.families import T5
from testbed.models import BERT, GPT2, LLAMA, random_model

CASES = [
    ("LlamaForCausalLM", LLAMA | {"tie_word_embeddings": True}, ["lm_head.weight"]),
    ("GPT2LMHeadModel", GPT2, ["lm_head.weight"]),
    ("BertForMaskedLM", BERT, ["cls.predictions.decoder.weight", "cls.predictions.decoder.bias"]),
    ("T5ForConditionalGeneration", T5, ["encoder.embed_tokens.weight"]),
    ("T5ForConditionalGeneration", T5, ["decoder.embed_tokens.weight", "lm_head.weight"]),
]


def stored_as(folder, model, names, shards=False):
    """Save a model with the tensors that it ties under these names alone."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    ties = open_source(folder).spec.ties
    for name in names:
        tensors[name] = tensors[ties[name]].clone()
    for name in names:
        tensors.pop(ties[name], None)
    if not shards:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{i % 2 + 1:05}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in sorted(set(places.values())):
        part = {name: x for name, x in tensors.items() if places[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    "family, sizes, names, shards", [*((*case, False) for case in CASES), (*CASES[0], True)]
)
def test_a_tied_matrix_is_read_under_any_name(family, sizes, names, shards, tmp_path):
    model = random_model(family, sizes, dtype=torch.float32)
    folder = stored_as(tmp_path / "small", model, names, shards)
    size = {"T5ForConditionalGeneration": "d_ff", "GPT2LMHeadModel": "n_inner"}
    how = {size.get(family, "intermediate_size"): 100}
    grown = growkern.grow(folder, progress=False, **how).state_dict()
    expected = growkern.grow(model, progress=False, **how).state_dict()
    assert grown.keys() == expected.keys()
    assert all(torch.equal(x, expected[name]) for name, x in grown.items())
    growkern.grow_checkpoint(folder, tmp_path / "large", progress=False, **how)
    assert growkern.verify(folder, tmp_path / "large").ok
    loaded = load_model(folder).state_dict()
    assert all(torch.equal(x, loaded[name]) for name, x in model.state_dict().items())


def test_two_values_of_a_tied_matrix_are_refused(tmp_path):
    """Of the names of one matrix; a T5 head with values of its own is a head of its own."""
    names = ["decoder.embed_tokens.weight", "encoder.embed_tokens.weight"]
    model = random_model("T5ForConditionalGeneration", T5, dtype=torch.float32)
    file = stored_as(tmp_path / "small", model, names) / "model.safetensors"
    tensors = load_file(file)
    tensors["encoder.embed_tokens.weight"] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(GrowthError, match=r"differ, which config\.tie_word_embeddings=True"):
        growkern.plan(tmp_path / "small", d_ff=40)


@pytest.mark.parametrize("text", [b"null", b"{}"])
def test_metadata_may_be_null(text, tmp_path):
    model = random_model("LlamaForCausalLM", LLAMA, dtype=torch.float32)
    model.save_pretrained(tmp_path / "small")
    file = tmp_path / "small" / "model.safetensors"
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length]) | {"__metadata__": json.loads(text)}
    head = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head + raw[8 + length :])
    assert load_file(file).keys() == model.state_dict().keys()
    grown = growkern.grow(tmp_path / "small", intermediate_size=40).state_dict()
    expected = growkern.grow(model, intermediate_size=40).state_dict()
    assert all(torch.equal(x, expected[name]) for name, x in grown.items())


@pytest.mark.parametrize("depth", ["auto", "identity", "stack", "interleave"])
@pytest.mark.parametrize(
    "family, sizes, field",
    [
        ("LlamaForCausalLM", LLAMA, "num_hidden_layers"),
        ("GPT2LMHeadModel", GPT2, "n_layer"),
        ("T5ForConditionalGeneration", T5, "num_decoder_layers"),
    ],
)
def test_a_source_without_layers_is_refused_with_the_fix(family, sizes, field, depth, tmp_path):
    model = random_model(family, sizes | {field: 0}, dtype=torch.float32)
    model.save_pretrained(tmp_path / "small")
    for source in (model, tmp_path / "small"):
        with pytest.raises(GrowthError, match=f"{field}=0: the source has no .* depth='random'"):
            growkern.plan(source, **{field: 4}, depth=depth)
