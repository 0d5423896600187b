"""Layers that predict a second token grow from files to files."""

import shutil

import pytest
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import growkern
from testbed.growths import at_once, grown_by
from testbed.models import random_model
from testbed.second import CASES, COUNT, COUNTS, DISTRIBUTED, drafts, saved, sized


@pytest.mark.parametrize("family", CASES)
def test_they_grow_exactly_from_files_to_files(family, tmp_path):
    layers, count = CASES[family][1:]
    model, field = random_model(*sized(family, {})), COUNTS.get(family, COUNT)
    small, large = tmp_path / "small", tmp_path / "large"
    saved(model, small, family)
    spec = growkern.plan(small, hidden_size=24).small
    # in a larger vocabulary, other tokens would be compared
    how = {**grown_by(spec, at_once(spec) | {"vocab": 50}), "progress": False}
    expected, file = drafts(small, family), small / "model.safetensors"
    if family == DISTRIBUTED:
        second = {n: x for n, x in load_file(file).items() if "layers.2." in n}
        dcp.save({**model.state_dict(), **second}, checkpoint_id=small, no_dist=True)
        file.unlink()
    for sizes in ({"hidden_size": 24, "progress": False}, how):
        shutil.rmtree(large, ignore_errors=True)
        plan = growkern.grow_checkpoint(small, large, **sizes).plan
        grown = drafts(large, family, plan.layer_maps[""])
        for old, new in zip(expected, grown, strict=True):
            assert (old - new).abs().max() <= 1e-12 * old.abs().max()
    assert plan.exact and growkern.verify(small, large).ok
    number = count * len(layers)
    assert any(f"second token grow in files ({number})" in line for line in plan.portability())
    # transformers makes other tensors of Kimi's tower, so a model in memory grows
    one = small if family != "kimi_k25" else model
    config = growkern.grow(one, hidden_size=24).config.get_text_config()
    assert not field or getattr(config, field) == 0
