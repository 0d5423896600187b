"""No name and no link in a checkpoint leads to a file elsewhere."""

import os
import pickle

import pytest
import torch
from torch.distributed import checkpoint as distributed

import growkern
from growkern.growth.source.files import refuse_links_out, stays_in
from testbed.models import LLAMA, random_model


@pytest.fixture
def source(tmp_path):
    """A distributed checkpoint below its model's directory."""
    model = random_model("LlamaForCausalLM", LLAMA, dtype=torch.float32)
    model.save_pretrained(tmp_path / "small")
    (tmp_path / "small" / "model.safetensors").unlink()
    parts = tmp_path / "small" / "step_7"
    distributed.save({"model": model.state_dict()}, checkpoint_id=parts, no_dist=True)
    return parts


def refusal(source):
    with pytest.raises(growkern.GrowthError) as error:
        growkern.grow(source, hidden_size=24)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", ""])
def test_metadata_that_names_files_elsewhere_is_refused(source, name):
    metadata = pickle.loads((source / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = name
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "is not a file of the checkpoint" in refusal(source)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_linked_parts_are_refused(source, tmp_path, name):
    assert growkern.grow(source, hidden_size=24).config.hidden_size == 24
    (source / name).rename(tmp_path / "elsewhere")
    (source / name).symlink_to(tmp_path / "elsewhere")
    assert "outside of the checkpoint" in refusal(source)


def test_a_pipe_in_place_of_a_part_is_refused(source):
    (source / "__0_0.distcp").unlink()
    os.mkfifo(source / "__0_0.distcp")
    assert "not a regular file" in refusal(source)


def test_links_in_a_circle_lead_out(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert not stays_in(tmp_path / "a", tmp_path)
    with pytest.raises(growkern.GrowthError):
        refuse_links_out(tmp_path / "a", tmp_path)
