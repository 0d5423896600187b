"""Checks every option of the losses on the device against float64.

The truth is equations (1) to (9) of kl_mlm_loss.py and (1) of topk_kl_mlm_loss.py, written in
PyTorch and differentiated by autograd. It uses nothing of the library.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.on_gpu.check_loss import BARS
from bench.shared.inputs import IGNORED, OPTIONS, make_heads, make_labels, make_logits
from bench.shared.loss_measure import frobenius
from bench.shared.recorder import Recorder, fill_new_memory
from growkern.ops.loss.kl_mlm_loss import kl_mlm_loss
from growkern.ops.loss.linear_kl_mlm_loss import linear_kl_mlm_loss
from growkern.ops.loss.topk_kl_mlm_loss import topk_kl_mlm_loss

# (k, options) for cached teachers with k entries
TOPK_OPTIONS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {}),
    (64, {}),
    (1000, {}),
    (64, {"tail": "renormalise"}),
    (64, {"divergence": "reverse"}),
    (64, {"vocab_tile": 8192}),
    (64, {"teacher_weights": [0.3, 0.7]}),
    (64, OPTIONS[-1] | {"vocab_tile": 8192}),
)
# of the calls whose options name no other
ALPHA, T = 0.7, 2.0
# calls with kernels of their own: at the default temperature, and without a teacher
OTHERS: tuple[dict[str, Any], ...] = ({"temperature": 1.0}, {"alpha": 0.0})


def run(recorder: Recorder) -> None:
    fill_new_memory()
    for check in (ready_logits, _linear, _topk, _past_int32):
        with recorder.attempt(check.__name__.strip("_")):
            check(recorder)


# ---------------------------------------------------------------------- truth


def _capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def _divergence(p: Tensor, q: Tensor, kind: str, beta: float) -> Tensor:
    """Divergence of the log-probs `q` from `p`, per row."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return F.kl_div(b, a, reduction="none", log_target=True).sum(-1)

    if kind == "jsd":
        m = torch.logsumexp(torch.stack([p + math.log(beta), q + math.log(1 - beta)]), 0)
        return beta * kl(p, m) + (1 - beta) * kl(q, m)
    return kl(q, p) if kind == "reverse" else kl(p, q)


def _log_masses(teacher: Any, log_q: Tensor, options: Any) -> tuple[Tensor, Tensor]:
    """Log-probs to compare, of the teacher and of the student.

    A teacher given as logits has those of all tokens. A cached one has those of its k tokens, and
    of the rest as one bucket. The rest is computed as 1 - sum, which is exact enough in float64.
    """
    if isinstance(teacher, Tensor):
        capped = _capped(teacher, options.get("teacher_softcap"))
        return (capped / options.get("temperature", T)).log_softmax(-1), log_q
    ids, log_p = teacher[0].long(), teacher[1].double()
    log_q = log_q.gather(1, ids)
    if options.get("tail") == "renormalise":
        return log_p.log_softmax(-1), log_q
    rests = [torch.log1p(-x.exp().sum(-1, keepdim=True)) for x in (log_p, log_q)]
    return torch.cat([log_p, rests[0]], 1), torch.cat([log_q, rests[1]], 1)


def truth_of(z: Tensor, teachers: Sequence[Any], labels: Tensor, options: Any) -> Tensor:
    """The loss per row in float64. Each term is divided by the number of rows that have it."""
    z = _capped(z, options.get("softcap"))
    live = labels != IGNORED
    smoothing = options.get("label_smoothing", 0.0)
    mlm = F.cross_entropy(z, labels, reduction="none", label_smoothing=smoothing)
    mlm = mlm + live * options.get("z_loss", 0.0) * z.logsumexp(-1) ** 2
    with_kl = torch.ones_like(live) if options.get("kl_rows") == "all" else live
    alpha, temperature = options.get("alpha", ALPHA), options.get("temperature", T)
    log_q = (z / temperature).log_softmax(-1)
    weights = options.get("teacher_weights") or [1 / len(teachers)] * len(teachers)
    kl = sum(
        weight
        * _divergence(
            *_log_masses(teacher, log_q, options),
            options.get("divergence", "forward"),
            options.get("beta", 0.5),
        )
        for weight, teacher in zip(weights, teachers, strict=True)
    )
    counts = (1.0, 1.0) if options.get("reduction") == "none" else (live.sum(), with_kl.sum())
    kl = temperature**2 * torch.where(with_kl, kl, 0)
    rows = (1 - alpha) * mlm / counts[0] + alpha * kl / counts[1]
    return rows if options.get("row_weights") is None else rows * options["row_weights"]


