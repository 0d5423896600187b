"""Measures how time and memory grow with work, over sizes a decade apart.

FLOPs are counted from the equations: one per scale in `expand`, four GEMMs in the linear loss
(three of the student and one of the teacher), and 20 per logit in the loss of ready logits. Errors
are relative to the ops' references in float64 on the same inputs, where these fit in 1 GB.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.shared.harness import interleaved_ms
from bench.shared.inputs import IGNORED, make_case, make_heads, make_labels, make_logits, truth_rows
from bench.shared.loss_measure import gradient_error, measure
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


def _record(recorder: Recorder, op: str, size: int, moved: int, flops: int, calls: Calls) -> None:
    truth = calls.pop("truth", tuple)()
    ms = interleaved_ms(calls, recorder.pick(7, 1))
    for name, call in calls.items():
        facts = {"op": op, "provider": name, "size": size, "bytes": moved, "flops": flops}
        result = call() if truth else ()
        error = gradient_error(result, truth) if result else None
        extra = measure(call, 1)["extra MiB"]
        recorder.add({**facts, "ms": ms[name], "extra MiB": extra, "error": error})


def _with_truth(calls: Calls, element_count: int, truth: Callable[[], Sequence[Tensor]]) -> Calls:
    return calls | ({"truth": truth} if 8 * element_count <= TRUTH_BYTES else {})


def _expand(n: int, rng: torch.Generator) -> Calls:
    case = make_case((n, n, 2 * n, 2 * n), DTYPE, rng) | {"row_scale": None}
    out = torch.empty(2 * n, 2 * n, dtype=DTYPE, device=rng.device)
    weight, rows, cols = case["weight"], case["rows"], case["cols"]
    scale, every = case["col_scale"].to(DTYPE), torch.arange(2 * n, device=rng.device)
    calls: Calls = {
        "eager": lambda: [weight[rows][:, cols] * scale],
        "growkern": lambda: [expand(**case, out=out)],
    }
    return _with_truth(calls, 4 * n * n, lambda: [truth_rows(case, every)])


def _gradients(
    loss: Callable[..., Tensor], student: Sequence[Tensor], rest: Sequence[Tensor], **options: Any
) -> Sequence[Tensor]:
    """Those of a loss of ours, or of its reference in float64."""
    if options:
        student = [x.detach().double().requires_grad_() for x in student]
        rest = [x.double() if x.is_floating_point() else x for x in rest]
    options |= {"alpha": ALPHA, "temperature": T, "reduction": "sum"}
    return torch.autograd.grad(loss(*student, *rest, **options), student)


def _rows(N: int, V: int, rng: torch.Generator) -> Calls:
    student, teacher = make_logits(N, V, DTYPE, rng)
    student.requires_grad_()
    labels = make_labels(N, V, rng)

    def plain() -> Sequence[Tensor]:
        loss = loss_sum(student.float(), teacher.float(), labels)
        return torch.autograd.grad(loss, student)

    ours = partial(_gradients, kl_mlm_loss, [student], [teacher, labels])
    return _with_truth(
        {"eager": plain, "growkern": ours}, N * V, partial(ours, backend="reference")
    )


def _linear(N: int, V: int, H: int, H_t: int, rng: torch.Generator) -> Calls:
    student, teacher = make_heads(N, V, H, H_t, DTYPE, rng)
    for x in student:
        x.requires_grad_()
    labels = torch.randint(V, (N,), generator=rng, device=rng.device)

    def plain() -> Sequence[Tensor]:
        z, u = (hidden @ weight.t() for hidden, weight in (student, teacher))
        return torch.autograd.grad(loss_sum(z.float(), u.float(), labels), student)

    ours = partial(_gradients, linear_kl_mlm_loss, student, [*teacher, labels])
    calls: Calls = {"growkern": ours, "GEMMs alone": _gemms(student, teacher)}
    # eager needs seven float32 matrices of logits at once
    calls |= {"eager": plain} if N * V * 4 * 7 < 60 << 30 else {}
    return _with_truth(calls, N * V, partial(ours, backend="reference"))


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
