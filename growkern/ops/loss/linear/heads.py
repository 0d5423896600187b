"""Arguments of the linear loss: the checked heads of student and teachers, and its settings.

Shape letters used in this file: N rows, H width, V vocabulary, K teachers.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.ops.backend import acc_torch_dtype, advise_huge_pages, check_tensors
from growkern.ops.loss.rows.inputs import shard_of_call
from growkern.ops.loss.rows.options import LossCall, Maths, Options
from growkern.ops.loss.rows.vocab_parallel import WHOLE, Shard, check_shard, shard_of


class Head(NamedTuple):
    """One model's hidden states and output head."""

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor  # (V,), or (0,) without one


def heads_of(tensors: Sequence[Tensor]) -> list[Head]:
    """The heads of a custom op, which takes their tensors as a flat list."""
    each = len(Head._fields)
    return [Head(*tensors[k : k + each]) for k in range(0, len(tensors), each)]


def anchor_of(student: Sequence[Tensor]) -> Tensor:
    """A tensor without elements that depends on the whole student: saving it takes no memory."""
    return torch.cat([x.as_strided((0,), (1,)) for x in student if x.numel()])


class Sizes(NamedTuple):
    """The vocabulary, and the limits on the memory of a call (0: no limit)."""

    vocab: int  # columns from here on are padding
    columns: int  # about `vocab`, but the same on all ranks of a group
    chunk_bytes: int = 0
    max_rows: int = 0
    vocab_tile: int = 0
    start: int = 0  # the first column here, counted over all ranks
    total: int = 0  # columns of all ranks


# those of them that are options
LIMITS = tuple(name for name in Sizes._fields if name in LossCall._fields)


class HeadSettings(NamedTuple):
    """The arguments of a call that are not tensors.

    A custom op takes only plain lists: `as_arguments` makes those, and `from_arguments` gives the
    names back.
    """

    sizes: Sizes
    maths: Maths
    parts: bool
    per_row: bool  # return the loss of every row, and no gradient yet
    want: Sequence[bool]  # whether dX, dW and db are wanted
    dtype: torch.dtype  # of the logits
    group: str  # name of the process group with the other columns; "": none
    backend: str
    drop_tail: bool = False  # of the top-k loss: tail="renormalise"
    wide_products: bool = False  # float64 logits from float64 products, see `project`


def as_arguments(settings: HeadSettings) -> list[Any]:
    """The arguments of a custom op: sizes, maths, switches, want, dtype, group, backend."""
    sizes, maths, parts, per_row, want, *others, drop_tail, wide = settings
    return [list(sizes), list(maths), [parts, per_row, drop_tail, wide], want, *others]


def from_arguments(arguments: Sequence[Any]) -> HeadSettings:
    """The inverse of `as_arguments`."""
    sizes, maths, (parts, per_row, *others), want, dtype, group, backend = arguments
    numbers = Sizes(*sizes), Maths(*maths)
    return HeadSettings(*numbers, parts, per_row, want, dtype, group, backend, *others)


# ------------------------------------------------------------------- sizes and outputs

# rows whose dz makes one product, and the bytes of it that are held for any width of the head
LEAST_HELD, HELD_BYTES = 512, 1 << 30
# rows of a GEMM's tiles are a divisor of this
ROWS_OF_TILES = 256
# a chunk on a CPU has a multiple of these rows, and for many rows at least two of them: a block of
# the compiled GEMM. Fewer make it pack the head more often
ROWS_OF_CPU_CHUNK = 128


def slices(start: int, stop: int, size: int) -> list[slice]:
    """The whole numbers from `start` to `stop`, cut into slices of `size`."""
    return [slice(k, min(stop, k + size)) for k in range(start, stop, size)]


def some_rows(x: Tensor, rows_C: Tensor | slice) -> Tensor:
    """Rows of `x` by their indices."""
    return first_axis(x, rows_C) if isinstance(rows_C, slice) else x.index_select(0, rows_C)


def first_axis(x: Tensor, at: slice) -> Tensor:
    """A slice of `x`, or `x` itself if that is all: beside a small batch a view costs time."""
    return x if at.start == 0 and at.stop == len(x) else x[at]


