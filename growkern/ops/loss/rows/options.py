"""What the doors of the KL + MLM loss share: checks of the options, and the parts.

Shape letters used in this file: N rows (tokens), V vocabulary, K teachers.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.ops.loss.rows.vocab_parallel import WHOLE, Shard

IGNORE_INDEX = -100
MLM_ROW, KL_ROW = 1, 2  # bits of kind_N: which terms a row carries; 0 costs nothing
REDUCTIONS = ("mean", "sum", "none")
DIVERGENCES = ("forward", "reverse", "jsd")


class LossParts(NamedTuple):
    """Detached 0-d measurements of the pass that computed the loss.

    ``mlm`` and ``kl`` are means over their rows before ``alpha`` weighs them, ``top1_agreement``
    is the share of KL rows whose likeliest token student and teacher agree on, ``entropy`` the
    student's mean entropy in nats over all rows that count. ``kl`` and ``top1_agreement`` are
    None when no teacher ran, and 0 where a tensor ``alpha`` is 0.
    """

    mlm: Tensor
    kl: Tensor | None
    top1_agreement: Tensor | None
    entropy: Tensor


class Maths(NamedTuple):
    """The numbers of a row's terms; a custom op takes them as a list of floats."""

    temperature: float = 1.0
    softcap: float = 0.0  # 0: none
    teacher_softcap: float = 0.0
    beta: float = 0.0  # of the divergence: 0 forward, 1 reverse, between them Jensen-Shannon
    label_smoothing: float = 0.0
    z_loss: float = 0.0


class Rows(NamedTuple):
    """What the row functions of every backend work on."""

    student_NV: Tensor
    teachers_NV: Sequence[Tensor]
    labels_N: Tensor  # columns of these logits; one outside of them is on another slice
    kind_N: Tensor
    vocab: int  # columns from here on are padding
    maths: Maths
    parts: bool  # whether entropy and top-1 agreement are wanted


class Options(NamedTuple):
    """The checked options of one call; the tensors among them are 0-d or (N,)."""

    alpha: float | Tensor
    maths: Maths
    teacher_weights: tuple[float, ...]
    reduction: str
    num_items: Any
    parts: bool
    row_weights: Tensor | None


def as_teachers(teacher: Any, alpha: float | Tensor) -> list[Any]:
    """One teacher, many or none, as a list; empty once ``alpha`` is the float 0."""
    if isinstance(alpha, Tensor):
        if alpha.ndim != 0 or alpha.requires_grad:
            raise GrowthError("alpha must be a float or a 0-d tensor without gradient: detach it")
    else:
        _check_number("alpha", alpha, lambda x: 0 <= x <= 1, "lie in [0, 1]")
    if teacher is None:
        teachers = []
    else:
        teachers = list(teacher) if isinstance(teacher, Sequence) else [teacher]
    if not teachers and (isinstance(alpha, Tensor) or alpha > 0):
        raise GrowthError(
            "alpha > 0 needs a teacher: pass one, or alpha=0.0 for the plain MLM loss"
        )
    return [] if not isinstance(alpha, Tensor) and alpha == 0 else teachers


def _check_number(name: str, x: Any, inside: Callable[[Any], bool], must: str) -> None:
    # what is no number, not what is one: a traced one has a type of its own
    if x is None or isinstance(x, (str, list, tuple, dict)) or not inside(x):
        raise GrowthError(f"{name} must {must}, got {x!r}")


