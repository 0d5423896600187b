"""Measures how time and memory grow with work, over sizes a decade apart.

FLOPs are counted from the equations: one per scale in `expand`, four GEMMs in the linear loss
(three of the student and one of the teacher), and 20 per logit in the loss of ready logits. Errors
are relative to float64 on the same inputs. They are computed where the float64 result fits in 1 GB.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.shared.harness import interleaved_ms
from bench.shared.inputs import IGNORED, make_case, make_heads, make_labels, make_logits
from bench.shared.loss_measure import gradient_error
from bench.shared.recorder import Recorder
from growkern.ops.expand.op import expand
from growkern.ops.loss.kl_mlm_loss import kl_mlm_loss
from growkern.ops.loss.linear_kl_mlm_loss import linear_kl_mlm_loss

DTYPE = torch.bfloat16
ALPHA, T = 0.7, 2.0
TRUTH_BYTES = 1 << 30
Calls: TypeAlias = dict[str, Callable[[], Sequence[Tensor]]]


def run(recorder: Recorder) -> None:
    rng = torch.Generator(recorder.device).manual_seed(0)
    for n in recorder.pick((512, 1620, 5120, 16_200), (8, 24)):
        _record(recorder, "expand", 4 * n * n, 5 * n * n * 2, 4 * n * n, _expand(n, rng))
    V = recorder.pick(128_256, 50)
    for N in recorder.pick((64, 640, 6400), (2, 4)):
        _record(recorder, "rows", N, 10 * N * V, 20 * N * V, _rows(N, V, rng))
    V, H, H_t = recorder.pick((128_256, 2048, 1024), (50, 12, 8))
    for N in recorder.pick((256, 2560, 25_600), (4, 8)):
        # reads both heads and hidden states, writes the student's gradients
        moved = 2 * (2 * V * H + V * H_t + 2 * N * H + N * H_t)
        flops = 2 * N * V * (3 * H + H_t)
        _record(recorder, "linear", N, moved, flops, _linear(N, V, H, H_t, rng))


def loss_sum(z: Tensor, u: Tensor, labels: Tensor) -> Tensor:
    """The loss in plain PyTorch, summed over the labelled rows, in the dtype of z."""
    live = labels != IGNORED
    mlm = F.cross_entropy(z, labels, ignore_index=IGNORED, reduction="sum")
    log_q, log_p = ((x[live] / T).log_softmax(-1) for x in (z, u))
    kl = F.kl_div(log_q, log_p, reduction="sum", log_target=True)
    return (1 - ALPHA) * mlm + ALPHA * T**2 * kl


def _record(
    recorder: Recorder,
    op: str,
    size: int,
    moved: int,
    flops: int,
    calls: Calls,
) -> None:
    truth_of = calls.pop("truth", None)
    truth = truth_of() if truth_of else ()
    ms = interleaved_ms(calls, recorder.pick(7, 1))
    for name, call in calls.items():
        facts = {"op": op, "provider": name, "size": size, "bytes": moved, "flops": flops}
        result = call() if truth else ()
        error = gradient_error(result, truth) if result else None
        recorder.add({**facts, "ms": ms[name], "extra MiB": _extra_mib(call), "error": error})


def _extra_mib(call: Callable[[], Any]) -> float | None:
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _truth(element_count: int, call: Callable[[], Sequence[Tensor]]) -> Calls:
    return {"truth": call} if 8 * element_count <= TRUTH_BYTES else {}


def _expand(n: int, rng: torch.Generator) -> Calls:
    case = make_case((n, n, 2 * n, 2 * n), DTYPE, rng) | {"row_scale": None}
    out = torch.empty(2 * n, 2 * n, dtype=DTYPE, device=rng.device)
    weight, rows, cols = case["weight"], case["rows"], case["cols"]
    scale = case["col_scale"].to(DTYPE)
    wide = case["col_scale"].double()
    return {
        "eager": lambda: [weight[rows][:, cols] * scale],
        "growkern": lambda: [expand(**case, out=out)],
    } | _truth(4 * n * n, lambda: [weight.double()[rows][:, cols] * wide])


def _rows(N: int, V: int, rng: torch.Generator) -> Calls:
    student, teacher = make_logits(N, V, DTYPE, rng)
    student.requires_grad_()
    labels = make_labels(N, V, rng)

    def plain() -> Sequence[Tensor]:
        loss = loss_sum(student.float(), teacher.float(), labels)
        return torch.autograd.grad(loss, student)

    def ours() -> Sequence[Tensor]:
        loss = kl_mlm_loss(student, teacher, labels, alpha=ALPHA, temperature=T, reduction="sum")
        return torch.autograd.grad(loss, student)

    def truth() -> Sequence[Tensor]:
        z = student.detach().double().requires_grad_()
        return torch.autograd.grad(loss_sum(z, teacher.double(), labels), z)

    return {"eager": plain, "growkern": ours} | _truth(N * V, truth)


def _linear(N: int, V: int, H: int, H_t: int, rng: torch.Generator) -> Calls:
    student, teacher = make_heads(N, V, H, H_t, DTYPE, rng)
    for x in student:
        x.requires_grad_()
    labels = torch.randint(V, (N,), generator=rng, device=rng.device)

    def plain() -> Sequence[Tensor]:
        z, u = (hidden @ weight.t() for hidden, weight in (student, teacher))
        return torch.autograd.grad(loss_sum(z.float(), u.float(), labels), student)

    def ours() -> Sequence[Tensor]:
        loss = linear_kl_mlm_loss(
            *student, *teacher, labels, alpha=ALPHA, temperature=T, reduction="sum"
        )
        return torch.autograd.grad(loss, student)

    def truth() -> Sequence[Tensor]:
        wide = [x.detach().double().requires_grad_() for x in student]
        z, u = wide[0] @ wide[1].t(), teacher[0].double() @ teacher[1].double().t()
        return torch.autograd.grad(loss_sum(z, u, labels), wide)

    gemms = {"GEMMs alone": _gemms(student, teacher)}
    # eager needs seven float32 matrices of logits at once
    fits = {"eager": plain} if N * V * 4 * 7 < 60 << 30 else {}
    return {"growkern": ours} | gemms | fits | _truth(N * V, truth)


def _gemms(student: list[Tensor], teacher: list[Tensor]) -> Callable[[], Sequence[Tensor]]:
    """The products that every linear loss needs: both logits in float32, dX, dW in float32."""
    (x, w), (x_t, w_t) = ([t.detach() for t in head] for head in (student, teacher))
    wide = {"out_dtype": torch.float32} if x.is_cuda else {}
    dz = torch.randn(len(x), len(w), device=x.device).to(x.dtype)

    def run_all() -> Sequence[Tensor]:
        torch.mm(x, w.t(), **wide)
        torch.mm(x_t, w_t.t(), **wide)
        torch.mm(dz, w)
        torch.mm(dz.t(), x, **wide)
        return ()

    return run_all
