"""Each file of weights is opened once in a process, however many tensors and pieces it holds."""

import gc
import os
import pickle
import resource
import sys
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as distributed

import growkern
from growkern.growth.source.files import read_headers
from testbed.models import GROUPED, random_model

SIZES = {**GROUPED, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 3}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 4}
OPENED = Counter()
# a hook stays until the process ends
HOOKS = []


@pytest.fixture
def opened():
    """How often each path was opened."""
    if not HOOKS:
        HOOKS.append(lambda event, args: OPENED.update([str(args[0])] if event == "open" else ()))
        sys.addaudithook(HOOKS[0])
    OPENED.clear()
    return OPENED


def saved(directory, class_name="LlamaForCausalLM", shard="5GB", **sizes):
    random_model(class_name, SIZES | sizes).save_pretrained(directory, max_shard_size=shard)
    return directory


def most_opens(opened, directory):
    """The numbers of opens of the weights in a directory."""
    files = [*directory.glob("*.safetensors"), *directory.glob("*.distcp")]
    return {opened[str(file)] for file in files}


@pytest.mark.parametrize(
    "class_name, sizes, shard",
    [("LlamaForCausalLM", {}, "5GB"), ("Qwen3MoeForCausalLM", EXPERTS, "4KB")],
)
def test_each_work_opens_a_file_once(tmp_path, opened, class_name, sizes, shard):
    source = saved(tmp_path / "source", class_name, shard, **sizes)
    assert len(list(source.glob("*.safetensors"))) > (1 if shard == "4KB" else 0)
    target = tmp_path / "target"
    works = {
        "plan": lambda: growkern.plan(source, hidden_size=16),
        "grow": lambda: growkern.grow(source, hidden_size=16),
        "checkpoint": lambda: growkern.grow_checkpoint(
            source, target, hidden_size=16, progress=False
        ),
        "verify": lambda: growkern.verify(source, target),
    }
    for name, work in works.items():
        gc.collect()
        opened.clear()
        work()
        assert (name, most_opens(opened, source)) == (name, {1})
    assert most_opens(opened, target) == {1}


def test_a_distributed_checkpoint_is_opened_once(tmp_path, opened):
    model = random_model("LlamaForCausalLM", SIZES)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path / "source")
    place = tmp_path / "source" / "step_1"
    distributed.save({"model": model.state_dict()}, checkpoint_id=place, no_dist=True)
    opened.clear()
    growkern.grow_checkpoint(place, tmp_path / "target", hidden_size=16, progress=False)
    assert most_opens(opened, place) == {1}


def test_few_descriptors_are_enough_for_many_files(tmp_path, opened):
    """With room for fewer files than there are; all are closed in the end."""
    source = saved(tmp_path / "source", shard="1KB", num_hidden_layers=12)
    files = len(list(source.glob("*.safetensors")))
    before = len(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert files > 80
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 40, limits[1]))
    try:
        grown = growkern.grow(source, hidden_size=16)
        growkern.grow_checkpoint(
            source, tmp_path / "target", hidden_size=16, max_shard_size="1MB", progress=False
        )
        assert growkern.verify(source, tmp_path / "target").ok
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    written = load_file(tmp_path / "target" / "model.safetensors")
    assert all(torch.equal(value, grown.state_dict()[name]) for name, value in written.items())
    del grown
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_file_that_takes_the_name_is_read(tmp_path):
    """Replaced under the same name, or reached by the same relative path from elsewhere."""
    ones, twos = {"a": torch.ones(3)}, {"a": torch.full((3,), 2.0)}
    for place, tensors in ((tmp_path, ones), (tmp_path / "other", twos)):
        place.mkdir(exist_ok=True)
        save_file(tensors, place / "model.safetensors")
    header = read_headers(tmp_path)["a"]
    assert torch.equal(header.read(), ones["a"])
    again = pickle.loads(pickle.dumps(header))
    (tmp_path / "other" / "model.safetensors").replace(tmp_path / "model.safetensors")
    assert torch.equal(header.read(), twos["a"]) and torch.equal(again.rows(1, 2), twos["a"][:1])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(growkern.GrowthError, match=r"model\.safetensors: a cannot"):
        header.read()


def test_a_tensor_can_be_written_and_its_file_stays(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    header = read_headers(tmp_path)["a"]
    header.read().fill_(7)
    assert torch.equal(header.read(), torch.ones(3))
