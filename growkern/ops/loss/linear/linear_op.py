"""The custom op of the linear loss, and its autograd. It processes the rows with a term in chunks.

Equations are numbered in `linear_kl_mlm_loss.py`. Shape letters used in this file: N rows, R rows
of the products (all with a term, and on a GPU also others), C rows of one chunk, G rows whose
gradients one product makes, H width, V vocabulary, K teachers, W = 1 + K terms, T = 2 W numbers of
a row that `terms` gives, S numbers of its state.

The backward multiplies its gradients by the incoming scalar, in place, on the device that has it.
The gradient of an output matrix may take gigabytes. A factor of 1, the usual one, moves none of
them: the kernel reads the factor and ends. The host does not wait for it.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, library

from growkern.errors import GrowthError
from growkern.ops.backend import (
    HAS_TRITON,
    NAMESPACE,
    Rules,
    acc_torch_dtype,
    advise_huge_pages,
    apply,
    is_last_backward,
    is_plain_call,
    jit,
    refuse_second_derivative,
    tl,
)
from growkern.ops.backend.launch import launch
from growkern.ops.loss.linear.gemm import GradientSums, gemm_dtype, project, row_counts
from growkern.ops.loss.linear.heads import (
    Head,
    HeadSettings,
    as_arguments,
    empty_gradients,
    empty_outputs,
    first_axis,
    fresh_memory,
    from_arguments,
    heads_of,
    logit_memory,
    slices,
    some_rows,
)
from growkern.ops.loss.rows.rows_op import ROW_FUNCTIONS
from growkern.ops.loss.rows.state import (
    RowInputs,
    Rows,
    Steps,
    fit_to_dtype,
    n_numbers,
    needs_second_reading,
    read_slices,
    terms,
    weighted,
)

# elements of a block: 16 bytes of bfloat16 for each of 128 threads; as many programs as fit a GPU
SCALED_BLOCK, MOST_PROGRAMS = 1024, 2048


# ------------------------------------------------------------------------- chunk


def may_ask(device: torch.device) -> bool:
    """Whether the number of live rows may be read: on a GPU that would wait for the stream."""
    return device.type == "cpu"


def live_rows(kind_N: Tensor, max_rows: int) -> tuple[Tensor | None, int]:
    """Indices (R,) of rows, among them all with a term, and R. None: all rows in their order.

    On a GPU the number of live rows is not read. A prefix sum puts them before the others, of which
    some fill the `max_rows` places; without `max_rows` all rows are taken.
    """
    N = kind_N.numel()
    R = min(max_rows, N) if max_rows else N
    on_cpu = may_ask(kind_N.device)
    if R == N and not on_cpu:
        return None, N
    if on_cpu:
        rows_R = kind_N.nonzero().squeeze(1)
        if rows_R.numel() > R:
            raise GrowthError(
                f"{rows_R.numel()} rows contribute to the loss, but max_rows={max_rows}: raise "
                "max_rows"
            )
        return (rows_R if rows_R.numel() < N else None), rows_R.numel()
    live_N = kind_N > 0
    before_N, row_N = live_N.cumsum(0), torch.arange(N, device=kind_N.device)
    torch._assert_async(before_N[-1] <= R, "more rows have a term than max_rows")
    place_N = torch.where(live_N, before_N - 1, before_N + (N - 1 - row_N))
    return torch.empty_like(row_N).scatter_(0, place_N, row_N)[:R], R


def row_columns(columns: int, device: torch.device) -> int:
    """Columns of a row of logits in memory.

    On a GPU every row begins at a multiple of 128 bytes: GEMMs and wide loads want at least 16, and
    a vocabulary of 30522 or 50257 has rows of 8 or 4.
    """
    return columns if may_ask(device) else -(-columns // 64) * 64


def project_heads(
    heads: Sequence[Head],
    hidden: Sequence[Tensor],
    columns: slice,
    logits: Sequence[Tensor],
    settings: HeadSettings,
    with_biases: bool,
) -> None:
    """Write some columns of (1) of each head to its `logits`."""
    for x_CH, head, z_CV in zip(hidden, heads, logits, strict=True):
        bias_V = head.bias[columns] if with_biases and head.bias.numel() else None
        project(x_CH, first_axis(head.weight, columns), bias_V, z_CV, settings.wide_products)


class Chunk:
    """Some rows of all heads, whose logits are computed tile by tile.

    `memory` has, per head, a flat tensor for logits of `shape` and one more number. Their columns
    may be more than the vocabulary's, see `row_columns`.

    Attributes:
        biases_at_rows: backends whose row function adds the biases. It spares a pass over the
            logits of each head.
    """

    biases_at_rows: Sequence[str] = ("triton",)

    def __init__(
        self,
        heads: Sequence[Head],
        rows_C: Tensor | slice,
        x_CH: Tensor,
        row_inputs: RowInputs,
        settings: HeadSettings,
        memory: Sequence[Tensor],
        shape: tuple[int, int],
    ) -> None:
        self.rows_C = rows_C
        self.hidden = [x_CH, *(some_rows(head.hidden, rows_C) for head in heads[1:])]
        self.heads, self.settings = heads, settings
        self.labels_C, self.kind_C, self.drows_WC = row_inputs
        # a tile takes the first columns of every row of its memory
        self.memory, self.stride = memory, (shape[1], 1)
        self.computed: slice | None = None  # the columns that the buffers hold
        self.room: Tensor | None = None  # memory for the gradient and one more number, if held

    def tile(self, columns: slice) -> Rows:
        """The logits of some columns, computed unless the buffers still hold them."""
        size = len(self.kind_C), columns.stop - columns.start
        logits = [flat.as_strided(size, self.stride) for flat in self.memory]
        at_rows = self.settings.backend in self.biases_at_rows
        if self.computed != columns:
            project_heads(self.heads, self.hidden, columns, logits, self.settings, not at_rows)
            self.computed = columns
        (z_CV, *teachers_CV), labels_C = logits, self.labels_C
        labels_C = labels_C - columns.start if columns.start else labels_C
        maths, parts = self.settings.maths, self.settings.parts
        rows = Rows(z_CV, teachers_CV, labels_C, self.kind_C, z_CV.shape[1], maths, parts)
        if not (at_rows and any(head.bias.numel() for head in self.heads)):
            return rows
        biases = [head.bias[columns] if head.bias.numel() else None for head in self.heads]
        return rows._replace(biases=biases)

    def place(self, z_CV: Tensor) -> Tensor:
        """Memory for the gradient: `room`, or that of the logits, where each row begins."""
        if self.room is not None:
            return self.room.as_strided(z_CV.shape, self.stride)
        dtype = gemm_dtype(self.hidden[0])
        return z_CV if dtype == z_CV.dtype else z_CV.view(dtype)[:, : z_CV.shape[1]]

    def read(self, tiles: Sequence[slice], wanted: bool) -> None:
        """Fill the state; if `wanted`, `write` does it for whole rows, with the gradient."""
        K, group, maths = len(self.heads) - 1, self.settings.group, self.settings.maths
        self.run = ROW_FUNCTIONS[self.settings.backend]
        self.state_SC = self.memory[0].new_empty(n_numbers(K), len(self.kind_C))
        whole = len(tiles) == 1 and not group
        self.steps = Steps(sums=whole, diverge=whole and needs_second_reading(K, maths))
        if not whole:
            read_slices(self.run, functools.partial(map, self.tile, tiles), group, self.state_SC)
        elif not wanted:
            rows = self.tile(tiles[0])
            # a CPU computes as for this gradient, which is not written: the value stays the same
            dz_CV = self.place(rows.student_NV) if may_ask(self.kind_C.device) else None
            self.run(rows, self.state_SC, self.steps, None, dz_CV)

    def write(self, columns: slice) -> Tensor:
        """The gradient of some columns, in the memory that `place` chooses."""
        rows = self.tile(columns)
        dz_CV = self.place(rows.student_NV)
        self.computed = None
        self.run(rows, self.state_SC, self.steps._replace(grad=True), self.drows_WC, dz_CV)
        return dz_CV

    def result(self) -> Tensor:
        """The rows' state, (S, C), after all reading and writing."""
        return self.state_SC

    def terms(self, state_SR: Tensor, kind_R: Tensor) -> Tensor:
        """The terms of all rows, (T, R), from the `result` of each chunk."""
        return terms(state_SR, kind_R, self.settings.maths, self.settings.parts)


