"""A format of checkpoints is one entry of a table. Truth: the same model as safetensors."""

import json
from dataclasses import dataclass

import pytest
import torch

import growkern
from growkern.growth.source import formats
from growkern.growth.stored import StoredTensor
from testbed.models import GPT2, random_model

SUFFIX, MODEL, OPTIMIZER = ".toy", "model.toy", "adam.toy"


@dataclass(frozen=True)
class ToyTensor(StoredTensor):
    """A tensor in a file of `torch.save`."""

    file: str
    value: torch.Tensor

    @property
    def shape(self):
        return tuple(self.value.shape)

    @property
    def dtype(self):
        return self.value.dtype

    def read(self):
        return self.value


def toy_tensors(file, state):
    return {name: ToyTensor(str(file), x) for name, x in state.items()}


class Toy(formats.Format):
    weights, suffix = ("*" + SUFFIX,), SUFFIX

    def recognises(self, directory):
        return (directory / MODEL).is_file()

    def read(self, directory, model):
        return toy_tensors(directory / MODEL, torch.load(directory / MODEL))

    def read_header(self, file):
        return file.read_bytes()

    def files(self, directory):
        return [MODEL]

    def read_optimizer(self, directory, parameters):
        file = directory / OPTIMIZER
        return {parameters[name]: toy_tensors(file, x) for name, x in torch.load(file).items()}


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Directories of the same model: as safetensors, and in a format that one entry adds."""
    monkeypatch.setattr(formats, "FORMATS", (Toy(), *formats.FORMATS))
    model = random_model("GPT2LMHeadModel", GPT2, dtype=torch.float32)
    for name in ("plain", "toy"):
        model.save_pretrained(tmp_path / name)
    (tmp_path / "toy/model.safetensors").unlink()
    state = {k: v.contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    torch.save(state, tmp_path / "toy" / MODEL)
    return model, tmp_path / "plain", tmp_path / "toy"


def test_a_new_format_grows_verifies_and_is_recorded(sources, tmp_path):
    _, plain, toy = sources
    for source in (plain, toy):
        growkern.grow_checkpoint(source, tmp_path / f"large_{source.name}", n_embd=24, n_head=6)
    weights = [tmp_path / f"large_{x.name}/model.safetensors" for x in (plain, toy)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    report = growkern.verify(toy, tmp_path / "large_toy")
    assert report.ok, report
    lineage = json.loads((tmp_path / "large_toy/lineage.json").read_text())
    assert list(lineage["source_files"]) == [MODEL]
    assert not (tmp_path / "large_toy" / MODEL).exists()  # the weights of another model
    # a change of the source is seen, also while it is read
    stamps = formats.Stamps.of(toy)
    stamps.check()
    torch.save({k: v + 1 for k, v in torch.load(toy / MODEL).items()}, toy / MODEL)
    with pytest.raises(growkern.GrowthError, match=MODEL):
        stamps.check()
    assert not growkern.verify(toy, tmp_path / "large_toy").ok


def test_a_new_format_may_hold_an_optimizer(sources):
    model, plain, toy = sources
    own = {name: p for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    state = {name: optimizer.state[p] for name, p in own.items()}
    torch.save(state, toy / OPTIMIZER)
    grown = []
    for source, given in ((plain, optimizer.state_dict()), (toy, toy)):
        large = growkern.grow(str(source), n_embd=24, n_head=6)
        adam = torch.optim.AdamW(large.parameters(), lr=1e-3)
        growkern.grow_optimizer_into(large, adam, given)
        grown.append([entry["exp_avg"] for entry in adam.state.values()])
    assert grown[0] and all(map(torch.equal, *grown))
    assert any(x.abs().max() > 0 for x in grown[0])
