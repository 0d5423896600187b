"""Stored tensors of both kinds of checkpoint answer alike. Truth: the model that was saved."""

import pytest
import torch
from torch.distributed import checkpoint

from growkern.growth.source.source import open_source
from growkern.growth.stored import StoredTensor
from testbed.models import LLAMA, random_model


def save(model, directory, kind):
    model.save_pretrained(directory)
    if kind == "distributed":
        (directory / "model.safetensors").unlink()
        checkpoint.save(model.state_dict(), checkpoint_id=directory, no_dist=True)


@pytest.mark.parametrize("kind", ["safetensors", "distributed"])
def test_a_stored_tensor_is_the_one_that_was_saved(tmp_path, kind):
    model = random_model("LlamaForCausalLM", LLAMA, dtype=torch.bfloat16)
    save(model, tmp_path, kind)
    stored = open_source(tmp_path).headers
    assert stored.keys() == model.state_dict().keys()
    for name, truth in model.state_dict().items():
        tensor = stored[name]
        assert isinstance(tensor, StoredTensor)
        assert (tensor.shape, tensor.dtype) == (truth.shape, truth.dtype)
        assert tensor.nbytes == truth.nbytes
        assert tensor.is_mapped == (kind == "safetensors")
        assert torch.equal(tensor.read(), truth)
        assert torch.equal(tensor.rows(1, 3), truth[1:3])
        # not in order, and with repetitions
        index = [torch.tensor([n - 1, 0, 2, 0]) for n in truth.shape]
        found = tensor.read_entries(index)
        assert found.shape == truth.shape
        assert torch.equal(
            found[torch.meshgrid(index, indexing="ij")], truth[torch.meshgrid(index, indexing="ij")]
        )