# --------------------------------------------------------------------- checks


def compare(
    recorder: Recorder,
    name: str,
    inputs: Sequence[Tensor],
    ours: Callable[..., Tensor],
    truth: Callable[..., Tensor],
    **facts: Any,
) -> None:
    """Check the loss and every gradient. A loss per row is summed with uneven weights."""
    with recorder.attempt(name):
        _compare(recorder, name, inputs, ours, truth, facts)


def _compare(
    recorder: Recorder,
    name: str,
    inputs: Sequence[Tensor],
    ours: Callable[..., Tensor],
    truth: Callable[..., Tensor],
    facts: dict[str, Any],
) -> None:
    dtype = inputs[0].dtype
    given = [x.detach().requires_grad_() for x in inputs]
    in64 = [x.detach().double().requires_grad_() for x in inputs]
    loss, expected = ours(*given), truth(*in64)
    if loss.ndim:
        weights = torch.linspace(0.5, 1.5, len(loss), device=loss.device)
        loss, expected = (loss * weights).sum(), (expected * weights).sum()
    grads = torch.autograd.grad(loss, given)
    expected = expected.sum()
    facts = {"dtype": str(dtype).removeprefix("torch."), **facts}
    error = abs(loss.item() / expected.item() - 1)
    # in bfloat16 the linear loss rounds the products that are its logits
    recorder.check(f"{name}: loss", error, 1e-4, **facts)
    names = ("gradient",) if len(given) == 1 else ("dX", "dW")
    for wrt, grad, grad64 in zip(names, grads, torch.autograd.grad(expected, in64), strict=True):
        recorder.check(f"{name}: {wrt}", frobenius(grad, grad64), BARS[dtype], **facts)


def _named(options: dict[str, Any], N: int, rng: torch.Generator) -> tuple[str, dict[str, Any]]:
    """A name for the options, and the options with tensors for `row_weights`."""
    words = [
        key if value is True or value == "none" else f"{key} {value}"
        for key, value in options.items()
    ]
    if "row_weights" in options:
        drawn = torch.rand(N, generator=rng, device=rng.device) + 0.5
        options = options | {"row_weights": drawn}
    return ", ".join(words), options


def ready_logits(recorder: Recorder) -> None:
    """Every option on ready logits."""
    rng = torch.Generator(recorder.device).manual_seed(3)
    N, V = recorder.pick((64, 128_256), (3, 41))
    for dtype in recorder.pick(tuple(BARS), (torch.float32,)):
        student, teacher = make_logits(N, V, dtype, rng)
        teachers, labels = [teacher, make_logits(N, V, dtype, rng)[1]], make_labels(N, V, rng)
        for options in (*OTHERS, *OPTIONS):
            name, options = _named(options, N, rng)
            us = teachers[: 2 if "teacher_weights" in options else 1]

            def ours(z: Tensor, o: Any = options, us: Any = us, y: Tensor = labels) -> Tensor:
                asked = {"alpha": ALPHA, "temperature": T, "backend": "triton", **o}
                return kl_mlm_loss(z, us, y, **asked)

            def truth(z: Tensor, o: Any = options, us: Any = us, y: Tensor = labels) -> Tensor:
                return truth_of(z, [u.double() for u in us], y, o)

            compare(recorder, f"rows, {name}", [student], ours, truth, shape=f"{N}x{V}")


def digits(dtype: torch.dtype) -> dict[str, Any]:
    """The option that gives float32 heads the digits of BARS; a GPU's default is float32 logits."""
    return {"logits_dtype": torch.float64} if dtype == torch.float32 else {}


def _linear(recorder: Recorder) -> None:
    """Every option from hidden states, with the whole vocabulary at once and in tiles."""
    rng = torch.Generator(recorder.device).manual_seed(4)
    N, V, H, H_t = recorder.pick((256, 50_257, 768, 512), (5, 41, 12, 8))
    tiles = {"": {}, ", tiles": {"vocab_tile": recorder.pick(8192, 16)}}
    for dtype in recorder.pick((torch.bfloat16, torch.float32), (torch.float32,)):
        student, first = make_heads(N, V, H, H_t, dtype, rng)
        second = make_heads(N, V, H, H_t, dtype, rng)[1]
        labels = make_labels(N, V, rng)
        # `ready_logits` checks each option by itself; toy sizes take all of them at once
        for options in recorder.pick(({}, *OTHERS, *OPTIONS), OPTIONS[-1:]):
            name, options = _named(options, N, rng)
            heads = [first, second][: 2 if "teacher_weights" in options else 1]
            for way, limits in tiles.items():
                asked = {"alpha": ALPHA, "temperature": T, "backend": "triton"}
                asked |= options | limits | digits(dtype)

                def ours(
                    x: Tensor, w: Tensor, o: Any = asked, hs: Any = heads, y: Any = labels
                ) -> Tensor:
                    hidden, weight = ([h[i] for h in hs] for i in range(2))
                    return linear_kl_mlm_loss(x, w, hidden, weight, y, **o)

                def truth(
                    x: Tensor, w: Tensor, o: Any = options, hs: Any = heads, y: Any = labels
                ) -> Tensor:
                    us = [h[0].double() @ h[1].double().t() for h in hs]
                    return truth_of(x @ w.t(), us, y, o)

                title = f"linear{way}, {name or 'no option'}"
                compare(recorder, title, student, ours, truth, shape=f"{N}x{V}x{H}/{H_t}")


