"""The options of the losses, each declared once, and their checks.

`LossCall` has their names, types, defaults and meanings. The keywords of each loss repeat names and
types for editors and type checkers; `public` adds the rest to a loss. From here
`python -m docs.options` writes `growkern/train/sections.py`, the sections of a run file, and
`csrc/maths.h`.
"""

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypedDict, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from growkern.arguments import SHARE, Limit
from growkern.errors import GrowthError, nearest
from growkern.ops.backend import check_tensors
from growkern.ops.loss.rows.values import LABEL_OPTIONS, LIMITS, Divergence, KLRows, Reduction, Tail

IGNORE_INDEX = -100
REDUCTIONS, DIVERGENCES, TAILS = map(get_args, (Reduction, Divergence, Tail))

# ------------------------------------------------------------------- declarations


class LossCall(NamedTuple):
    """The options of one call, as they were given.

    Args:
        alpha: weight of the KL term, 0 to 1. At the float 0 no teacher is read, at the float 1 no
            label. With a 0-d tensor, torch.compile makes one graph for all values, and nothing
            waits for the value. A changing float needs ``dynamic=True`` for one graph, and is
            compiled again at 0 and 1.
        temperature: of the softmax of student and teachers in the KL term.
        divergence: "forward", KL(teacher || student), infinite if the student alone gives
            probability 0 to a token. "reverse", KL(student || teacher), infinite if the teacher
            alone does. "jsd", the generalised Jensen-Shannon divergence of GKD (Agarwal et al.
            2024), always finite. A token of probability 0 in both adds nothing.
        beta: of "jsd", in (0, 1): small values are close to "forward". Default: 0.5.
        ignore_index: the label of rows without the MLM term.
        kl_rows: rows with the KL term: "labels" (rows with a label) or "all" (in training every
            real token). The losses of tensors also take a bool mask of the labels' shape.
        teacher_weights: one number per teacher, sum 1. Default: equal.
        row_weights: float, (...): multiplies both terms of a row. A row of weight 0 may hold
            anything: its terms are not computed. It still counts in the number of rows that "mean"
            divides by; a label of ``ignore_index`` does not. `LossParts` leaves it out, and uses no
            other weights.
        vocab_size: columns from here on are padding, of student and teachers: they count as -inf
            and get a gradient of exactly 0. Default: no padding; all must then be equally wide.
        teacher_vocab_size: tokens that the teachers know, where the student has more. The KL term
            is then over the softmax of these alone, so it moves no later token. A row whose label
            is a later token has no KL term. The student's logits are computed twice. Default: the
            teachers know all tokens.
        softcap, teacher_softcap: cap logits to c * tanh(z / c).
        label_smoothing: share of the label that is spread over the whole vocabulary, in [0, 1).
        z_loss: factor of the squared log of the softmax's denominator.
        tail: of a teacher known by its k likeliest tokens, the use of its remaining probability.
            "bucket", the default, compares it as a whole with the student's. "renormalise" spreads
            it over the k tokens, as Knowledge Inheritance does, with a wrong gradient for small k.
        reduction: "mean" divides each term by its number of rows, "sum" does not divide, "none"
            returns the loss per row, (...).
        num_items: the divisor of "mean" instead of the local counts, for gradient accumulation:
            one number for both terms, or (rows of the MLM term, rows of the KL term).
        return_parts: also return `LossParts`. Its ``mlm`` includes label smoothing and z-loss.
        chunk_bytes: memory for the logits of one chunk, student and teachers together. Default:
            enough rows that accumulating dW takes under a tenth of the time of the chunk's GEMMs.
            It bounds logits alone. On a GPU, 16-bit heads then also need float32 sums of dW, 4 V H
            bytes, if there are several chunks. The least memory has ``vocab_tile``.
        max_rows: the largest number of rows with a term; more are an error. Without it a GPU
            computes the products of all N rows, because reading their number would make it wait.
        vocab_tile: columns per tile of the vocabulary, if chunks of whole rows need too much
            memory. Logits are then computed twice, for the rows' sums and for the gradient (three
            times for "reverse" and "jsd"). For 2048 rows and heads of (128256, 4096) in bfloat16,
            tiles of 1024 columns take an eighth of plain PyTorch's memory on a GPU, and the
            default 0.17. Default: whole rows, unless ``chunk_bytes`` holds fewer than 32 of them.
        logits_dtype: dtype of the logits. Default: float32, or float64 for float64 inputs. On a CPU
            with a teacher, float32 inputs get float64 logits too, and twice the memory of a chunk.
            The KL gradient is then within 1e-5 of exact at 1 % drift instead of up to 8e-5, and
            off by 6e-5 at 0.1 %. With AVX-512 products are float32, and their sums nearly exact.
            ``torch.float64`` asks for float64 products: the error is 3e-7 at any drift, and the
            products of the logits take 1.6 times the time
            (`python -m bench.speed.linear_kl_mlm_loss` has all three).
            Float32 products obey ``torch.set_float32_matmul_precision``.
        group: a process group whose ranks hold neighbouring slices of the columns of all logits, in
            the order of the ranks. Slices may differ in width. Every rank passes all rows and the
            same options, and gets the same loss and the gradient of its own slice. The ranks
            exchange a few numbers per row.
        vocab_start: with ``group``, this rank's first column; ``vocab_size`` is then required.
        backend: "reference", "cpu" (the compiled library) or "triton". Default: the fastest for the
            device; "reference" where the compiled library or Triton is missing.
    """

    alpha: float | Tensor = 0.5
    temperature: float = 2.0
    divergence: Divergence = "forward"
    beta: float | None = None
    ignore_index: int = IGNORE_INDEX
    kl_rows: KLRows | Tensor = "labels"
    teacher_weights: Sequence[float] | None = None
    vocab_size: int | None = None
    teacher_vocab_size: int | None = None
    row_weights: Tensor | None = None
    softcap: float | None = None
    teacher_softcap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    tail: Tail = "bucket"
    reduction: Reduction = "mean"
    num_items: float | Tensor | tuple[float | Tensor, float | Tensor] | None = None
    return_parts: bool = False
    chunk_bytes: int | None = None
    max_rows: int | None = None
    vocab_tile: int | None = None
    logits_dtype: torch.dtype | None = None
    group: dist.ProcessGroup | None = None
    vocab_start: int | None = None
    backend: str | None = None