# ------------------------------------------------------------------------- sweep


class Room(NamedTuple):
    """The memory of a sweep over R rows, and how it cuts them.

    `memory` has, per head, a flat tensor for the logits of `shape` and one more number.
    """

    sums: GradientSums
    tiles: Sequence[slice]  # of the columns
    shape: tuple[int, int]
    memory: Sequence[Tensor]
    chunk_rows: int
    held_rows: int  # rows whose dz is held, for one product of each kind; 0: none
    held: Tensor | None  # that dz, and one more number


def room_of(
    heads: Sequence[Head], R: int, settings: HeadSettings, grads: Sequence[Tensor | None]
) -> Room:
    """The memory of a sweep that fills `grads`: dX, dW and db, if they are wanted."""
    x_NH, vocab = heads[0].hidden, settings.sizes.vocab
    on_cpu, columns = may_ask(x_NH.device), row_columns(max(vocab, 1), x_NH.device)
    C, size, G = row_counts(heads, R, settings, grads, columns, on_cpu=on_cpu)
    tiles = slices(0, vocab, size) or [slice(0, 0)]  # a process may hold no column at all
    shape = (min(C, R), row_columns(tiles[0].stop, x_NH.device))
    dw_dtype, free = acc_torch_dtype(x_NH), None
    held = fresh_memory(x_NH, min(G, R) * shape[1] + 1, x_NH.dtype) if G else None
    if max(C, G) >= R and x_NH.dtype != torch.float16:
        # one product computes all of dW. It adds in float32 and rounds once, as it writes dW
        dw_dtype, free = gemm_dtype(x_NH), grads[1] if held is not None else None
    memory = logit_memory(len(heads), math.prod(shape), x_NH, settings, free)
    sums = GradientSums(grads, vocab if R else 0, dw_dtype)
    is_one = held is not None or (on_cpu and C >= R and len(tiles) == 1)
    # ranks add up float32 numbers
    sums.rounds_dx = is_one and not settings.group and gemm_dtype(x_NH) == x_NH.dtype
    return Room(sums, tiles, shape, memory, C, G, held)


