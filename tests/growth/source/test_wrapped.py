"""Wrapped and compiled models as sources: grown as the model inside, or named."""

import accelerate
import pytest
import torch
import transformers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import growkern
from testbed.models import LLAMA, random_model


def small():
    return random_model("LlamaForCausalLM", LLAMA, dtype=torch.float32)


@pytest.fixture
def one_process(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def compiled_layer(model):
    model.model.layers[0] = torch.compile(model.model.layers[0])
    return model


def checkpointed_layer(model):
    model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
    return model


def compiled_in_place(model):
    model.compile()
    return model


WRAPPERS = {
    "torch.compile": torch.compile,
    "a compiled layer": compiled_layer,
    "model.compile()": compiled_in_place,
    "a checkpointed layer": checkpointed_layer,
    "accelerate": lambda model: accelerate.Accelerator(cpu=True).prepare(model),
    "DataParallel": torch.nn.DataParallel,
    "DDP": DistributedDataParallel,
    "DDP of a compiled model": lambda model: DistributedDataParallel(torch.compile(model)),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_the_model_inside_is_grown(wrap, one_process):
    large, expected = (growkern.grow(x, hidden_size=24) for x in (wrap(small()), small()))
    assert type(large) is transformers.LlamaForCausalLM
    for (name, x), y in zip(
        large.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        assert torch.equal(x, y), name


def flattened(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def flattened_layers(model):
    model.model.layers[0] = flattened(model.model.layers[0])
    return model


@pytest.mark.parametrize("wrap", [flattened, flattened_layers])
def test_fsdp_1_is_named(wrap, one_process):
    with pytest.raises(growkern.GrowthError, match=r"FullyShardedDataParallel.*fully_shard$"):
        growkern.plan(wrap(small()), hidden_size=24)


def test_weights_on_other_processes_are_named(one_process):
    model = small()
    fully_shard(model, mesh=one_process)
    assert growkern.plan(model, hidden_size=24).exact
    with pytest.raises(growkern.GrowthError, match=r"embed_tokens.weight .* is spread over proc"):
        growkern.grow(model, hidden_size=24)


def test_weights_without_values_are_named():
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(small().config)
    offloaded = accelerate.cpu_offload(small())
    for model in (empty, offloaded):
        assert growkern.plan(model, hidden_size=24).exact
        match = r"is on the meta device .* LlamaForCausalLM\.from_pretrained"
        with pytest.raises(growkern.GrowthError, match=match):
            growkern.grow(model, hidden_size=24)
        large = growkern.grow(small(), hidden_size=24)
        with pytest.raises(growkern.GrowthError, match=match):
            growkern.grow_into(large, model)


def test_other_modules_are_named():
    with pytest.raises(growkern.GrowthError, match="source is a Linear: pass the transformers"):
        growkern.plan(torch.nn.Linear(2, 2), hidden_size=24)
