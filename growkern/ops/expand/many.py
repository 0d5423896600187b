"""Carries out the `expand` calls of a growth: one by one, or on a GPU collected into few launches.

`work_on` picks the way for a device. Ask for results by `Work.expand`, register a callback with
`then`, and call `run` at the end. Only calls for Triton are collected: on other backends a call
costs next to nothing.

A model has a few hundred tensors, and launching a kernel costs more time than growing a small one.
Calls of one kind (dtypes, with or without `upper`, kind of noise) therefore share a launch. The
kernel reads a table with one row of addresses and sizes per call, and a list of the call that each
block belongs to.

Formulas (1) to (4) are in `expand_op.py`. Shape letters used in this file: R, C rows and columns of
a weight; M, N those of its result; J calls of a launch.
"""

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.ops.backend import BACKENDS, EXACT, acc_dtype, choose_backend, jit, tl
from growkern.ops.backend.launch import launch
from growkern.ops.expand.call import ExpandCall, check_sizes
from growkern.ops.expand.expand_op import expand_call
from growkern.ops.expand.hashes import seed_words
from growkern.ops.expand.on_triton import (
    LINES_AT_ONCE,
    ROUTED_COLS,
    ROUTED_ROWS,
    block_of,
    expand_block,
    lines_kernel,
)


class CallFields(NamedTuple):
    """A row of the table: addresses, then strides and sizes in elements, then the first block."""

    out: int
    weight: int
    upper: int
    rows: int
    cols: int
    row_scale: int
    col_scale: int
    of_axis: int  # sizes of the noise, or copies, on the axis of noise or routing
    key: int
    mult: int
    weight_r: int
    upper_r: int
    source_c: int  # of weight and upper
    out_m: int
    out_n: int
    R: int
    C: int
    M: int
    N: int
    first_block: int


N_FIELDS = len(CallFields._fields)
# the places of these fields, for kernels
AT_OUT, AT_WEIGHT, AT_UPPER, AT_ROWS, AT_COLS, AT_ROW_SCALE, AT_COL_SCALE, AT_OF_AXIS, AT_KEY, \
    AT_MULT, AT_WEIGHT_R, AT_UPPER_R, AT_SOURCE_C, AT_OUT_M, AT_OUT_N, AT_R, AT_C, \
    AT_M, AT_N, AT_FIRST_BLOCK = map(tl.constexpr, range(N_FIELDS))  # fmt: skip
# places in the kernel's `like`
LIKE_OUT, LIKE_WEIGHT, LIKE_INDEX, LIKE_FACTOR, LIKE_KEY = map(tl.constexpr, range(5))


@jit
def _pointer(table_ptr, k, like):
    """Field k of a call as a pointer of the type of `like`, to a multiple of 16 bytes."""
    return tl.multiple_of(tl.load(table_ptr + k).to(like.dtype), 16)


@jit
def _int32(table_ptr, k, MULTIPLE: tl.constexpr = 1):
    """Field k of a call, which fits into int32 and is a multiple of MULTIPLE.

    A product of two values that were int32 all along takes one instruction. One that was cut off
    from 64 bits counts as 64 bits, and its product takes four.
    """
    return tl.multiple_of(tl.load((table_ptr + k).to(tl.pointer_type(tl.int32))), MULTIPLE)


