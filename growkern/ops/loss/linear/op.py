"""The custom op of the linear loss, and its autograd. It processes the rows with a term in chunks.

Equations are numbered in `linear_kl_mlm_loss.py`. Shape letters used in this file: N rows, R live
rows, those with a term (on a GPU: places for them), C rows of one chunk, H width, V vocabulary,
K teachers, W = 1 + K terms, T = 2 W numbers of a row that `terms` gives, S numbers of its state.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, library
from torch.nn import functional as F

from growkern.errors import GrowthError
from growkern.ops.backend.launch import acc_torch_dtype
from growkern.ops.backend.native import advise_huge_pages
from growkern.ops.backend.transforms import Rules, apply, refuse_second_derivative
from growkern.ops.loss.linear.gemm import GradientSums, chunk_size, gemm_dtype, project
from growkern.ops.loss.linear.heads import Head, Settings, as_arguments, from_arguments, heads_of
from growkern.ops.loss.rows.op import ROW_FUNCTIONS
from growkern.ops.loss.rows.state import (
    RowInputs,
    Rows,
    Steps,
    n_numbers,
    needs_second_reading,
    read_slices,
    terms,
)

# ------------------------------------------------------------------------- chunk


def may_ask(device: torch.device) -> bool:
    """Whether the number of live rows may be read: on a GPU that would wait for the stream."""
    return device.type == "cpu"


def live_rows(kind_N: Tensor, max_rows: int) -> tuple[Tensor, int]:
    """Indices of the rows with a term, (R,), and R. The index N marks an unused place.

    On a GPU their number is not read: a prefix sum puts them into `max_rows` (or N) places.

    Raises:
        GrowthError: on a CPU, more rows than `max_rows` have a term. A GPU asserts it.
    """
    N = kind_N.numel()
    live_N = kind_N > 0
    if may_ask(kind_N.device):
        rows_R = live_N.nonzero().squeeze(1)
        if max_rows and rows_R.numel() > max_rows:
            raise GrowthError(
                f"{rows_R.numel()} rows contribute to the loss, but max_rows={max_rows}: raise "
                "max_rows"
            )
        return rows_R, rows_R.numel()
    R = min(max_rows, N) if max_rows else N
    place_N = live_N.cumsum(0) - 1
    if max_rows:
        torch._assert_async(live_N.sum() <= R, "more rows have a term than max_rows")
    # rows without a term go to the place behind the last one
    rows_R = torch.full((R + 1,), N, dtype=torch.int64, device=kind_N.device)
    place_N = torch.where(live_N, place_N.clamp(max=R), R)
    rows_R.scatter_(0, place_N, torch.arange(N, device=kind_N.device))
    return rows_R[:R], R


def row_columns(columns: int, device: torch.device) -> int:
    """Columns of a row of logits in memory.

    On a GPU every row begins at a multiple of 128 bytes: GEMMs and wide loads want at least 16, and
    a vocabulary of 30522 or 50257 has rows of 8 or 4.
    """
    return columns if may_ask(device) else -(-columns // 64) * 64


class Chunk:
    """Some rows of all heads, whose logits are computed tile by tile.

    `memory` has, per head, a flat tensor for logits of `shape` and one more number. Their columns
    may be more than the vocabulary's, see `row_columns`.
    """

    def __init__(
        self,
        heads: Sequence[Head],
        rows_C: Tensor,
        row_inputs: RowInputs,
        settings: Settings,
        memory: Sequence[Tensor],
        shape: tuple[int, int],
    ) -> None:
        N = len(heads[0].hidden)
        # unused places read the last row
        self.source_C = rows_C.clamp(max=N - 1)
        self.hidden = [head.hidden.index_select(0, self.source_C) for head in heads]
        if not may_ask(rows_C.device):
            # their hidden states are set to 0: their gradient is 0, but 0 * NaN would make dW NaN
            for x_CH in self.hidden:
                x_CH.masked_fill_((rows_C == N)[:, None], 0)
        self.heads, self.settings = heads, settings
        self.labels_C, self.kind_C, self.drows_WC = row_inputs
        # a tile takes the first columns of every row of its buffer
        self.buffers = [flat[:-1].view(shape)[: len(rows_C)] for flat in memory]
        self.computed: slice | None = None  # the columns that the buffers hold

    def tile(self, columns: slice) -> Rows:
        """The logits of some columns, computed unless the buffers still hold them."""
        logits = [buffer[:, : columns.stop - columns.start] for buffer in self.buffers]
        if self.computed != columns:
            for x_CH, head, z_CV in zip(self.hidden, self.heads, logits, strict=True):
                project(x_CH, head.weight[columns], head.bias[columns], z_CV)
            self.computed = columns
        z_CV, *teachers_CV = logits
        labels_C = self.labels_C - columns.start
        V = z_CV.shape[1]
        maths, parts = self.settings.maths, self.settings.parts
        return Rows(z_CV, teachers_CV, labels_C, self.kind_C, V, maths, parts)

    def place(self, z_CV: Tensor) -> Tensor:
        """Where the gradient overwrites the logits: a narrower one takes the start of each row."""
        dtype = gemm_dtype(self.hidden[0])
        return z_CV if dtype == z_CV.dtype else z_CV.view(dtype)[:, : z_CV.shape[1]]

    def read(self, tiles: Sequence[slice], wanted: bool) -> None:
        """Fill the state; if `wanted`, `write` does it for whole rows, with the gradient."""
        K, group = len(self.heads) - 1, self.settings.group
        self.run = ROW_FUNCTIONS[self.settings.backend]
        self.state_SC = self.buffers[0].new_empty(n_numbers(K), len(self.kind_C))
        whole = len(tiles) == 1 and not group
        second = needs_second_reading(K, self.settings.maths)
        self.steps = Steps(sums=whole, diverge=whole and second)
        if not whole:
            read_slices(self.run, functools.partial(map, self.tile, tiles), group, self.state_SC)
        elif not wanted:
            self.run(self.tile(tiles[0]), self.state_SC, self.steps)

    def write(self, columns: slice) -> Tensor:
        """The gradient of some columns, in the memory of their logits."""
        rows = self.tile(columns)
        dz_CV = self.place(rows.student_NV)
        self.computed = None
        self.run(rows, self.state_SC, self.steps._replace(grad=True), self.drows_WC, dz_CV)
        return dz_CV

    def terms(self) -> Tensor:
        """The rows' terms, (T, C), after all reading and writing."""
        return terms(self.state_SC, self.kind_C, self.settings.maths, self.settings.parts)


