"""Streaming onto disk: the same bytes as saving the model grown in memory, whatever the pieces."""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

import growkern
from tests.growth.models import BERT, GPT2, LLAMA, random_model
from tests.growth.small_pieces import cut_small

CLASSES = {
    "BertForMaskedLM": (BERT, {"hidden_size": 24}),
    "GPT2LMHeadModel": (GPT2, {"n_embd": 20}),
    "LlamaForCausalLM": (LLAMA, {"hidden_size": 24, "num_hidden_layers": 3}),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    cut_small(monkeypatch.setattr)


def save(tmp_path, class_name, sizes, dtype=torch.float32, **config):
    model = random_model(class_name, sizes, dtype=dtype, **config)
    model.save_pretrained(tmp_path / "source", max_shard_size="20kB")
    return tmp_path / "source"


def grow(source, target, **how):
    return growkern.grow_checkpoint(source, target, progress=False, **how)


def files(directory):
    return {p.name: p.read_bytes() for p in directory.iterdir()}


@pytest.mark.parametrize("limit", ["1GB", "12kB"])
@pytest.mark.parametrize("how", [{}, {"method": "aki"}, {"method": "direct_copy"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("class_name", CLASSES)
def test_files_are_those_save_pretrained_writes(tmp_path, class_name, dtype, how, limit):
    sizes, target = CLASSES[class_name]
    source = save(tmp_path, class_name, sizes, dtype)
    expected = growkern.grow(source, **target, **how)
    expected.save_pretrained(tmp_path / "expected", max_shard_size=limit)
    grow(source, tmp_path / "grown", max_shard_size=limit, **target, **how)
    ours, theirs = files(tmp_path / "grown"), files(tmp_path / "expected")
    assert set(ours) == {*theirs, "lineage.json", "checksums.json"}
    for name in theirs:
        assert ours[name] == theirs[name], name


@pytest.mark.parametrize("limit", ["1kB", "12kB", "30kB"])
def test_shards_hold_what_their_index_says(tmp_path, limit):
    source = save(tmp_path, "LlamaForCausalLM", LLAMA)
    expected = growkern.grow(source, hidden_size=24)
    grow(source, tmp_path / "grown", hidden_size=24, max_shard_size=limit)
    state = expected.state_dict()
    index = json.loads((tmp_path / "grown" / "model.safetensors.index.json").read_text())
    shards = sorted(tmp_path.glob("grown/*.safetensors"))
    assert [s.name for s in shards] == [
        f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)
    ]
    assert len(shards) > 1
    for shard in shards:
        names = [name for name, file in index["weight_map"].items() if file == shard.name]
        save_file({n: state.pop(n) for n in names}, tmp_path / "one", metadata={"format": "pt"})
        assert shard.read_bytes() == (tmp_path / "one").read_bytes()
        size = sum(expected.state_dict()[n].nbytes for n in names)
        assert size <= int(limit.removesuffix("kB")) * 1000 or len(names) == 1
    assert not state
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in expected.parameters())
    assert index["metadata"]["total_parameters"] == expected.num_parameters()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "grown")
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name]), name