def _kept(teacher: Sequence[Tensor], k: int) -> tuple[Tensor, Tensor]:
    logits = teacher[0].double() @ teacher[1].double().t()
    log_p, ids = (logits / T).log_softmax(-1).topk(k, -1)
    # any order of the k entries must work
    return ids.flip(-1), log_p.flip(-1).float()


def _topk(recorder: Recorder) -> None:
    rng = torch.Generator(recorder.device).manual_seed(5)
    shapes = recorder.pick([(256, 30_522, 768, 512), (256, 262_144, 256, 128)], [(5, 41, 12, 8)])
    for N, V, H, H_t in shapes:
        for dtype in recorder.pick((torch.bfloat16, torch.float32), (torch.float32,)):
            student, first = make_heads(N, V, H, H_t, dtype, rng)
            second = make_heads(N, V, H, H_t, dtype, rng)[1]
            labels = make_labels(N, V, rng)
            for k, options in recorder.pick(TOPK_OPTIONS, ((5, TOPK_OPTIONS[-1][1]),)):
                name, options = _named(options, N, rng)
                asked = options | digits(dtype)
                heads = [first, second][: 2 if "teacher_weights" in options else 1]
                kept = [_kept(head, k) for head in heads]

                def ours(
                    x: Tensor, w: Tensor, o: Any = asked, kept: Any = kept, y: Any = labels
                ) -> Tensor:
                    ids, log_p = ([pair[i] for pair in kept] for i in range(2))
                    return topk_kl_mlm_loss(
                        x, w, ids, log_p, y, alpha=ALPHA, temperature=T, backend="triton", **o
                    )

                def truth(
                    x: Tensor, w: Tensor, o: Any = options, kept: Any = kept, y: Any = labels
                ) -> Tensor:
                    return truth_of(x @ w.t(), kept, y, o)

                title = f"top-k, k {k}, {name or 'no option'}"
                compare(recorder, title, student, ours, truth, shape=f"{N}x{V}x{H}")


def _past_int32(recorder: Recorder) -> None:
    """Chunks of more than 2**31 logits must give what small chunks give."""
    rng = torch.Generator(recorder.device).manual_seed(6)
    N, V, H = recorder.pick((8_300, 262_144, 64), (5, 41, 12))
    student, teacher = make_heads(N, V, H, H - 4, torch.bfloat16, rng)
    labels = torch.randint(V, (N,), generator=rng, device=rng.device)
    topk = _kept_in_parts(teacher, recorder.pick(64, 5))
    given = [x.detach().requires_grad_() for x in student]
    for name, loss, beside in (
        ("linear", linear_kl_mlm_loss, teacher),
        ("top-k", topk_kl_mlm_loss, topk),
    ):
        made = {}
        for way, chunk_bytes in (("small", 1 << 28), ("large", 1 << 36)):
            limits = {"temperature": T, "chunk_bytes": chunk_bytes}
            total = loss(*given, *beside, labels, backend="triton", **limits)
            made[way] = (total.detach(), *torch.autograd.grad(total, given))
        for wrt, large, small in zip(
            ("loss", "dX", "dW"), made["large"], made["small"], strict=True
        ):
            # dW is summed in another order, so it differs in the last digits
            error = frobenius(large, small.double())
            recorder.check(f"{name}, 2**31 logits: {wrt}", error, 2e-3, shape=f"{N}x{V}x{H}")


def _kept_in_parts(teacher: Sequence[Tensor], k: int) -> tuple[Tensor, Tensor]:
    parts = [_kept((hidden, teacher[1]), k) for hidden in teacher[0].split(256)]
    ids, log_p = (torch.cat(x) for x in zip(*parts, strict=True))
    return ids, log_p