def rows_of_chunk(H: int, teachers: Sequence[int], balance: int) -> int:
    """Rows of a chunk that make accumulating dW cheap, see `chunk_size`."""
    return max(1, round(80 * H * balance / (6 * H + 2 * sum(teachers))))


def held_rows(
    rows: int, head_widths: Sequence[int], itemsize: int, columns: int
) -> tuple[int, int]:
    """Rows per chunk and rows whose dz is held, for one product that makes dW (0: none).

    Without it every chunk reads and writes float32 sums of dW, and rounds them in the end: that
    takes as long as a third of the GEMMs for 256 rows in two chunks. A dz of 16 bits takes 2 bytes
    per logit and plain PyTorch 36 or more, so all rows may be held. From 4 H rows on, it would be
    more memory than float32 sums and half as many rows: these are then taken in parts.

    A float32 dW is its own sum. dz is then as large as dW, or has an eighth of the rows: together
    with the logits they are within an eighth of plain PyTorch's memory from 2 H + 512 rows on.

    A row of dz has `columns` numbers of `itemsize` bytes.
    """
    if rows <= LEAST_HELD:
        return rows, 0
    width, most = head_widths[0], HELD_BYTES // (itemsize * columns)
    if itemsize == 2:
        most = max(4 * width, most)
    else:
        most = max(LEAST_HELD, min(most, max(width, rows // 8)))
    held = -(-rows // -(-rows // most))
    # logits of all heads then take at most as much as a float32 logit for half of the rows, and
    # less than dW, whose memory serves them: see `logit_memory`
    chunk = min(held // 2, head_widths[0] - 1) // (2 * len(head_widths))
    chunk = max(chunk // ROWS_OF_TILES * ROWS_OF_TILES, ROWS_OF_TILES)
    return chunk, -(-held // chunk) * chunk


def held_rows_on_cpu(rows: int, fitting: int, itemsize: int, columns: int) -> tuple[int, int]:
    """Rows per chunk and rows whose dz is held (0: none) on a CPU; dW is wanted.

    Fresh memory is slow: the system clears it and, in a virtual machine, may have to find it first.
    So the logits of a chunk lie in the memory of dW. bfloat16 also gains that dW needs no float32
    sums. A wider dz of many rows would be more than an eighth of plain PyTorch's memory.

    `fitting` counts the rows whose logits fit into dW; the others as in `held_rows`.
    """
    if not rows or (itemsize != 2 and rows > LEAST_HELD):
        return 0, 0
    held = -(-rows // -(-rows // max(LEAST_HELD, HELD_BYTES // (itemsize * columns))))
    least = ROWS_OF_CPU_CHUNK if rows <= LEAST_HELD else 2 * ROWS_OF_CPU_CHUNK
    if held < rows or fitting < least:
        # dW that holds sums of other rows has no room. Beside dz of many rows the logits are small
        fitting = 2 * ROWS_OF_CPU_CHUNK
    return fitting // ROWS_OF_CPU_CHUNK * ROWS_OF_CPU_CHUNK, held


def logit_memory(
    heads: int, numbers: int, like: Tensor, settings: HeadSettings, free_VH: Tensor | None
) -> list[Tensor]:
    """Flat memory for so many logits of each head, and one more number.

    `free_VH` is dW, if nothing is written to it as long as there are logits: its memory serves
    them, if it is large enough. It spares an eighth of the widest head's memory.
    """
    dtype = settings.dtype
    each = -(-(numbers + 1) // 64) * 64  # every head begins at a multiple of 256 bytes
    if free_VH is not None:
        flat = first_axis(free_VH, slice(0, settings.sizes.vocab)).reshape(-1)
        ratio = dtype.itemsize // free_VH.element_size()
        flat = flat[: flat.numel() // ratio * ratio].view(dtype)
        if flat.numel() >= heads * each:
            return [flat[k * each : k * each + numbers + 1] for k in range(heads)]
    return [fresh_memory(like, numbers + 1, dtype) for _ in range(heads)]


def fresh_memory(like: Tensor, numbers: int, dtype: torch.dtype) -> Tensor:
    """Flat memory on the device of `like`."""
    flat = like.new_empty(numbers, dtype=dtype)
    advise_huge_pages(flat)
    return flat


def empty_gradients(
    student: Head, per_row: bool, want: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for dX, dW and db; one that is not wanted has no elements."""
    # a loss scaler multiplies in backward: until then float16 gradients would fall under 6e-8
    dtype = student.hidden.dtype
    dtype = acc_torch_dtype(student.hidden) if dtype == torch.float16 else dtype
    dx, dw, db = (
        torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
        if wish and not per_row
        else x.new_empty(0)
        for x, wish in zip(student, want, strict=True)
    )
    return dx, dw, db


def empty_outputs(
    student: Head, weight_WN: Tensor, per_row: bool, want: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Those of the op: the loss, the terms of its rows, and the gradients."""
    W, N = weight_WN.shape
    loss = weight_WN.new_empty((N,) if per_row else ())
    return loss, weight_WN.new_empty(2 * W, N), *empty_gradients(student, per_row, want)


# ------------------------------------------------------------------- checks


def _checked_limits(call: LossCall) -> dict[str, int]:
    limits = {name: getattr(call, name) for name in LIMITS}
    for name, limit in limits.items():
        if limit is not None and not (isinstance(limit, int) and limit > 0):
            raise GrowthError(f"{name} must be a positive integer, got {limit!r}")
    return {name: limit or 0 for name, limit in limits.items()}


def settings_of(
    call: LossCall,
    options: Options,
    student: Head,
    vocab: int,
    shard: Shard,
    backend: str,
) -> HeadSettings:
    """The settings of a call."""
    total = shard.vocab or vocab
    limits = _checked_limits(call)
    sizes = Sizes(vocab, shard.each or vocab, start=shard.start, total=total, **limits)
    want = [torch.is_grad_enabled() and x.requires_grad for x in student]
    # a float64 student keeps its digits beside a float32 teacher
    wide_products = torch.float64 in (call.logits_dtype, student.hidden.dtype)
    dtype = check_logits_dtype(call.logits_dtype, student.hidden, len(options.teacher_weights) > 0)
    return HeadSettings(
        sizes, options.maths, options.parts, options.reduction == "none", want, dtype,
        shard.group, backend, options.drop_tail, wide_products,
    )  # fmt: skip


def _is_dtensor(x: Any) -> bool:
    return hasattr(x, "device_mesh")


def _local(x: Any) -> Any:
    """This rank's part of a DTensor, differentiable; anything else as it is."""
    return x.to_local() if _is_dtensor(x) else x


def _whole(x: Any) -> Any:
    """All of a DTensor, which every rank of its mesh asks for; anything else as it is."""
    return x.full_tensor() if _is_dtensor(x) else x


def _check_shards(weights: Sequence[Tensor], call: LossCall) -> Shard:
    """The slice of the vocabulary on this rank, from DTensors or from the options of a group."""
    if not any(_is_dtensor(x) for x in weights):
        return shard_of_call(call)
    if call.group is not None or call.vocab_start is not None:
        raise GrowthError("a DTensor brings its own group: pass neither group nor vocab_start")
    if not _is_dtensor(weights[0]):
        return WHOLE
    group, start, V = shard_of(weights[0])
    if any(shard_of(x)[1] != start for x in weights if _is_dtensor(x)):
        raise GrowthError(
            f"the heads ({[len(x) for x in weights]} rows on this rank) are sharded at different "
            "rows: pad all to one size"
        )
    return check_shard(group, start, call.vocab_size or V)


def check_logits_dtype(
    asked: torch.dtype | None, student_NH: Tensor, has_teacher: bool = True
) -> torch.dtype:
    """The dtype of the logits; without a teacher the narrowest allowed one loses no digits."""
    least = acc_torch_dtype(student_NH)
    if asked not in (None, least, torch.float64):
        raise GrowthError(
            f"logits_dtype must be {least} or torch.float64 for {student_NH.dtype} hidden states, "
            f"got {asked}"
        )
    if asked is None and has_teacher and student_NH.device.type == "cpu":
        # Error of the KL gradient at 1 % drift, relative to float64: 8e-5 after a GEMM in float32,
        # 5e-6 with the sums of `project`. A GPU stays with float32: by data sheets its float64
        # takes 1.3 times as long on an H200. On other GPUs it takes up to 64 times as long
        asked = torch.float64 if least == student_NH.dtype else None
    return asked or least


def checked_heads(
    student: tuple[Tensor, Tensor, Tensor | None],
    hiddens: Sequence[Tensor],
    weights: Any,
    biases: Any,
    call: LossCall,
) -> tuple[list[Head], Shard]:
    """The checked heads of the student and of each teacher, and the slice.

    Under autocast they have its dtype. Sharded heads give this rank's rows.
    """
    student_hidden, student_weight, _ = student
    K = len(hiddens)
    named = []
    if K:
        weights = list(weights) if isinstance(weights, (list, tuple)) else [weights]
        biases = list(biases) if isinstance(biases, (list, tuple)) else [biases] * K
        if len(weights) != K or len(biases) != K:
            raise GrowthError(
                f"{K} teacher_hidden need {K} teacher_weight and teacher_bias, got {len(weights)} "
                f"and {len(biases)}"
            )
        named = [
            (f"teacher[{k}]", *head)
            for k, head in enumerate(zip(hiddens, weights, biases, strict=True))
        ]
    named = [("student", *student), *named]
    for name, hidden, weight, bias in named:
        _check_head(name, hidden, weight, bias, student_hidden)
    shard = _check_shards([weight for _, _, weight, _ in named], call)
    heads: list[Head] = []
    for name, hidden, weight, bias in named:
        if _is_dtensor(student_weight) and not _is_dtensor(weight):
            # every rank has the whole teacher
            columns = slice(shard.start, shard.start + len(_local(student_weight)))
            weight, bias = (x if x is None else x[columns] for x in (weight, bias))
        # a teacher's parts beside a whole student are gathered
        part = _local if _is_dtensor(student_weight) else _whole
        hidden, weight, bias = map(part, (hidden, weight, bias))
        # kernels read a bias number by number
        bias = weight.new_empty(0) if bias is None else bias.contiguous()
        head = Head(hidden.reshape(-1, hidden.shape[-1]), weight, bias)
        device = hidden.device.type
        if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
            head = Head(*(x.to(dtype) for x in head))
        if len({x.dtype for x in head}) > 1:
            raise GrowthError(
                f"{name}: hidden, weight and bias must share a dtype, got "
                f"{[str(x.dtype) for x in head]}: cast them, or run under autocast"
            )
        heads.append(head)
    return heads, shard


def _check_head(
    name: str, hidden: Tensor, weight: Tensor | None, bias: Tensor | None, student: Tensor
) -> None:
    given = {"hidden": hidden, "weight": weight, "bias": bias}
    check_tensors({f"{name} {what}": x for what, x in given.items() if x is not None})
    if weight is None or weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        shape = None if weight is None else tuple(weight.shape)
        raise GrowthError(f"{name}: hidden {tuple(hidden.shape)} needs weight (V, H), got {shape}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise GrowthError(
            f"{name}: bias {tuple(bias.shape)} must be ({weight.shape[0]},), the rows of weight"
        )
    if hidden.shape[:-1] != student.shape[:-1]:
        raise GrowthError(
            f"{name}: hidden {tuple(hidden.shape)} and student_hidden {tuple(student.shape)} must "
            "have the same rows"
        )
    tensors = [x for x in (hidden, weight, bias) if x is not None]
    if any(x.device != student.device or not x.is_floating_point() for x in tensors):
        raise GrowthError(
            f"{name}: hidden, weight and bias must be float tensors on {student.device}"
        )
    if name != "student" and any(x.requires_grad for x in tensors):
        raise GrowthError(f"the teacher is frozen: detach hidden, weight and bias of {name}")