class Keywords(TypedDict, total=False):
    """The options that all losses have."""

    alpha: float | Tensor
    temperature: float
    divergence: Divergence
    beta: float | None
    teacher_weights: Sequence[float] | None
    vocab_size: int | None
    teacher_vocab_size: int | None
    row_weights: Tensor | None
    label_smoothing: float
    z_loss: float
    num_items: float | Tensor | tuple[float | Tensor, float | Tensor] | None


class RowKeywords(Keywords, total=False):
    """Those that all losses of tensors have."""

    ignore_index: int
    kl_rows: KLRows | Tensor
    softcap: float | None
    reduction: Reduction
    group: dist.ProcessGroup | None
    vocab_start: int | None
    backend: str | None


class LogitKeywords(RowKeywords, total=False):
    """Those of `growkern.kl_mlm_loss`."""

    teacher_softcap: float | None


class HeadKeywords(RowKeywords, total=False):
    """Those that all losses of hidden states have."""

    student_bias: Tensor | None
    chunk_bytes: int | None
    max_rows: int | None
    vocab_tile: int | None
    logits_dtype: torch.dtype | None


class LinearKeywords(HeadKeywords, total=False):
    """Those of `growkern.linear_kl_mlm_loss`."""

    teacher_bias: Tensor | Sequence[Tensor | None] | None
    teacher_softcap: float | None


class TopKKeywords(HeadKeywords, total=False):
    """Those of `growkern.topk_kl_mlm_loss`."""

    tail: Tail


class InheritedKeywords(Keywords, total=False):
    """Those of `growkern.inherited_loss`."""

    kl_rows: KLRows
    max_rows: int | None
    causal: bool | None


# what `linear_kl_mlm_loss` explains, beside the options of `kl_mlm_loss`
OF_CHUNKS = ("chunk_bytes", "max_rows", "vocab_tile", "logits_dtype")
_DEFAULTS = LossCall._field_defaults

Loss = TypeVar("Loss", bound=Callable[..., Any])


def public(keywords: Any, explained: Iterable[str] | None = None) -> Callable[[Loss], Loss]:
    """Give a loss the options of its keywords: its signature and docstring show them.

    It gets all of them. Others are refused, as Python refuses them.

    Args:
        keywords: a `TypedDict`, to which `return_parts` is added.
        explained: options whose declared meanings take the place of the entry ``**options``; None
            for all of them.
    """
    kinds = {**keywords.__annotations__, "return_parts": bool}

    def decorate(loss: Loss) -> Loss:
        found = inspect.signature(loss)
        given = [x for x in found.parameters.values() if x.kind is not x.VAR_KEYWORD]
        # those of the loss itself, such as biases
        own = [x for x in given if x.name not in _DEFAULTS]
        options = [
            inspect.Parameter(
                x, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kinds[x]
            )
            for x, default in _DEFAULTS.items()
            if x in kinds
        ]
        filled = {x.name: x.default for x in options}
        allowed = frozenset(x.name for x in (*own, *options))

        @functools.wraps(loss)
        def checked(*args: Any, **options: Any) -> Any:
            for name in options:
                if name not in allowed:
                    wrong = f"{loss.__name__}() got an unexpected keyword argument {name!r}"
                    raise TypeError(f"{wrong}{nearest(name, allowed)}")
            return loss(*args, **{**filled, **options})

        call: Any = checked
        call.__signature__ = found.replace(parameters=[*own, *options])
        call.__doc__ = _explained(loss, kinds if explained is None else explained)
        return cast(Loss, call)

    return decorate


