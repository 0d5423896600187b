"""Measures a loss beside other libraries' losses: time, peak extra memory and gradient error."""

import argparse
import contextlib
import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.shared import harness
from bench.shared.harness import benchmark_parser, largest_error, now
from bench.shared.inputs import DRIFT, make_heads
from bench.shared.peers import DEVICE, Peer, why_failed
from bench.shared.system import reset_peak, status_mb
from growkern.ops.loss.linear_kl_mlm_loss import linear_kl_mlm_loss


def loss_parser(description: str | None) -> argparse.ArgumentParser:
    """The options of benchmarks of losses."""
    parser = benchmark_parser(description, repeats=3, threads=True)
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True,
        help="also measure torch.compile of the plain loss",
    )  # fmt: skip
    return parser


def _return_free_memory() -> None:
    """Return the memory that earlier steps freed to the system.

    Otherwise this step would reuse it, and its peak would look too low.
    """
    # Only glibc keeps freed memory, and only glibc has these calls. The first one sets
    # M_MMAP_THRESHOLD. Without it, tensors of up to 32 MiB lie in the heap, between others, and
    # whether their memory is returned depends on chance.
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 20)
        libc.malloc_trim(0)


class Provider(NamedTuple):
    """One way to compute a loss: a row of the table.

    Attributes:
        step: forward and backward pass. It must clear the gradients, because a gradient that is
            left would hide the memory of the next step's.
        error: computes the relative error of the gradient; None where there is no gradient.
        peer: the other library that it comes from; None for plain PyTorch and growkern.
        ours: whether it is growkern's. A failure of ours ends the run. A failure of another
            library is noted in its row, and the other rows are still measured.
        replays: whether it replays a CUDA graph. Its row has no "extra MiB": the graph keeps its
            memory from step to step, so a step allocates none.
    """

    name: str
    step: Callable[[], None]
    error: Callable[[], float] | None = None
    peer: Peer | None = None
    ours: bool = False
    replays: bool = False