@jit
def expand_many_kernel(
    table_ptr,  # (J, N_FIELDS) int64
    call_ptr,  # (blocks,) int32, the call of each block
    like,  # pointers with the types of out, weight, index, factor and key; nothing is read there
    UPPER: tl.constexpr,
    NOISE: tl.constexpr,
    LARGER: tl.constexpr,
    SCALED: tl.constexpr,  # `LaunchKind.is_scaled`
    WIDE: tl.constexpr,  # `LaunchKind.is_wide`
    ACC: tl.constexpr,
    N_FIELDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    block = tl.program_id(0)
    t = table_ptr + tl.load(call_ptr + block) * N_FIELDS
    out_ptr = tl.load(t + AT_OUT).to(like[LIKE_OUT].dtype)
    weight_ptr = tl.load(t + AT_WEIGHT).to(like[LIKE_WEIGHT].dtype)
    maps = (_pointer(t, AT_ROWS, like[LIKE_INDEX]), _pointer(t, AT_COLS, like[LIKE_INDEX]))
    scales = (None, None)
    if SCALED:
        scales = (
            _pointer(t, AT_ROW_SCALE, like[LIKE_FACTOR]),
            _pointer(t, AT_COL_SCALE, like[LIKE_FACTOR]),
        )
    R, C, M = _int32(t, AT_R), _int32(t, AT_C), _int32(t, AT_M)
    if WIDE:
        out_ptr = tl.multiple_of(out_ptr, 16)
        weight_r, upper_r = _int32(t, AT_WEIGHT_R), _int32(t, AT_UPPER_R)
        step_m, N = _int32(t, AT_OUT_M, 16), _int32(t, AT_N, 16)
        source_c, out_n = 1, 1
    else:
        weight_r, upper_r = tl.load(t + AT_WEIGHT_R), tl.load(t + AT_UPPER_R)
        step_m, N = tl.load(t + AT_OUT_M), _int32(t, AT_N)
        source_c, out_n = tl.load(t + AT_SOURCE_C), tl.load(t + AT_OUT_N)
    strides = (weight_r, upper_r, source_c, step_m, out_n)
    shape = (R, C, M, N)
    block -= _int32(t, AT_FIRST_BLOCK)
    # sizes of noise are factors, and copies are of the type of keys
    if NOISE == ROUTED_ROWS or NOISE == ROUTED_COLS:  # noqa: SIM109
        of_axis = _pointer(t, AT_OF_AXIS, like[LIKE_KEY])
    else:
        of_axis = _pointer(t, AT_OF_AXIS, like[LIKE_FACTOR])
    noise = (of_axis, _pointer(t, AT_KEY, like[LIKE_KEY]), _pointer(t, AT_MULT, like[LIKE_KEY]))
    sources = (weight_ptr, None)
    if UPPER:
        sources = (weight_ptr, tl.load(t + AT_UPPER).to(like[LIKE_WEIGHT].dtype))
    expand_block(
        block, sources, maps, scales, noise, out_ptr, strides, shape,
        NOISE, LARGER, ACC, 0, BLOCK_M, BLOCK_N,
    )  # fmt: skip


class _Packed:
    """Vectors of many calls in one tensor, so that they reach the device in one copy."""

    def __init__(self, dtype: torch.dtype, first: Tensor) -> None:
        self.dtype, self.length, self.pieces = dtype, 0, list[Tensor]()
        self.add(first)

    def add(self, x: Tensor | None) -> int:
        """Append a vector; its place, at a multiple of 16 bytes. None: that of the first one."""
        if x is None:
            return 0
        at, rest = self.length, -len(x) % (16 // self.dtype.itemsize)
        piece = x.detach().to(self.dtype)
        self.pieces += [piece, piece.new_zeros(rest)]
        self.length += len(x) + rest
        return at

    def on(self, device: torch.device) -> Tensor:
        on_cpu = all(x.device.type == "cpu" for x in self.pieces)
        return torch.cat(self.pieces if on_cpu else [x.to(device) for x in self.pieces]).to(device)


class _LineKeys:
    """(2) of `hashes.py` for many calls in one launch. Each program's lines are of one call."""

    def __init__(self) -> None:
        self.length, self.ranges = 0, list[tuple[int, ...]]()

    def add(self, n_lines: int, offset: int, seed: int) -> int:
        """Append the lines offset, offset + 1, ...; the first key's place, as `_Packed.add`."""
        at, words = self.length, seed_words(seed)
        starts = range(0, n_lines, LINES_AT_ONCE)
        self.ranges += [(offset + start, *words) for start in starts]
        self.length += len(starts) * LINES_AT_ONCE
        return at

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Key and mult of all lines."""
        key = torch.empty(self.length, dtype=torch.int32, device=device)
        mult, table = torch.empty_like(key), torch.tensor(self.ranges).to(device)
        if self.ranges:
            launch(
                lines_kernel,
                len(self.ranges),
                key,
                key,
                mult,
                None,
                None,
                table,
                self.length,
                *(0, 0, 0, 0),
                BLOCK_N=LINES_AT_ONCE,
                **EXACT,
            )
        return key, mult


class LaunchKind(NamedTuple):
    """The properties that the compiled kernel depends on: calls that share them share a launch."""

    out_dtype: str
    dtype: str
    has_upper: bool
    noise_kind: int
    larger: float  # `ExpandCall.larger_share`
    is_scaled: bool
    is_wide: bool  # 16 bytes of the result can be written at a time, and strides fit into int32


def launch_kind(call: ExpandCall) -> LaunchKind:
    """The kind of a call on matrices, known without looking at a GPU's memory."""
    out, sources = call.out, [x for x in (call.weight, call.upper) if x is not None]
    places = (out.data_ptr(), out.stride(0), out.shape[1])
    steps = [x.stride() for x in (out, *sources)]
    is_wide = all(0 <= row < 1 << 31 and column == 1 for row, column in steps)
    is_wide &= not any(n % 16 for n in places)
    dtypes = str(out.dtype), str(call.weight.dtype)
    has_upper, larger = call.upper is not None, call.larger_share
    return LaunchKind(*dtypes, has_upper, call.noise_kind, larger, call.is_scaled, is_wide)


def expand_many(calls: Sequence[ExpandCall]) -> int:
    """Fill `out` of every call on matrices, in one launch for each kind; the number of launches.

    Nothing is checked but devices and sizes: indices must be in range, and results must not overlap
    other tensors.
    """
    if len({x.device for call in calls for x in (call.out, call.weight)}) > 1:
        raise GrowthError("expand_many works on one device: move weights and outputs to one")
    for call in calls:
        check_sizes(call, call.out.shape)
    alike = (call.with_alike_columns() for call in calls if call.out.numel())
    launches = 0
    for kind, same in groupby(sorted(alike, key=launch_kind), key=launch_kind):
        _launch(kind, list(same))
        launches += 1
    return launches


def _launch(kind: LaunchKind, calls: Sequence[ExpandCall]) -> None:
    first = calls[0]
    acc, tl_acc = acc_dtype(first.wider)
    device = first.out.device
    choice = block_of(max(call.out.shape[1] for call in calls))
    longest = max(max(*call.out.shape) for call in calls)
    # stand for every map and scale that is None
    index, factors = _Packed(torch.int64, torch.arange(longest)), _Packed(acc, torch.ones(longest))
    lines, copies = _LineKeys(), _Packed(torch.int32, torch.zeros(0))
    block = (choice["BLOCK_M"], choice["BLOCK_N"])
    cut = (zip(call.out.shape, block, strict=True) for call in calls)
    counts = [math.prod(-(-length // size) for length, size in axes) for axes in cut]
    rows, n_blocks = [], 0
    for call, count in zip(calls, counts, strict=True):
        rows.append(_row(call, index, factors, copies, lines, n_blocks))
        n_blocks += count
    table = torch.tensor(rows)
    sizes = factors.on(device)
    of_axis = sizes if first.routing is None else copies.on(device)
    vectors = (index.on(device), sizes, of_axis, *lines.on(device))
    fields = (("rows", "cols"), ("row_scale", "col_scale"), ("of_axis",), ("key",), ("mult",))
    for x, names in zip(vectors, fields, strict=True):
        for place in map(CallFields._fields.index, names):
            table[:, place] = table[:, place] * x.element_size() + x.data_ptr()
    call_of_block = torch.arange(len(calls), dtype=torch.int32)
    repeats = torch.tensor(counts)
    call_of_block = call_of_block.repeat_interleave(repeats, output_size=n_blocks).to(device)
    launch(
        expand_many_kernel,
        n_blocks,
        first.out,
        table.to(device),
        call_of_block,
        (first.out, first.weight, vectors[0], vectors[1], call_of_block),
        UPPER=kind.has_upper,
        NOISE=kind.noise_kind,
        LARGER=kind.larger,
        SCALED=kind.is_scaled,
        WIDE=kind.is_wide,
        ACC=tl_acc,
        N_FIELDS=N_FIELDS,
        **choice,
        **EXACT,
    )


def _row(
    call: ExpandCall, index: _Packed, factors: _Packed, copies: _Packed, lines: _LineKeys, at: int
) -> CallFields:
    """A call's row of the table, from its first block, number `at`, on.

    Packed vectors have their place instead of their address.
    """
    (M, N), (R, C) = call.out.shape, call.weight.shape
    noise = [0, 0, 0]
    if call.noise is not None or call.routing is not None:
        packed = copies.add(call.routing.packed) if call.routing else factors.add(call.noise)
        noise = [packed, *[lines.add(*call.lines, call.seed)] * 2]
    upper = call.weight if call.upper is None else call.upper
    places = [x.data_ptr() for x in (call.out, call.weight, upper)]
    places += [index.add(call.rows), index.add(call.cols)]
    places += [factors.add(call.row_scale), factors.add(call.col_scale), *noise]
    strides = (call.weight.stride(0), upper.stride(0), call.weight.stride(1), *call.out.stride())
    return CallFields._make([*places, *strides, R, C, M, N, at])


# most bytes of weights and results that may wait for a launch
BYTES_AT_ONCE = 1 << 30


class Work:
    """Carries out calls of `expand`: each at once by `backend`, or collected in few `launches`.

    Calls are collected where `bytes_at_once` is not 0, without the checks of `expand`. At most so
    many bytes of weights and results wait, or one larger tensor.
    """

    def __init__(self, backend: str | None = None, bytes_at_once: int = 0) -> None:
        self.backend, self.bytes_at_once, self.launches = backend, bytes_at_once, 0
        self._calls, self._after, self._bytes = list[ExpandCall](), list[Callable[[], Any]](), 0

    def expand(self, weight: Tensor, *, out: Tensor, **arguments: Any) -> None:
        """Ask for `expand` with these arguments; `out` is filled after `run` or sooner."""
        call = ExpandCall(out, weight, **arguments)
        size = sum(x.nbytes for x in (out, weight, call.upper) if x is not None)
        if self._calls and self._bytes + size > self.bytes_at_once:
            self.run()
        self._calls.append(call)
        self._bytes += size
        if self._bytes >= self.bytes_at_once:
            self.run()

    def then(self, action: Callable[[], Any]) -> None:
        """Call `action` as soon as the results asked for so far are there."""
        if self._calls:
            self._after.append(action)
        else:
            action()

    def run(self) -> None:
        """Carry out every call that waits, then what needs the results."""
        if self.bytes_at_once:
            self.launches += expand_many([call.as_matrices() for call in self._calls])
        else:
            for call in self._calls:
                # the weight stays: a backend may read it from the host
                weight, *rest = call.inputs
                moved = [x.to(call.out.device) if isinstance(x, Tensor) else x for x in rest]
                expand_call(ExpandCall.of_inputs(call.out, (weight, *moved)), None, self.backend)
        self._calls, self._bytes = [], 0
        waiting, self._after = self._after, []
        for action in waiting:
            action()


def work_on(device: torch.device, backend: str | None) -> Work:
    """Collects calls where `expand` would launch Triton kernels; else one call after another."""
    is_triton = choose_backend(backend, device, BACKENDS) == "triton"
    return Work(backend, BYTES_AT_ONCE if is_triton else 0)
