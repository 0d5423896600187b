"""Growth under the modes of PyTorch that its caller may have set."""

import pytest
import torch

import growkern
from testbed.models import LLAMA, random_model

MODES = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "meta": lambda: torch.device("meta"),
}
WIDE = {"hidden_size": 24}


def into(source, directory):
    config = growkern.plan(directory, **WIDE).target_config
    with torch.device("meta"):
        model = type(source)._from_config(config, dtype=torch.float32)
    growkern.grow_into(model, directory)
    return model


def through_files(source, directory):
    growkern.grow_checkpoint(directory, directory.parent / "large", **WIDE, progress=False)
    assert growkern.verify(directory, directory.parent / "large").ok


WAYS = {
    "memory": lambda source, directory: growkern.grow(source, **WIDE),
    "disk": lambda source, directory: growkern.grow(directory, **WIDE),
    "into": into,
    "files": through_files,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_the_grown_model_has_numbers_and_can_be_trained(mode, way, tmp_path):
    source = random_model("LlamaForCausalLM", LLAMA, dtype=torch.float32)
    source.save_pretrained(tmp_path / "small")
    expected = growkern.grow(source, **WIDE)
    with MODES[mode]():
        assert growkern.plan(source, **WIDE).size_changes()
        model = WAYS[way](source, tmp_path / "small")
    if model is None:
        model = type(source).from_pretrained(tmp_path / "large")
    for name, weight in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    tokens = torch.arange(3, 13)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    plan = expected.growth_plan
    growkern.GrowthAdamW(model.named_parameters(), plan).step()