# ------------------------------------------------------------------------- sweep


def sweep(
    heads: Sequence[Head],
    row_inputs: RowInputs,
    settings: Settings,
    grads: Sequence[Tensor | None],
    make_chunk: Callable[..., Chunk] = Chunk,
) -> Tensor:
    """Return the terms of all rows, (T, N), and fill `grads`: dX (zeros on entry), dW and db.

    Args:
        heads: of the student and of each teacher.
        row_inputs: of all rows.
        settings: of the call.
        grads: memory for each gradient, or None if it is not wanted.
        make_chunk: `Chunk` or a subclass.
    """
    labels_N, kind_N, weight_WN = row_inputs
    student, (W, N) = heads[0], weight_WN.shape
    x_NH = student.hidden
    sizes = settings.sizes
    rows_R, R = live_rows(kind_N, sizes.max_rows)
    widths = [head.hidden.shape[1] for head in heads]
    C, size = chunk_size(R, widths, x_NH, settings.logits_dtype.itemsize, sizes)
    vocab = sizes.vocab
    size = size or max(vocab, 1)
    tiles = [slice(v, min(vocab, v + size)) for v in range(0, max(vocab, 1), size)]
    shape = (min(C, R), row_columns(tiles[0].stop, x_NH.device))
    memory = [x_NH.new_empty(math.prod(shape) + 1, dtype=settings.logits_dtype) for _ in heads]
    for flat in memory:
        advise_huge_pages(flat)
    on_gpu, dw_dtype = not may_ask(x_NH.device), acc_torch_dtype(x_NH)
    if on_gpu and R <= C and x_NH.dtype == torch.bfloat16:
        # one product computes all of dW. It adds in float32 and rounds once, as it writes dW
        dw_dtype = gemm_dtype(x_NH)
    sums = GradientSums(grads, vocab if R else 0, on_gpu, dw_dtype)
    # unused places read row N, which is of kind 0, and write there
    weight_WN, unscale = _fit_to_dtype(weight_WN, x_NH.dtype)
    padded = [F.pad(x, (0, 1)) for x in (labels_N, kind_N, weight_WN)]
    terms_TP = weight_WN.new_zeros(2 * W, N + 1, dtype=settings.logits_dtype)
    for rows_C in rows_R.split(C) if R else ():
        inputs_C = RowInputs(*(x[..., rows_C] for x in padded))
        chunk = make_chunk(heads, rows_C, inputs_C, settings, memory, shape)
        chunk.read(tiles, sums.wanted)
        # backwards, as the buffers still hold the logits of the last tile
        for columns in reversed(tiles) if sums.wanted else ():
            sums.add(chunk.write(columns), chunk.hidden[0], student.weight, columns)
        terms_TP[:, rows_C] = chunk.terms().to(terms_TP.dtype)
        sums.store_rows(rows_C, settings.group, unscale)
    sums.store(unscale)
    return terms_TP[:, :N]