def check_options(
    n_teachers: int,
    alpha: float | Tensor,
    temperature: float,
    teacher_weights: Sequence[float] | None,
    softcap: float | None,
    teacher_softcap: float | None,
    reduction: str,
    num_items: Any,
    parts: bool,
    *,
    divergence: str = "forward",
    beta: float | None = None,
    row_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Options:
    def positive(x: float) -> bool:
        # a comparison, as math.isinf cannot be traced
        return 0 < x < math.inf

    _check_number("temperature", temperature, positive, "be positive and finite")
    for name, cap in (("softcap", softcap), ("teacher_softcap", teacher_softcap)):
        if cap is not None:
            _check_number(name, cap, positive, "be positive and finite, or None for no cap")
    if reduction not in REDUCTIONS:
        raise GrowthError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")
    _check_num_items(num_items, reduction)
    _check_number("label_smoothing", label_smoothing, lambda x: 0 <= x < 1, "lie in [0, 1)")
    _check_number("z_loss", z_loss, lambda x: 0 <= x < math.inf, "be 0 or more")
    if teacher_weights is None or n_teachers == 0:
        weights = (1.0 / n_teachers,) * n_teachers if n_teachers else ()
    else:
        weights = tuple(float(w) for w in teacher_weights)
        # written so that NaN fails
        if len(weights) != n_teachers or not (min(weights) >= 0 and abs(sum(weights) - 1) <= 1e-6):
            raise GrowthError(
                f"teacher_weights must be {n_teachers} numbers (one per teacher), none negative, "
                f"that sum to 1, got {weights}"
            )
    return Options(
        alpha,
        Maths(
            # nothing is taken at T without a teacher
            float(temperature) if n_teachers else 1.0,
            float(softcap or 0.0),
            float(teacher_softcap or 0.0),
            _beta(divergence, beta),
            float(label_smoothing),
            float(z_loss),
        ),
        weights,
        reduction,
        num_items,
        parts,
        row_weights,
    )


def _check_num_items(num_items: Any, reduction: str) -> None:
    if num_items is None:
        return
    if reduction != "mean":
        raise GrowthError(f"num_items divides a mean: it does not go with reduction={reduction!r}")
    counts = num_items if isinstance(num_items, (tuple, list)) else (num_items,) * 2
    # a tensor's value is not asked for: that would wait for a GPU
    right = [
        x.numel() == 1
        if isinstance(x, Tensor)
        else isinstance(x, (int, float)) and 0 < x < math.inf
        for x in counts
    ]
    if len(counts) != 2 or not all(right):
        raise GrowthError(
            "num_items must be a positive number or 0-d tensor, or two of them (rows of the MLM "
            f"term, rows of the KL term), got {num_items!r}"
        )


def _beta(divergence: str, beta: float | None) -> float:
    if divergence not in DIVERGENCES:
        raise GrowthError(f"divergence must be one of {DIVERGENCES}, got {divergence!r}")
    if divergence != "jsd":
        if beta is not None:
            raise GrowthError(f"beta belongs to divergence='jsd', not to {divergence!r}")
        return float(divergence == "reverse")
    beta = 0.5 if beta is None else float(beta)
    if not 0 < beta < 1:
        raise GrowthError(
            f"beta must lie between 0 and 1, got {beta}: at both ends the divergence is 0; "
            "use 'forward' or 'reverse'"
        )
    return beta


def check_vocabulary(
    vocab_size: int | None, student: int, teachers: Sequence[int], shard: Shard = WHOLE
) -> int:
    """The number of real columns here; what lies beyond is padding on either side."""
    widths = (student, *teachers)
    if shard.group:
        here = max(0, shard.vocab - shard.start)
        if here > min(widths) and max(widths) > min(widths):
            raise GrowthError(
                f"the slice from column {shard.start} has {student} columns of the student and "
                f"{list(teachers)} of the teachers: cut all heads at the same columns"
            )
        return min(here, student)
    if vocab_size is None:
        if any(width != student for width in teachers):
            raise GrowthError(
                f"student has {student} columns, teachers {list(teachers)}: pass vocab_size="
                f"{min(widths)} if the rest is padding"
            )
        vocab_size = student
    if not 0 < vocab_size <= min(widths):
        raise GrowthError(
            f"vocab_size={vocab_size} must lie in 1..{min(widths)}: student "
            f"has {student} columns, teachers {list(teachers)}"
        )
    return vocab_size


def loss_parts(rows_SN: Tensor, kind_N: Tensor, options: Options) -> LossParts:
    """Means over the rows of `rows_SN`: mlm, kl per teacher, entropy, top-1 per teacher."""
    rows_SN = rows_SN.detach()
    K = len(options.teacher_weights)
    n_mlm = ((kind_N & MLM_ROW) > 0).sum().clamp(min=1)
    n_kl = ((kind_N & KL_ROW) > 0).sum().clamp(min=1)
    n_any = (kind_N > 0).sum().clamp(min=1)
    sums = [row.sum() for row in rows_SN[: 2 + 2 * K].unbind(0)]
    kl = top1 = None
    if K:
        weighted = list(zip(options.teacher_weights, sums[1 : 1 + K], sums[2 + K :], strict=True))
        kl = sum(w * kl_k for w, kl_k, _ in weighted) * options.maths.temperature**2 / n_kl
        top1 = sum(w * top1_k for w, _, top1_k in weighted) / n_kl
    return LossParts(sums[0] / n_mlm, kl, top1, sums[1 + K] / n_any)


def outcome(
    loss: Tensor, rows_SN: Tensor, kind_N: Tensor, options: Options, shape: torch.Size
) -> Tensor | tuple[Tensor, LossParts]:
    """What a door returns; `shape` is that of the labels."""
    loss = loss.reshape(shape) if options.reduction == "none" else loss
    return (loss, loss_parts(rows_SN, kind_N, options)) if options.parts else loss


def refuse_second_derivative(*_: Any) -> Any:
    """The backward of every backward op: gradients come from a kernel, not from a graph."""
    raise GrowthError(
        "this loss can be differentiated once only: for the gradient of a gradient "
        "(create_graph=True) use backend='reference', which is plain PyTorch"
    )
