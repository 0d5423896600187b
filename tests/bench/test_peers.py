"""Peers run where they can be imported; elsewhere, or when they fail, the table says why."""

import sys
from types import ModuleType

import pytest
import torch

from bench import bench_linear_kl_mlm_loss, peers
from bench.peers import Peer, measured


def figures():
    return {"wall s": 1.0}


def fails():
    raise ValueError("not for this dtype\nand more")


def test_a_peer_that_is_missing_is_named(monkeypatch):
    missing = Peer("some-package", "no_such_module_here", None, needs_gpu=False)
    row = measured({"provider": "some"}, missing, fails)
    assert row["why not"] == "some-package is not installed: no module no_such_module_here"
    monkeypatch.setattr(peers, "DEVICE", "cpu")
    for_gpus = missing._replace(needs_gpu=True)
    assert measured({}, for_gpus, fails) == {"why not": "needs a GPU"}


def test_a_peer_that_fails_spoils_no_other_figure(monkeypatch):
    monkeypatch.setitem(sys.modules, "there", ModuleType("there"))
    peer = Peer("there", "there", None, needs_gpu=False)
    assert measured({}, peer, figures) == {"wall s": 1.0}
    assert measured({}, peer, fails) == {"why not": "ValueError: not for this dtype"}
    with pytest.raises(ValueError, match="not for this dtype"):
        measured({}, None, fails)


def test_cut_cross_entropy_is_asked_for_the_labels_alone(monkeypatch):
    """With a stand-in of its signature: loss and gradient are those of cross-entropy."""
    module = ModuleType("cut_cross_entropy")

    def linear_cross_entropy(e, c, targets, *, impl):
        assert impl == ("cce" if torch.cuda.is_available() else "torch_compile")
        return torch.nn.functional.cross_entropy(e @ c.t(), targets)

    module.linear_cross_entropy = linear_cross_entropy
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", module)
    named = {name: rest for name, *rest in bench_linear_kl_mlm_loss.providers(False, torch.float32)}
    loss, alpha, error_alpha, peer = named["cut_cross_entropy, labels alone"]
    assert not peer.why_not() and alpha == error_alpha == 0
    monkeypatch.setattr(bench_linear_kl_mlm_loss, "DEVICE", "cpu")
    error = bench_linear_kl_mlm_loss.error_of(loss, 0.0, 50, 12, 8, torch.float32)
    assert error < 1e-6
    ours = named["growkern, labels alone"][0]
    assert bench_linear_kl_mlm_loss.error_of(ours, 0.0, 50, 12, 8, torch.float32) < 1e-6