def sweep(
    heads: Sequence[Head],
    row_inputs: RowInputs,
    settings: HeadSettings,
    grads: Sequence[Tensor | None],
    make_chunk: Callable[..., Chunk] = Chunk,
    begun: Room | None = None,
) -> Tensor:
    """Return the terms of all rows, (T, N), and fill `grads`: dX, dW and db, if they are wanted.

    `begun` holds the first tile of the logits already, see `begin_products`.
    """
    student, (W, N) = heads[0], row_inputs.weights.shape
    x_NH, on_cpu = student.hidden, may_ask(student.hidden.device)
    rows_R, R = live_rows(row_inputs.kinds, settings.sizes.max_rows)
    if grads[0] is not None and (not R or rows_R is not None):
        grads[0].zero_()
    sums, tiles, shape, memory, C, G, held = begun or room_of(heads, R, settings, grads)
    weight_WN, unscale = fit_to_dtype(row_inputs.weights, x_NH.dtype, settings.maths)
    inputs_R, results = row_inputs._replace(weights=weight_WN).part(rows_R), []
    for at_G in slices(0, R, G or C):
        sums.rows = at_G if rows_R is None else first_axis(rows_R, at_G)
        x_GH = some_rows(x_NH, sums.rows)
        if not on_cpu:
            # rows without a term: their dz is 0, but 0 * NaN would make dW NaN
            x_GH = torch.where(inputs_R.kinds[at_G, None] > 0, x_GH, 0)
        for at_C in slices(at_G.start, at_G.stop, C):
            here = slice(at_C.start - at_G.start, at_C.stop - at_G.start)
            inputs_C = inputs_R.part(at_C) if C < R else inputs_R
            rows_C = at_C if rows_R is None else first_axis(rows_R, at_C)
            x_CH = first_axis(x_GH, here)
            chunk = make_chunk(heads, rows_C, x_CH, inputs_C, settings, memory, shape)
            if begun is not None and at_C.start == 0:
                chunk.computed = tiles[0]
            if held is not None:
                chunk.room = held[here.start * shape[1] : here.stop * shape[1] + 1]
            chunk.read(tiles, sums.wanted)
            # backwards, as the buffers still hold the logits of the last tile
            for columns in reversed(tiles) if sums.wanted else ():
                dz_CV = chunk.write(columns)
                if held is None:
                    sums.add(dz_CV, x_CH, student.weight, columns)
            results.append(chunk.result())
        if held is not None:
            dz_GV = held.as_strided((len(x_GH), tiles[0].stop), (shape[1], 1))
            sums.add(dz_GV, x_GH, student.weight, tiles[0])
        sums.store_rows(settings.group, unscale)
    sums.store(unscale)
    zeros = functools.partial(weight_WN.new_zeros, (2 * W, N))
    if not R:
        return zeros()
    terms_TR = chunk.terms(torch.cat(results, 1), inputs_R.kinds).to(weight_WN.dtype)
    return terms_TR if rows_R is None else zeros().index_copy_(1, rows_R, terms_TR)


