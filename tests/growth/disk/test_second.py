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


def test_the_norm_before_them_needs_the_mean_square_of_the_last_norm(tmp_path, monkeypatch):
    family, (small, large) = "deepseek_v3", (tmp_path / "small", tmp_path / "large")
    saved(random_model(*sized(family, {})), small, family)
    # copies as they are, which the head alone reads as well
    one = "growkern.growth.space.layout.Layout._tied_output"
    monkeypatch.setattr(one, lambda self, spec, layer: self.space(spec.untied, layer))
    growkern.grow_checkpoint(small, large, hidden_size=20, progress=False)
    main, *second = (
        (old - new).abs().max() / old.abs().max()
        for old, new in zip(drafts(small, family), drafts(large, family), strict=True)
    )
    assert main <= 1e-12 and min(second) > 1e-3


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2"])
def test_with_a_tied_head_they_need_another_eps(family, tmp_path, monkeypatch):
    small, large = tmp_path / "small", tmp_path / "large"
    saved(random_model(*sized(family, {}, tied=True)), small, family)

    def errors(**growth):
        shutil.rmtree(large, ignore_errors=True)
        grown = growkern.grow_checkpoint(small, large, **growth, progress=False).plan
        assert grown.exact and grown.target_config.rms_norm_eps == pytest.approx(0.01 * factor)
        pairs = zip(drafts(small, family), drafts(large, family), strict=True)
        return [(x - y).abs().max() / x.abs().max() for x, y in pairs]

    for growth in ({"hidden_size": 24, "stream": "copies"}, {"hidden_size": 20}):
        factor = 12 / growth["hidden_size"]
        assert max(errors(**growth)) <= 1e-12 and growkern.verify(small, large).level == "exact"
    factor = 1.0
    monkeypatch.setattr("growkern.growth.plan.target.eps_factor", lambda small, large: factor)
    assert errors(**growth)[-1] > 1e-3


def test_beside_a_delta_net_a_tied_head_leaves_them_out(tmp_path):
    saved(random_model(*sized("qwen3_5", {}, tied=True)), tmp_path, "qwen3_5")
    assert not growkern.plan(tmp_path, hidden_size=20).small.second