def _explained(loss: Any, names: Iterable[str]) -> str | None:
    """The docstring of a loss with the declared meanings of some options; None without any."""
    if not (text := inspect.getdoc(loss)) or not (declared := inspect.getdoc(LossCall)):
        return None
    meanings = "".join(
        entry
        for entry in re.split(r"(?m)^(?= {4}\w)", declared)[1:]
        if set(entry.strip().partition(":")[0].split(", ")) <= {*names}
    )
    return re.sub(r"(?m)^ {4}\*\*options:.*\n", lambda _: meanings.rstrip() + "\n", text)


class Maths(NamedTuple):
    """The numbers in the formulas of a row's terms. Custom ops take them as a list of floats."""

    temperature: float = 1.0  # 1: none
    softcap: float = 0.0  # 0: none
    teacher_softcap: float = 0.0  # 0: none
    beta: float = 0.0  # 0: forward KL, 1: reverse KL, between them Jensen-Shannon
    label_smoothing: float = _DEFAULTS["label_smoothing"]
    z_loss: float = _DEFAULTS["z_loss"]

    def is_forward(self) -> bool:
        """Whether the divergence is the forward KL, the one without a second reading."""
        return self.beta == 0

    def is_reverse(self) -> bool:
        """Whether the divergence is the reverse KL, which may be infinite."""
        return self.beta == 1

    def is_capped(self) -> bool:
        """Whether any logits are capped."""
        return bool(self.softcap or self.teacher_softcap)

    def is_plain(self) -> bool:
        """Whether the terms are the forward KL and the cross-entropy, at any temperature."""
        return self == Maths(temperature=self.temperature)

    def sums_logits(self) -> bool:
        """Whether the label's term needs the sum of the logits of a row."""
        return self.label_smoothing != 0

    def student_share(self) -> float:
        """The factor of the student's part of (7); 1 for the reverse KL, which has no other."""
        return 1.0 if self.is_reverse() else 1 - self.beta

    def log_mixture(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Log m of (7); of the reverse KL m is p."""
        if self.is_reverse():
            return log_p
        return torch.logaddexp(log_p + math.log(self.beta), log_q + math.log1p(-self.beta))

    def mixed(self, spread: Tensor, centre: Tensor) -> Tensor:
        """(7) from its two sums, that with p and that with q; also the reverse KL."""
        return self.beta * spread + self.student_share() * centre

    def of_kernels(self) -> tuple[float, ...]:
        """The numbers in the order of the fields, as kernels take them: 1 / T instead of T."""
        return tuple(self._replace(temperature=1 / self.temperature))

    def cap_(self, z: Tensor) -> None:
        """Cap the student's logits, in their memory."""
        if self.softcap:
            z.div_(self.softcap).tanh_().mul_(self.softcap)

    def slope_of_cap(self, z: Tensor) -> Tensor | float:
        """(6) of capped logits."""
        return 1 - (z / self.softcap).square() if self.softcap else 1.0

    def of_capped_logits(self) -> "Maths":
        """The same for the sums of logits that are capped already, without the sum of logits."""
        return self._replace(softcap=0.0, label_smoothing=0.0)


_MAY_BE_NONE = {name for name in LIMITS if _DEFAULTS[name] is None}


class Options(NamedTuple):
    """The checked options of one call; the tensors among them are 0-d or (N,).

    It has no properties: torch.compile of PyTorch 2.9 reads none of a named tuple with tensors.
    """

    alpha: float | Tensor
    maths: Maths
    teacher_weights: tuple[float, ...]
    reduction: str
    num_items: tuple[Any, Any] | None
    parts: bool
    row_weights: Tensor | None
    # the k tokens of a teacher get its remaining probability, and the tail none
    drop_tail: bool = False


# ------------------------------------------------------------------------- checks


def as_teachers(teacher: Any, call: LossCall) -> list[Any]:
    """One teacher, several or none, as a list; empty if ``alpha`` is the float 0."""
    alpha = call.alpha
    if isinstance(alpha, Tensor):
        if alpha.ndim != 0 or alpha.requires_grad:
            raise GrowthError("alpha must be a float or a 0-d tensor without gradient: detach it")
    else:
        _check_number("alpha", alpha, SHARE)
    if teacher is None:
        teachers = []
    else:
        teachers = list(teacher) if isinstance(teacher, Sequence) else [teacher]
    if not teachers and (isinstance(alpha, Tensor) or alpha > 0):
        raise GrowthError(
            "alpha > 0 needs a teacher: pass one, or alpha=0.0 for the plain MLM loss"
        )
    return [] if not isinstance(alpha, Tensor) and alpha == 0 else teachers


def _check_number(name: str, x: Any, limit: Limit) -> None:
    # known non-numbers are refused instead of known numbers accepted: when torch.compile traces a
    # call, a number has a type of its own
    if x is None or isinstance(x, (str, list, tuple, dict)) or not limit.inside(x):
        raise GrowthError(f"{name} must {limit.must}, got {x!r}")


def check_options(call: LossCall, n_teachers: int, labels: Tensor) -> Options:
    """The options of a call, checked."""
    row_weights = _checked_row_weights(call.row_weights, labels)
    beta = _checked_beta(call.divergence, call.beta)
    for name, limit in LIMITS.items():
        if name not in _MAY_BE_NONE or getattr(call, name) is not None:
            _check_number(name, getattr(call, name), limit)
    if call.reduction not in REDUCTIONS:
        raise GrowthError(f"reduction must be one of {REDUCTIONS}, got {call.reduction!r}")
    num_items = _checked_num_items(call.num_items, call.reduction)
    maths = Maths(
        # without a teacher nothing is computed at the temperature
        temperature=float(call.temperature) if n_teachers else 1.0,
        softcap=float(call.softcap or 0.0),
        teacher_softcap=float(call.teacher_softcap or 0.0),
        beta=beta,
        **{name: float(getattr(call, name)) for name in LABEL_OPTIONS},
    )
    weights = _checked_teacher_weights(call.teacher_weights, n_teachers)
    return Options(
        call.alpha, maths, weights, call.reduction, num_items, call.return_parts, row_weights,
        _drops_tail(call.tail, maths),
    )  # fmt: skip


def _drops_tail(tail: str, maths: Maths) -> bool:
    """`Options.drop_tail`."""
    if tail not in TAILS:
        raise GrowthError(f"tail must be one of {TAILS}, got {tail!r}")
    if tail == "renormalise" and maths.is_reverse():
        raise GrowthError(
            "divergence='reverse' is infinite with tail='renormalise', which gives probability 0 "
            "to all but the k tokens: use tail='bucket'"
        )
    return tail == "renormalise"


def _checked_row_weights(weights: Tensor | None, labels: Tensor) -> Tensor | None:
    """Row weights as (N,)."""
    check_tensors({"labels": labels})
    if weights is None:
        return None
    check_tensors({"row_weights": weights})
    if weights.shape != labels.shape or not weights.is_floating_point() or weights.requires_grad:
        raise GrowthError(
            f"row_weights must be a float tensor of the labels' shape {tuple(labels.shape)} "
            f"without gradient, got {weights.dtype} {tuple(weights.shape)}"
        )
    return weights.reshape(-1)


def _checked_teacher_weights(given: Sequence[float] | None, n_teachers: int) -> tuple[float, ...]:
    if given is None or n_teachers == 0:
        return (1.0 / n_teachers,) * n_teachers if n_teachers else ()
    weights = tuple(float(w) for w in given)
    # written so that NaN fails
    if len(weights) != n_teachers or not (min(weights) >= 0 and abs(sum(weights) - 1) <= 1e-6):
        raise GrowthError(
            f"teacher_weights must be {n_teachers} numbers (one per teacher), none negative, "
            f"that sum to 1, got {weights}"
        )
    return weights


def _checked_num_items(num_items: Any, reduction: str) -> tuple[Any, Any] | None:
    """Numbers or 0-d tensors. In another shape a tensor would multiply the rows' weights."""
    if num_items is None:
        return None
    if reduction != "mean":
        raise GrowthError(f"num_items works only with reduction='mean', got {reduction!r}")
    counts = num_items if isinstance(num_items, (tuple, list)) else (num_items,) * 2
    # the value of a tensor is not read: that would wait for a GPU
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
    n_mlm, n_kl = (x.reshape(()) if isinstance(x, Tensor) else x for x in counts)
    return n_mlm, n_kl


def _checked_beta(divergence: str, beta: float | None) -> float:
    """`Maths.beta`; that it is within its limits is checked with the others."""
    if divergence not in DIVERGENCES:
        raise GrowthError(f"divergence must be one of {DIVERGENCES}, got {divergence!r}")
    if divergence == "jsd":
        return 0.5 if beta is None else beta
    if beta is not None:
        raise GrowthError(f"beta belongs to divergence='jsd', not to {divergence!r}")
    return float(divergence == "reverse")