def _fit_to_dtype(weight_WN: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Row weights times a power of two, for float16 gradients, and the inverse factor.

    float16 has no numbers under 6e-8. A row's gradient is at most its weight and, beside a close
    teacher, 1e-6 of it: weights near 2^12 keep both inside float16. The float32 sums are multiplied
    by the inverse.
    """
    if dtype != torch.float16:
        return weight_WN, None
    power = (12 - weight_WN.abs().amax().clamp(min=1e-30).log2()).floor()
    return weight_WN * power.exp2(), (-power).exp2()


# ---------------------------------------------------------------------------- op


@library.custom_op("growkern::linear_kl_mlm", mutates_args=())
def linear_kl_mlm_op(
    student: list[Tensor],
    teachers: list[Tensor],
    labels_N: Tensor,
    kind_N: Tensor,
    weight_WN: Tensor,
    anchor: Tensor,
    sizes: list[int],
    maths: list[float],
    switches: list[bool],
    want: list[bool],
    logits_dtype: torch.dtype,
    group: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, terms of the rows, dX, dW, db.

    Heads are (hidden, weight, bias); a missing bias has no elements. A gradient that is not wanted
    comes back empty. With `per_row` the loss is that of every row, and there is no gradient.
    `anchor` is `anchor_of` of the student. After it come the arguments of `as_arguments`.
    """
    settings = from_arguments([sizes, maths, switches, want, logits_dtype, group, backend])
    rows = RowInputs(labels_N, kind_N, weight_WN)
    return swept(heads_of([*student, *teachers]), rows, settings)


def swept(
    heads: Sequence[Head],
    row_inputs: RowInputs,
    settings: Settings,
    make_chunk: Callable[..., Chunk] = Chunk,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The outputs of the op, from one sweep over `heads`, the student's first."""
    weight_WN = row_inputs.weights
    outputs = cleared_outputs(heads[0], weight_WN, settings.per_row, settings.want)
    loss, rows_SN, *grads = outputs
    wanted = [
        grad if wish and not settings.per_row else None
        for grad, wish in zip(grads, settings.want, strict=True)
    ]
    with torch.autocast(weight_WN.device.type, enabled=False):
        rows_SN.copy_(sweep(heads, row_inputs, settings, wanted, make_chunk))
    loss_N = (weight_WN * rows_SN[: weight_WN.shape[0]]).sum(0)
    loss.copy_(loss_N if settings.per_row else loss_N.sum())
    return outputs


def empty_outputs(
    student: Head, weight_WN: Tensor, per_row: bool, want: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    W, N = weight_WN.shape
    loss = weight_WN.new_empty((N,) if per_row else ())
    rows_SN = weight_WN.new_empty(2 * W, N)
    # a loss scaler multiplies in backward: until then float16 gradients would fall under 6e-8
    dtype = student.hidden.dtype
    dtype = weight_WN.dtype if dtype == torch.float16 else dtype
    dx, dw, db = (
        torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
        if wish and not per_row
        else x.new_empty(0)
        for x, wish in zip(student, want, strict=True)
    )
    return loss, rows_SN, dx, dw, db


def cleared_outputs(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`empty_outputs` filled with zeros, except dW and db: a sweep writes those whole."""
    outputs = empty_outputs(*arguments)
    loss, rows_SN, dx, dw, _ = outputs
    advise_huge_pages(dw)
    for x in (loss, rows_SN, dx):
        x.zero_()
    return outputs


@linear_kl_mlm_op.register_fake
def _(student, teachers, labels_N, kind_N, weight_WN, anchor, *arguments) -> tuple:
    settings = from_arguments(arguments)
    return empty_outputs(Head(*student), weight_WN, settings.per_row, settings.want)


@library.custom_op("growkern::linear_kl_mlm_backward", mutates_args=())
def linear_kl_mlm_backward_op(
    dloss: Tensor, grads: list[Tensor], anchor: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """The gradients of forward times the incoming scalar: new tensors, so backward can run twice.

    `anchor` connects them to the student under create_graph, so that a second derivative is refused
    instead of being zero.
    """
    scaled = [torch.empty_like(grad) for grad in grads]
    for x, grad in zip(scaled, grads, strict=True):
        advise_huge_pages(x)
        torch.mul(grad, dloss.to(grad.dtype), out=x)
    return [x.to(dtype) for x in scaled]


@linear_kl_mlm_backward_op.register_fake
def _(dloss, grads, anchor, dtype) -> list:
    return [torch.empty_like(grad, dtype=dtype) for grad in grads]


# ----------------------------------------------------------------- autograd


def anchor_of(student: Sequence[Tensor]) -> Tensor:
    """A tensor without elements that depends on the whole student: saving it takes no memory."""
    return torch.cat([x[:0].reshape(0) for x in student])


def setup_context(ctx, inputs, output) -> None:
    """Save the inputs of `backward_of`."""
    student, teachers, labels_N, kind_N, weight_WN, anchor, *arguments = inputs
    _, rows_SN, *grads = output
    ctx.mark_non_differentiable(rows_SN, *grads)
    ctx.set_materialize_grads(False)
    ctx.n_teachers, ctx.dtype = len(teachers), Head(*student).hidden.dtype
    ctx.settings, ctx.n_arguments = from_arguments(arguments), len(arguments)
    if ctx.settings.per_row:
        ctx.save_for_backward(anchor, labels_N, kind_N, weight_WN, *student, *teachers)
    else:
        ctx.save_for_backward(anchor, *grads)


def backward_of(op: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """The backward of `op`: the gradients from forward, or for losses per row another sweep."""

    def backward(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Any, ...]:
        none = [None] * (4 + ctx.n_arguments)
        if dloss is None:
            return [None] * 3, [None] * ctx.n_teachers, *none
        anchor, *saved = ctx.saved_tensors
        if ctx.settings.per_row:
            labels_N, kind_N, weight_WN, *heads = saved
            settings = ctx.settings._replace(parts=False, per_row=False)
            with torch.no_grad():
                rows = (labels_N, kind_N, weight_WN * dloss)
                student, teachers = heads[: len(Head._fields)], heads[len(Head._fields) :]
                _, _, *saved = op(student, teachers, *rows, anchor, *as_arguments(settings))
            dloss = dloss.new_ones(())
        grads = apply(_BACKWARD_RULES, dloss, list(saved), anchor, ctx.dtype)
        wanted = zip(grads, ctx.settings.want, strict=True)
        student = [grad if wish else None for grad, wish in wanted]
        return student, [None] * ctx.n_teachers, *none

    return backward


_BACKWARD_RULES = Rules(linear_kl_mlm_backward_op, refuse_second_derivative)
LINEAR_KL_MLM = Rules(linear_kl_mlm_op, backward_of(linear_kl_mlm_op), setup_context)
linear_kl_mlm_op.register_autograd(LINEAR_KL_MLM.backward, setup_context=setup_context)
linear_kl_mlm_backward_op.register_autograd(refuse_second_derivative)