# ---------------------------------------------------------------------------- op


# of the losses with chunks: `RowInputs` and `anchor_of` the student, then `as_arguments`
SCHEMA = (
    "(Tensor[] student, Tensor[] teachers, Tensor labels_N, Tensor kind_N, Tensor weight_WN, "
    "Tensor anchor, SymInt[] sizes, float[] maths, bool[] switches, bool[] want, "
    "ScalarType logits_dtype, str group, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@library.custom_op(f"{NAMESPACE}::linear_kl_mlm", mutates_args=(), schema=SCHEMA)
def linear_kl_mlm_op(
    student: list[Tensor], teachers: list[Tensor], *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, terms of the rows, dX, dW, db.

    Heads are (hidden, weight, bias); a missing bias has no elements. A gradient that is not wanted
    comes back empty. With `per_row` the loss is that of every row, and there is no gradient.
    """
    *rows, _, settings = arguments_of(others)
    return swept(heads_of([*student, *teachers]), RowInputs(*rows), settings)


def arguments_of(others: Sequence[Any]) -> tuple[Any, ...]:
    """The three row inputs, the anchor and the settings of an op."""
    return (*others[:4], from_arguments(others[4:]))


# the outputs of an op, and the room of its sweep
Begun: TypeAlias = tuple[Sequence[Tensor], Room]


def begin_products(heads: Sequence[Head], settings: HeadSettings) -> Begun | None:
    """Start the first products, before anything is known of the rows. None: not possible.

    A GPU then multiplies while the host launches the many small kernels that count and weigh rows.
    It takes all rows, in their order. Logits of rows without a term are not read.
    """
    x_NH, sizes = heads[0].hidden, settings.sizes
    if may_ask(x_NH.device) or not len(x_NH) or sizes.max_rows:
        return None
    with torch.no_grad(), _in_own_dtypes(x_NH):
        grads = empty_gradients(heads[0], settings.per_row, settings.want)
        advise_huge_pages(grads[1])
        room = room_of(heads, len(x_NH), settings, _wanted(grads, settings))
        columns = room.tiles[0]
        hidden = [first_axis(head.hidden, slice(0, room.shape[0])) for head in heads]
        size = room.shape[0], columns.stop
        logits = [flat.as_strided(size, (room.shape[1], 1)) for flat in room.memory]
        with_biases = settings.backend not in Chunk.biases_at_rows
        project_heads(heads, hidden, columns, logits, settings, with_biases)
    return grads, room


def swept(
    heads: Sequence[Head],
    row_inputs: RowInputs,
    settings: HeadSettings,
    make_chunk: Callable[..., Chunk] = Chunk,
    begun: Begun | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The outputs of the op, from one sweep over `heads`, the student's first."""
    weight_WN = row_inputs.weights
    grads, room = begun or (None, None)
    if grads is None:
        grads = empty_gradients(heads[0], settings.per_row, settings.want)
        advise_huge_pages(grads[1])
    with _in_own_dtypes(weight_WN):
        rows_TN = sweep(heads, row_inputs, settings, _wanted(grads, settings), make_chunk, room)
    loss_N = weighted(weight_WN, rows_TN)
    dx, dw, db = grads
    return loss_N if settings.per_row else loss_N.sum(), rows_TN, dx, dw, db


def _wanted(grads: Sequence[Tensor], settings: HeadSettings) -> list[Tensor | None]:
    asked = zip(grads, settings.want, strict=True)
    return [grad if wish and not settings.per_row else None for grad, wish in asked]


def _in_own_dtypes(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Products in the dtypes of their factors, also under autocast."""
    device = x.device.type
    is_cast = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if is_cast else contextlib.nullcontext()


@linear_kl_mlm_op.register_fake
def fake_of_op(student, teachers, *others) -> tuple:
    """The outputs without their values; those of the top-k loss are the same."""
    _, _, weight_WN, _, settings = arguments_of(others)
    return empty_outputs(Head(*student), weight_WN, settings.per_row, settings.want)


@library.custom_op(f"{NAMESPACE}::linear_kl_mlm_backward", mutates_args=())
def linear_kl_mlm_backward_op(
    dloss: Tensor, grads: list[Tensor], anchor: Tensor, dtype: torch.dtype, by_triton: bool
) -> list[Tensor]:
    """The gradients of forward times the incoming scalar: new tensors, so backward can run twice.

    `anchor` connects them to the student under create_graph, so that a second derivative is refused
    instead of being zero.
    """
    scaled = [torch.empty_like(grad) for grad in grads]
    for x, grad in zip(scaled, grads, strict=True):
        advise_huge_pages(x)
        # not torch.mul: on a GPU it would first round the scalar to 16 bits
        scale_in_place(x.copy_(grad), dloss, by_triton=by_triton)
    return [x.to(dtype) for x in scaled]


@linear_kl_mlm_backward_op.register_fake
def _(dloss, grads, anchor, dtype, by_triton) -> list:
    return [torch.empty_like(grad, dtype=dtype) for grad in grads]


# ----------------------------------------------------------------- autograd


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
        by_triton = ctx.settings.backend == "triton"
        if is_last_backward(saved):
            # no copy: dW is the largest tensor here
            for x in saved:
                scale_in_place(x, dloss, by_triton=by_triton)
            grads = [x.to(ctx.dtype) for x in saved]
        else:
            grads = apply(_BACKWARD_RULES, dloss, list(saved), anchor, ctx.dtype, by_triton)
        wanted = zip(grads, ctx.settings.want, strict=True)
        student = [grad if wish else None for grad, wish in wanted]
        return student, [None] * ctx.n_teachers, *none

    return backward


_BACKWARD_RULES = Rules(linear_kl_mlm_backward_op, refuse_second_derivative)
LINEAR_KL_MLM = Rules(linear_kl_mlm_op, backward_of(linear_kl_mlm_op), setup_context)


def begun_rules(heads: Sequence[Head], settings: HeadSettings) -> Rules:
    """`LINEAR_KL_MLM` for one call, of which `begin_products` has started what it can."""
    if not is_plain_call([x for head in heads for x in head]):
        return LINEAR_KL_MLM
    # whoever keeps the rules, such as a graph, keeps no memory of the sweep
    begun = [begin_products(heads, settings)]

    def op(student: list[Tensor], teachers: list[Tensor], *others: Any) -> tuple[Tensor, ...]:
        *rows, _, settings = arguments_of(others)
        return swept(heads_of([*student, *teachers]), RowInputs(*rows), settings, begun=begun.pop())

    return LINEAR_KL_MLM._replace(op=op) if begun[0] else LINEAR_KL_MLM


linear_kl_mlm_op.register_autograd(LINEAR_KL_MLM.backward, setup_context=setup_context)
linear_kl_mlm_backward_op.register_autograd(refuse_second_derivative)


@jit
def scale_kernel(
    x_ptr,  # (n,)  in and out
    factor_ptr,  # ()
    n,
    BLOCK_N: tl.constexpr,
):
    factor = tl.load(factor_ptr)
    if factor != 1:
        # int64: a gradient may have more than 2**31 elements
        first = tl.program_id(0).to(tl.int64) * BLOCK_N
        # their number is no constant: each size of a small gradient would be compiled anew
        for start in range(first, n, tl.num_programs(0) * BLOCK_N):
            at = start + tl.arange(0, BLOCK_N)
            x = tl.load(x_ptr + at, mask=at < n, other=0.0)
            # in the wider of both dtypes, rounded once
            tl.store(x_ptr + at, (x * factor).to(x_ptr.dtype.element_ty), mask=at < n)


def scale_in_place(x: Tensor, factor: Tensor, *, by_triton: bool) -> None:
    """Multiply a contiguous tensor by a 0-d tensor on its device, float32 or float64.

    `by_triton` says whether `x` is on a GPU with Triton, or Triton is interpreted.
    """
    if by_triton and HAS_TRITON and x.numel():
        programs = min(-(-x.numel() // SCALED_BLOCK), MOST_PROGRAMS)
        launch(scale_kernel, programs, x, x, factor, x.numel(), BLOCK_N=SCALED_BLOCK, num_warps=4)
    elif not x.is_cpu or factor != 1:
        # only a CPU is asked
        x.mul_(factor)
