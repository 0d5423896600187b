"""Calls of every public op with every option, which together make every launch of a kernel.

Without a GPU `bench.launches.fill` compiles them. On a GPU the piece "smoke" runs them, beside the
reference in float64.

Shape letters used in this file: N rows, V vocabulary, H and H_t widths of student and teacher.
"""

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import torch
from torch import Tensor

from bench.shared.inputs import OPTIONS, in_nan, make_case, make_heads, make_labels, make_logits
from growkern.ops.adamw import Factors, StatePart, UpdateRule, adamw_step
from growkern.ops.expand import expand
from growkern.ops.expand.call import ExpandCall
from growkern.ops.expand.many import expand_many
from growkern.ops.loss.kl_mlm_loss import kl_mlm_loss
from growkern.ops.loss.linear_kl_mlm_loss import linear_kl_mlm_loss
from growkern.ops.loss.rows.once_on_triton import VARIABLE
from growkern.ops.loss.topk_kl_mlm_loss import topk_kl_mlm_loss

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# rows and vocabulary. Triton makes kernels of their own for multiples of 16: here is every pair.
# Chunks of real batches are multiples of 16, but for the last one
SHAPES = ((6, 128_256), (6, 30_522), (16, 128_256), (16, 30_522))
# of the calls whose options name no other
ALPHA, T = 0.7, 2.0
# A temperature is a constant of the kernels: 1, as a server's teacher has it, has kernels of its
# own, and so have calls without a teacher
PLAIN_T: dict[str, Any] = {"temperature": 1.0}
LABELS_ALONE: dict[str, Any] = {"alpha": 0.0}
Shapes: TypeAlias = Sequence[tuple[int, int]]


class Case(NamedTuple):
    """One call of an op.

    Attributes:
        run: makes the call, and its backward pass; takes the backend. Returns what it computed.
    """

    name: str
    run: Callable[[str], Sequence[Tensor]]


def all_cases(device: str, shapes: Shapes = SHAPES) -> Iterator[Case]:
    """The cases, those that training launches first; `shapes` are as SHAPES."""
    rng = torch.Generator(device).manual_seed(0)
    for make in (headline, losses, expands, steps, edges):
        yield from make(rng, shapes)


def captured(rng: torch.Generator, shapes: Shapes = SHAPES) -> Iterator[Case]:
    """The cases that must fit into a CUDA graph, of every op.

    A work list of `expand` does not: its table is copied from memory of the host.
    """
    yield from headline(rng, shapes[-2:])
    yield from expand_gradients(rng)
    yield from steps(rng, shapes)


# ------------------------------------------------------------------------- losses


