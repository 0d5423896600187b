"""Libraries that cannot be imported or fail stay in the table, with the reason."""

import sys
from types import ModuleType

import pytest
import torch

from bench.shared import harness, loss_measure, peers
from bench.shared.loss_measure import Provider, in_turns
from bench.shared.peers import Peer
from bench.speed import linear_kl_mlm_loss


def fails():
    raise ValueError("not for this dtype\nand more")


def test_a_peer_that_is_missing_is_named(monkeypatch):
    missing = Peer("some-package", "no_such_module_here", None, needs_gpu=False)
    (row,) = in_turns([Provider("some", fails, peer=missing)], 1)
    why = "some-package is not installed: no module no_such_module_here"
    assert row == {"provider": "some", "why not": why}
    monkeypatch.setattr(peers, "DEVICE", "cpu")
    assert missing._replace(needs_gpu=True).why_not() == "needs a GPU"


def test_a_failing_library_leaves_the_other_rows(monkeypatch):
    monkeypatch.setitem(sys.modules, "there", ModuleType("there"))
    peer = Peer("there", "there", None, needs_gpu=False)
    calls = []
    good = Provider("good", lambda: calls.append("good"), lambda: 0.5, peer)
    also = Provider("also", lambda: calls.append("also"))
    late = Provider("late", lambda: None, fails)
    graph = Provider("graph", lambda: None, replays=True)
    rows = in_turns([good, Provider("bad", fails, peer=peer), also, late, graph], 2)
    assert calls == ["good", "also"] * 3  # in turns; the first turn is a warm-up
    by_name = {row.pop("provider"): row for row in rows}
    assert by_name["good"]["gradient error"] == 0.5
    assert by_name["also"].keys() == {"wall s", "CPU s", "extra MiB"}
    # a graph keeps its memory, so that of a replay would be 0
    assert by_name["graph"].keys() == {"wall s", "CPU s"}
    assert by_name["bad"] == by_name["late"] == {"why not": "ValueError: not for this dtype"}
    with pytest.raises(ValueError, match="not for this dtype"):
        in_turns([Provider("ours", fails, ours=True)], 1)


@pytest.mark.parametrize("by_head", [True, False])
def test_trl_is_called_in_both_orders_of_its_arguments(by_head, monkeypatch):
    """With stand-ins of both signatures the gradient is that of the divergence."""

    def divergence(z, u, mask, beta):
        assert mask.shape == z.shape[:2] and beta == 0.0
        kl = torch.nn.functional.kl_div(
            z.log_softmax(-1), u.log_softmax(-1), log_target=True, reduction="none"
        )
        return kl.sum(-1).mean(), None, None

    def heads_together(hidden, student_weight, teacher_hidden, teacher_weight, *rest, chunk_size):
        return divergence(hidden @ student_weight.t(), teacher_hidden @ teacher_weight.t(), *rest)

    def hidden_together(hidden, teacher_hidden, weight, teacher_weight, *rest, num_items=None):
        return divergence(hidden @ weight.t(), teacher_hidden @ teacher_weight.t(), *rest)

    names = ("trl", "trl.trainer", "trl.trainer.distillation_trainer")
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    last = modules[names[-1]]
    last._chunked_divergence_loss = heads_together if by_head else hidden_together
    monkeypatch.setattr(loss_measure, "DEVICE", "cpu")
    assert loss_measure.error_of(peers.trl_chunked, 1.0, 50, 12, 8, torch.float32) < 1e-5


def test_rows_are_there_before_all_turns_are_over(monkeypatch):
    """A time-out in the middle of a shape leaves a row of every provider that ran."""
    seen = []

    def stopped():
        assert len(seen[-1]) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(harness, "observer", lambda rows: seen.append(rows))
    first = Provider("first", lambda: None, lambda: 0.25)
    with pytest.raises(KeyboardInterrupt):
        in_turns([first, Provider("second", stopped)], 2, facts={"shape": "2x3"})
    (row,) = seen[-1]
    assert {"shape": "2x3", "provider": "first", "gradient error": 0.25}.items() <= row.items()
    assert row["wall s"] >= 0 and row["turns"] == 0
    made = in_turns([first], 2)
    assert (
        seen[-2][0]["turns"] == 2 and seen[-1] == [] and len(made) == 1 and "turns" not in made[0]
    )


def test_ratios_are_taken_turn_by_turn(monkeypatch):
    """A turn that other load slowed three times has the same ratio."""
    seconds = {"ours": [9.0, 1.0, 3.0, 1.0], "torch.compile": [9.0, 2.0, 6.0, 2.5]}
    seconds["ours, labels alone"] = [1.0] * 4
    taken = {name: iter(values) for name, values in seconds.items()}
    monkeypatch.setattr(loss_measure, "_sample", lambda name: {"wall s": next(taken[name])})
    ratios = {row["provider"]: row.get("x compile") for row in in_turns(named(seconds), 3)}
    # there is no compiled version of the labels alone
    assert ratios == {"ours": 0.5, "torch.compile": 1.0, "ours, labels alone": None}


def named(names):
    """Providers whose step is their name."""
    return [Provider(name, name) for name in names]


def test_cut_cross_entropy_is_called_with_labels_only(monkeypatch):
    """With a stand-in of the same signature, loss and gradient are those of cross-entropy."""
    module = ModuleType("cut_cross_entropy")

    def linear_cross_entropy(e, c, targets, *, impl):
        assert impl == ("cce" if torch.cuda.is_available() else "torch_compile")
        return torch.nn.functional.cross_entropy(e @ c.t(), targets)

    module.linear_cross_entropy = linear_cross_entropy
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", module)
    named = {name: rest for name, *rest in linear_kl_mlm_loss.losses(False, torch.float32)}
    loss, alpha, error_alpha, peer = named["cut_cross_entropy, labels alone"]
    assert not peer.why_not() and alpha == error_alpha == 0
    monkeypatch.setattr(loss_measure, "DEVICE", "cpu")
    error = loss_measure.error_of(loss, 0.0, 50, 12, 8, torch.float32)
    assert error < 1e-6
    ours = named["growkern, labels alone"][0]
    assert loss_measure.error_of(ours, 0.0, 50, 12, 8, torch.float32) < 1e-6


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_liger_compiles_its_chunks_on_a_gpu_as_by_default(device, monkeypatch):
    """A stand-in of the same signature tells how it is made; its loss is that of the equation."""
    module, made = ModuleType("liger_kernel.chunked_loss"), []

    class LigerFusedLinearJSDLoss:
        def __init__(self, hard, soft, *, beta, compiled=True, chunk_size=1024):
            assert beta == 0.0
            self.parts = hard, soft
            made.append((compiled, chunk_size))

        def __call__(self, x, w, teacher_x, teacher_w, labels):
            (hard, soft), log_p = self.parts, (teacher_x @ teacher_w.t()).log_softmax(-1)
            log_q = (x @ w.t()).log_softmax(-1)
            kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
            return hard * torch.nn.functional.nll_loss(log_q, labels) + soft * kl

    module.LigerFusedLinearJSDLoss = LigerFusedLinearJSDLoss
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(peers, "DEVICE", device)
    monkeypatch.setattr(loss_measure, "DEVICE", "cpu")
    assert loss_measure.error_of(peers.liger_jsd, 0.3, 50, 12, 8, torch.float32) < 1e-5
    assert made == [(True, 1024) if device == "cuda" else (False, 256)]