def in_turns(
    providers: Sequence[Provider], repeats: int, facts: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Measure all providers in turns.

    Every turn runs each provider once, so that other load on the machine slows all alike. The
    first turn is a warm-up. If somebody observes, it is timed a second time there, so that there
    is a row of every provider as soon as possible.

    Args:
        facts: stand before the figures of each row.

    Returns:
        One row per provider: medians of "wall s", "CPU s" and "extra MiB" (peak), "gradient
        error", and "x compile": the median ratio of its time to that of torch.compile in the same
        turn. A provider that cannot run or fails has the reason in "why not" instead.
    """
    measured = [_Measured(provider, facts or {}) for provider in providers]
    for turn in range(repeats + 1):
        for each in measured:
            if turn == 0:
                each.warm_up(harness.observer is not None)
            else:
                each.take()
            if harness.observer is not None:
                harness.observer([x.row() | {"turns": x.turns} for x in measured if x.is_begun])
    by_name = {each.provider.name: each for each in measured}
    rows = [
        each.row() | each.beside(by_name.get(_compiled_of(each.provider.name))) for each in measured
    ]
    if harness.observer is not None:
        harness.observer([])
    return rows


class _Measured:
    """A provider with its samples so far."""

    def __init__(self, provider: Provider, facts: dict[str, Any]) -> None:
        self.provider, self.facts = provider, {**facts, "provider": provider.name}
        self.why_not = provider.peer.why_not() if provider.peer else ""
        self.samples: list[dict[str, float]] = []
        self.first: dict[str, float] | None = None
        self.error: dict[str, float] = {}
        self.is_begun = False

    @property
    def turns(self) -> int:
        return len(self.samples)

    def _ask(self, call: Callable[[], Any]) -> Any:
        if self.why_not:
            return None
        try:
            return call()
        except Exception as error:
            if self.provider.ours:
                raise
            self.why_not = why_failed(error)
            return None

    def warm_up(self, observed: bool) -> None:
        """Run the step once, and once more if its time is wanted at once; then find its error."""
        self.is_begun = True
        self._ask(partial(_sample, self.provider.step))
        if observed:
            self.first = self._ask(partial(_sample, self.provider.step))
        if self.provider.error is not None:
            error = self._ask(self.provider.error)
            self.error = {} if error is None else {"gradient error": error}

    def take(self) -> None:
        """Take the sample of a turn."""
        sample = self._ask(partial(_sample, self.provider.step))
        self.samples += [sample] if sample else []

    def row(self) -> dict[str, Any]:
        """The row as it is now."""
        if self.why_not:
            return self.facts | {"why not": self.why_not}
        taken = self.samples or ([self.first] if self.first else [])
        medians = {key: statistics.median(x[key] for x in taken) for key in (taken or [{}])[0]}
        if self.provider.replays:
            medians.pop("extra MiB", None)
        return self.facts | medians | self.error

    def beside(self, compiled: "_Measured | None") -> dict[str, float]:
        """ "x compile" of `in_turns`; empty if one of the two was not measured in every turn."""
        if self.why_not or compiled is None or not 0 < self.turns == compiled.turns:
            return {}
        pairs = zip(self.samples, compiled.samples, strict=True)
        return {"x compile": statistics.median(x["wall s"] / y["wall s"] for x, y in pairs)}


def _compiled_of(name: str) -> str:
    """The provider that compiles the plain version of the same loss."""
    _, comma, case = name.partition(", labels alone")
    return f"torch.compile{comma}{case}"


def measure(step: Callable[[], None], repeats: int) -> dict[str, float]:
    """Measure one step by itself: the figures that `in_turns` gives."""
    (row,) = in_turns([Provider("", step, ours=True)], repeats)
    del row["provider"]
    return row


def _sample(step: Callable[[], None]) -> dict[str, float]:
    """Run the step once: wall and CPU seconds, and peak extra memory in MiB."""
    gc.collect()
    _return_free_memory()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        reset_peak()
        base = status_mb("VmRSS")
    start, start_cpu = now(), time.process_time()
    step()
    wall, cpu = now() - start, time.process_time() - start_cpu
    if DEVICE == "cuda":
        extra = torch.cuda.max_memory_allocated() - before
    else:
        extra = 1e6 * (status_mb("VmHWM") - base)
    return {"wall s": wall, "CPU s": cpu, "extra MiB": extra / 2**20}


def frobenius(actual: Tensor, truth: Tensor) -> float:
    """Relative error in the Frobenius norm; `truth` is float64."""
    return ((actual.double() - truth).norm() / truth.norm()).item()


def gradient_error(actual: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The largest relative Frobenius error among several gradients."""
    return largest_error(frobenius(a, t) for a, t in zip(actual, truth, strict=True))


# ------------------------------------------------------------- linear losses


def make_inputs(N, V, H, H_t, dtype, drift=DRIFT):
    """Heads of a student and its teacher, as `make_heads` has them, and a label for every row."""
    rng = torch.Generator(DEVICE).manual_seed(0)
    student, teacher = make_heads(N, V, H, H_t, dtype, rng, drift)
    labels = torch.randint(V, (N,), generator=rng, device=DEVICE)
    return [x.requires_grad_() for x in student], teacher, labels


def run_step(loss, student, *rest):
    """A forward and backward pass that leaves no gradient behind."""
    loss(student, *rest).backward()
    for x in student:
        x.grad = None


def plain(student, teacher, labels, alpha, linear=F.linear):
    """The loss as one writes it without a library: all logits, then both losses in float32."""
    logits = [linear(*head) for head in (student, teacher)]
    z, u = (x if x.dtype == torch.float64 else x.float() for x in logits)
    mlm = F.cross_entropy(z, labels)
    kl = F.kl_div(z.log_softmax(-1), u.log_softmax(-1), log_target=True, reduction="batchmean")
    return (1 - alpha) * mlm + alpha * kl


def plain_float32(student, teacher, labels, alpha):
    """`plain` with logits that are made in float32, from factors that are widened first."""
    return plain(student, teacher, labels, alpha, lambda x, w: F.linear(x.float(), w.float()))


def growkern(student, teacher, labels, alpha, **options):
    """`linear_kl_mlm_loss` of heads [hidden, weight], at the others' temperature."""
    options = {"temperature": 1.0, **options}
    return linear_kl_mlm_loss(*student, *teacher, labels, alpha=alpha, **options)


def error_of(fn, alpha, V, H, H_t, dtype, drift=DRIFT):
    """The gradient error of a linear loss, on 64 rows."""
    student, teacher, labels = make_inputs(64, V, H, H_t, dtype, drift)
    in64 = [x.detach().double().requires_grad_() for x in student]
    truth = torch.autograd.grad(plain(in64, [x.double() for x in teacher], labels, alpha), in64)
    return gradient_error(torch.autograd.grad(fn(student, teacher, labels, alpha), student), truth)