def _with_gradients(loss: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    total = loss.sum() if loss.ndim else loss
    return [loss.detach(), *torch.autograd.grad(total, inputs)]


def _loss_case(
    name: str, op: Callable[..., Any], inputs: Sequence[Tensor], beside: Any, y: Tensor, o: Any
) -> Case:
    def run(backend: str) -> list[Tensor]:
        wide = [x.detach().double() if backend == "reference" else x.detach() for x in inputs]
        given = [x.requires_grad_() for x in wide]
        options = {k: v for k, v in o.items() if backend != "reference" or k not in LIMITS}
        options = {"alpha": ALPHA, "temperature": T, "backend": backend, **options}
        teachers = beside(given[0].dtype) if callable(beside) else beside
        loss = op(*given, *teachers, y, **options)
        loss = loss[0] if isinstance(loss, tuple) else loss
        return _with_gradients(loss, given)

    return Case(name, run)


LIMITS = ("vocab_tile", "max_rows", "chunk_bytes", "logits_dtype")


def _named(options: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in options.items()) or "no option"


def _given(options: dict[str, Any], N: int, rng: torch.Generator) -> dict[str, Any]:
    if "row_weights" not in options:
        return options
    return options | {"row_weights": torch.rand(N, generator=rng, device=rng.device) + 0.5}


def _count(options: dict[str, Any]) -> int:
    """The number of teachers."""
    return len(options.get("teacher_weights", [1.0])) if options.get("alpha", ALPHA) else 0


def _ready(N: int, V: int, dtype: torch.dtype, o: dict[str, Any], rng: torch.Generator) -> Case:
    student, teacher = make_logits(N, V, dtype, rng)
    options, labels = _given(o, N, rng), make_labels(N, o.get("vocab_size", V), rng)

    def teachers(dtype: torch.dtype) -> tuple[list[Tensor] | None]:
        return ([teacher.to(dtype)] * _count(o) or None,)

    name = f"rows {N}x{V} {dtype}, {_named(o)}".replace("torch.", "")
    return _loss_case(name, kl_mlm_loss, [student], teachers, labels, options)


def _from_heads(
    N: int,
    V: int,
    dtype: torch.dtype,
    o: dict[str, Any],
    rng: torch.Generator,
    bias: bool = False,
    k: int = 0,
) -> Case:
    """The loss of a whole teacher, or of `k` tokens of it that are kept."""
    student, teacher = make_heads(N, V, 32, 16, dtype, rng)
    vocab = o.get("vocab_size", V)
    known = o.get("teacher_vocab_size", vocab)
    k, beside = min(k, known), ()
    options, labels = _given(o, N, rng), make_labels(N, vocab, rng)
    biases = [torch.randn(V, generator=rng, device=rng.device).to(dtype)] * bias
    if k:
        ids = torch.rand(N, known, generator=rng, device=rng.device).topk(k).indices
        log_p = torch.full((N, k), 0.5 / k, device=rng.device).log()
        beside = ([ids] * _count(o) or None, [log_p] * _count(o) or None)
        options = {key: value for key, value in options.items() if key != "teacher_softcap"}

    def op(x: Tensor, w: Tensor, *rest: Any, **options: Any) -> Any:
        options |= {"student_bias": rest[0]} if bias else {}
        if k:
            return topk_kl_mlm_loss(x, w, *rest[bias:], **options)
        hidden, weight, *its_bias = (
            [part.to(x.dtype)] * _count(o) or None for part in (*teacher, *biases)
        )
        options |= {"teacher_bias": its_bias[0]} if bias else {}
        return linear_kl_mlm_loss(x, w, hidden, weight, rest[-1], **options)

    kind, unusual = (f"top-{k}", "bias") if k else ("linear", "no bias")
    words = (f"{kind} {N}x{V} {dtype}", *[unusual] * (bias == bool(k)), _named(o))
    name = ", ".join(words).replace("torch.", "")
    return _loss_case(name, op, [*student, *biases], beside, labels, options)


_linear = functools.partial(_from_heads, bias=True)
_topk = functools.partial(_from_heads, k=8)


def headline(rng: torch.Generator, shapes: Shapes = SHAPES) -> Iterator[Case]:
    """What training launches: with one teacher or none, and no option but the temperature."""
    without_biases = functools.partial(_linear, bias=False)
    for (N, V), dtype in itertools.product(shapes, (BF16, FP32)):
        for make in (_linear, _ready, _topk, without_biases):
            yield make(N, V, dtype, {}, rng)
            yield make(N, V, dtype, PLAIN_T, rng)
        for make in (_linear, _ready, without_biases):
            yield make(N, V, dtype, LABELS_ALONE, rng)


def once(rng: torch.Generator, shapes: Shapes = SHAPES) -> Iterator[Case]:
    """The same with rows that are read once, which is off otherwise."""

    def on(case: Case) -> Case:
        def run(backend: str) -> Sequence[Tensor]:
            with mock.patch.dict(os.environ, {VARIABLE: "1"}):
                return case.run(backend)

        return Case(f"once, {case.name}", run)

    N, V = shapes[2]
    for options in ({}, PLAIN_T, LABELS_ALONE):
        yield on(_linear(N, V, BF16, options, rng, bias=False))


def losses(rng: torch.Generator, shapes: Shapes = SHAPES) -> Iterator[Case]:
    """Every option of every loss, float32 and float64 logits, padded vocabularies, parts."""
    N, V = shapes[-1]
    more: tuple[dict[str, Any], ...] = (*OPTIONS, {"return_parts": True})
    for options in more:
        for make, dtype in ((_ready, FP32), (_linear, BF16), (_topk, BF16)):
            yield make(N, V, dtype, options, rng)
    yield _topk(N, V, BF16, {"tail": "renormalise"}, rng)
    yield _topk(N, V, BF16, {}, rng, bias=True)
    for k in (1, 1000):
        yield _topk(N, V, BF16, {}, rng, k=k)
    # of whole rows: it takes another path than the default
    limits: list[dict[str, Any]] = [{"chunk_bytes": 2 * 4 * N * V}]
    limits += [{"vocab_tile": 8192}, {"max_rows": N}, {"logits_dtype": FP64}]
    for limit, make in itertools.product(limits, (_linear, _topk)):
        yield make(N, V, BF16, limit, rng)
    yield _linear(N, V, FP16, {}, rng)
    yield _linear(N, V, FP32, {"logits_dtype": FP64}, rng)
    # with an option of each kind, float32 gradients are corrected in another loop
    yield _linear(N, V, FP32, OPTIONS[-1] | {"logits_dtype": FP32}, rng)
    # columns behind the vocabulary, as models have them: rows are aligned, the vocabulary is not
    columns = -(-V // 64) * 64
    for make, dtype in itertools.product((_ready, _linear, _topk), (BF16, FP32)):
        yield make(N, columns, dtype, {"vocab_size": V}, rng)
    # a student with tokens that its teacher lacks
    for make, dtype in ((_ready, FP32), (_linear, BF16), (_topk, BF16)):
        yield make(N, V, dtype, {"teacher_vocab_size": V // 2}, rng)
    yield _topk(N, V, BF16, LABELS_ALONE, rng)


def edges(rng: torch.Generator, shapes: Shapes = SHAPES) -> Iterator[Case]:
    """One row, one column, a tile of one column: Triton makes an argument of 1 a constant."""
    all_of = OPTIONS[-1] | {"return_parts": True}
    for N, V in ((1, 300), (4, 1), (1, 1)):
        yield _ready(N, V, FP32, {}, rng)
        yield _ready(N, V, FP32, all_of, rng)
        yield _topk(N, V, BF16, {}, rng)
    yield _linear(4, 65, BF16, all_of | {"vocab_tile": 64}, rng)
    yield _topk(4, 65, BF16, {"vocab_tile": 64}, rng)
    for size in ((64, 1, 128, 1), (1, 64, 1, 128), (1, 1, 1, 1)):
        for how, axis in itertools.product(("noise", "routing"), ("row", "col")):
            yield _expand(size, BF16, BF16, {how: axis}, rng)


# ------------------------------------------------------------------------- expand


def _expand(
    size: tuple[int, int, int, int],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    kind: dict[str, Any],
    rng: torch.Generator,
    drop: Sequence[str] = (),
    layout: str = "dense",
) -> Case:
    case: dict[str, Any] = make_case(size, dtype, rng, **kind) | dict.fromkeys(drop)

    def run(backend: str) -> list[Tensor]:
        if backend == "reference":
            wide = {k: case[k].double() for k in ("weight", "upper") if case.get(k) is not None}
            return [expand(**(case | wide), backend=backend)]
        outs = [in_nan(size[2:], out_dtype, rng, layout) for _ in range(2)]
        expand(**case, out=outs[0], backend=backend)
        expand_many([ExpandCall(outs[1], **case)])
        return outs

    words = (f"expand {size} {dtype} to {out_dtype}", _named(kind), *drop, layout)
    return Case(", ".join(words).replace("torch.", ""), run)


def expands(rng: torch.Generator, shapes: Shapes = SHAPES) -> Iterator[Case]:
    """Every dtype, kind of call and layout, one by one and as a work list."""
    kinds: list[dict[str, Any]] = [{}, {"noise": "col"}, {"upper": True, "noise": "col"}]
    kinds += [{"upper": True}, {"noise": "row"}, {"routing": "row"}, {"routing": "col"}]
    kinds += [{"upper": True, "routing": "col"}, {"routing": "col", "amplitude": 2.0}]
    wide, ragged = (16, 4096, 32, 8192), (9, 17, 20, 33)
    # as growth by FPI launches it: nothing is scaled
    yield _expand(wide, BF16, BF16, {"routing": "col", "scales": False}, rng)
    for dtype, kind in itertools.product((BF16, FP32, FP16, FP64), kinds):
        yield _expand(wide, dtype, dtype, kind, rng)
    some = (*kinds[:3], {"routing": "col"})
    for kind, layout in itertools.product(some, ("dense", "padded", "strided", "turned")):
        yield _expand(ragged, BF16, BF16, kind, rng, layout=layout)
    for drop in (("rows",), ("cols",), ("rows", "row_scale"), ("row_scale",)):
        yield _expand((64, 64, 64, 64), BF16, FP32, {}, rng, drop)
    yield from expand_gradients(rng)


def expand_gradients(rng: torch.Generator) -> Iterator[Case]:
    """Both passes of expand: the backward pass folds copies back onto the weight."""
    for dtype, kind in itertools.product((BF16, FP32), ({}, {"routing": "col"}, {"noise": "row"})):
        case: dict[str, Any] = make_case((16, 64, 32, 1024), dtype, rng, **kind)
        above = torch.randn(32, 1024, generator=rng, device=rng.device)
        yield Case(
            f"expand {dtype}, {_named(kind)}, backward".replace("torch.", ""), _folding(case, above)
        )


def _folding(case: dict[str, Any], above: Tensor) -> Callable[[str], list[Tensor]]:
    def run(backend: str) -> list[Tensor]:
        weight = case["weight"].double() if backend == "reference" else case["weight"]
        given = weight.detach().requires_grad_()
        out = expand(**(case | {"weight": given}), backend=backend)
        return [out.detach(), *torch.autograd.grad(out, given, above.to(out.dtype))]

    return run


# --------------------------------------------------------------------- optimizer


def steps(rng: torch.Generator, shapes: Shapes = SHAPES) -> Iterator[Case]:
    """Steps of AdamW with factors of their own, on matrices and on a vector."""
    (_, aligned), (_, V) = shapes[:2]
    yield _step((24, V), rng, amsgrad=False, maximize=False)
    yield _step((V,), rng, amsgrad=False, maximize=False)
    yield _step((24, aligned), rng, amsgrad=True, maximize=True)


def _step(shape: tuple[int, ...], rng: torch.Generator, *, amsgrad: bool, maximize: bool) -> Case:
    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=rng, device=rng.device)

    tensors = [random(*shape) for _ in range(3)]
    tensors += [random(*shape).square() for _ in range(2 if amsgrad else 1)]
    vectors = []
    for _ in range(3):
        each = [random(n).abs() + 0.5 for n in shape]
        vectors.append((each[0][:, None], each[1]) if len(shape) == 2 else tuple(each))
    lr, eps, old = vectors
    rule = UpdateRule(1e-2, 0.9, 0.99, 1e-3, 0.1, maximize, 3.0)

    def run(backend: str) -> list[Tensor]:
        dtype = FP64 if backend == "reference" else FP32
        part = StatePart(*(x.to(dtype, copy=True) for x in tensors))
        wide = [tuple(x.to(dtype) for x in of) for of in (lr, eps)]
        factors = Factors(*wide, tuple(x > 1 for x in old))
        adamw_step(part, factors, 0.3, rule, backend=backend)
        return [part.value, part.mean, part.square, *part.tensors()[4:]]

    words = [f"adamw_step {'x'.join(map(str, shape))} float32", *["amsgrad"] * amsgrad]
    return Case(", ".join(words), run)
