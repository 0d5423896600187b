"""The record of one `expand` call, the only argument of every backend, and its checks.

`expand_op.py` defines the fields, in formulas (1) to (4), and `hashes.py` defines routing. Shape
letters used in this file: R, C rows and columns of the weight; M, N those of the result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.ops.expand.limits import MOST_AMPLITUDE, MOST_COPIES, MOST_ENTRIES

# of weights and results
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# the axis of the result that has noise or routing; kernels use the same numbers
NO_NOISE, ROW_NOISE, COL_NOISE, ROW_ROUTING, COL_ROUTING = 0, 1, 2, 3, 4


class Routing(NamedTuple):
    """Which entries of one axis of the result are copies of the same source entry.

    For every source entry and every position on the other axis, a hash chooses the copy that gets
    the weight.

    Attributes:
        dim: the axis of the result: 0 for its rows, 1 for its columns.
        copies: (n, 2) int64. Per entry of the axis its number among the copies of its source,
            from 0 on, and the count of these copies. (0, 1): the entry is the only one.
        amplitude: a, from 0 to 3. The chosen copy gets (1 + a)/2 times the weight, and another one
            (1 - a)/2 times. 1: the chosen copy has the whole weight.
    """

    dim: int
    copies: Tensor
    amplitude: float = 1.0

    @property
    def larger_share(self) -> float:
        """(1 + a)/2, as a float32: every backend then multiplies by the same number."""
        return ctypes.c_float((1 + self.amplitude) / 2).value

    @property
    def packed(self) -> Tensor:
        """The copies as kernels read them, number + 2**16 count: (n,) int32, contiguous."""
        number, count = self.copies.detach().unbind(1)
        return (number + (count << 16)).int()


class ExpandCall(NamedTuple):
    """The arguments of one `expand`. Backends get them checked, as matrices, and fill `out`.

    A field that is None changes nothing: every row once, a scale of 1, equal copies. Only the
    checks of the public function see a call whose `out` is still None, or whose tensors are
    vectors.
    """

    out: Tensor  # (M, N), any strides
    weight: Tensor  # (R, C), any strides
    upper: Tensor | None = None  # (R, C), any strides
    rows: Tensor | None = None  # (M,) int64
    cols: Tensor | None = None  # (N,) int64
    row_scale: Tensor | None = None  # (M,) float
    col_scale: Tensor | None = None  # (N,) float
    row_noise: Tensor | None = None  # (M,) float; at most one of the noises and routing is given
    col_noise: Tensor | None = None  # (N,) float
    routing: Routing | None = None
    seed: int = 0
    offsets: tuple[int, int] = (0, 0)  # position of the first row and column in the whole matrix

    @classmethod
    def of_inputs(cls, out: Tensor, inputs: Sequence[Any]) -> ExpandCall:
        """The call with these inputs of the registered ops, which take no records."""
        *tensors, copies, dim, amplitude, seed, row, column = inputs
        routing = None if copies is None else Routing(dim, copies, amplitude)
        return cls._make((out, *tensors, routing, seed, (row, column)))

    @property
    def inputs(self) -> tuple[Any, ...]:
        """All fields but `out`, as the registered ops take them."""
        dim, copies, amplitude = self.routing or (0, None, 1.0)
        return (*self[1:9], copies, dim, amplitude, self.seed, *self.offsets)

    def as_matrices(self) -> ExpandCall:
        """The same call on matrices: a vector becomes a matrix of one row."""
        if self.weight.ndim == 2:
            return self
        return self._replace(
            out=None if self.out is None else self.out[None],
            weight=self.weight[None],
            upper=None if self.upper is None else self.upper[None],
            # as columns, because the elements of a row lie together in memory
            rows=None,
            cols=self.rows,
            row_scale=None,
            col_scale=self.row_scale,
        )

    def rows_of_result(self, start: int, stop: int) -> ExpandCall:
        """The call that fills rows [start, stop) of `out`, with the same bits. On matrices."""
        within, rows, routing = slice(start, stop), self.rows, self.routing
        if rows is None:
            rows = torch.arange(self.out.shape[0], device=self.weight.device)
        if routing is not None and routing.dim == 0:
            routing = routing._replace(copies=routing.copies[within])
        return self._replace(
            out=self.out[within],
            rows=rows[within],
            row_scale=None if self.row_scale is None else self.row_scale[within],
            row_noise=None if self.row_noise is None else self.row_noise[within],
            routing=routing,
            offsets=(self.offsets[0] + start, self.offsets[1]),
        )

    def with_contiguous_columns(self) -> ExpandCall:
        """The same call with `has_contiguous_columns` of `weight` and `upper`, copied if not so."""
        # the weight is smaller than the result: a copy costs a fraction of writing the result
        call = self
        for name in ("weight", "upper"):
            x = getattr(self, name)
            if x is not None and not has_contiguous_columns(x):
                call = call._replace(**{name: x.contiguous()})
        return call

    def with_alike_columns(self) -> ExpandCall:
        """The same call where columns of `weight` and `upper` are contiguous, if there are both."""
        return self if self.upper is None else self.with_contiguous_columns()

    @property
    def wider(self) -> Tensor:
        """The weight, or a result in float64: the tensor whose dtype products are computed for."""
        return self.out if self.out.dtype == torch.float64 else self.weight

    @property
    def noise_kind(self) -> int:
        """NO_NOISE, ROW_NOISE, COL_NOISE, ROW_ROUTING or COL_ROUTING."""
        if self.routing is not None:
            return (ROW_ROUTING, COL_ROUTING)[self.routing.dim]
        if self.col_noise is not None:
            return COL_NOISE
        return NO_NOISE if self.row_noise is None else ROW_NOISE

    @property
    def is_scaled(self) -> bool:
        return self.row_scale is not None or self.col_scale is not None

    @property
    def larger_share(self) -> float:
        """`Routing.larger_share`; 1 without routing."""
        return 1.0 if self.routing is None else self.routing.larger_share

    @property
    def noise(self) -> Tensor | None:
        """The noise that is given: (N,) with COL_NOISE, (M,) with ROW_NOISE, else None."""
        return self.row_noise if self.col_noise is None else self.col_noise

    @property
    def lines(self) -> tuple[int, int]:
        """The lines that noise or routing runs along: their count, and the first one's position.

        If the columns have noise or routing, a line is a row of the result, else a column.
        """
        dim = 0 if self.noise_kind in (COL_NOISE, COL_ROUTING) else 1
        return self.out.shape[dim], self.offsets[dim]


def has_contiguous_columns(x: Tensor) -> bool:
    """Whether the elements of a row, or of a vector, lie side by side in memory."""
    # the stride of a single column is never used, and may be any
    return x.shape[-1] <= 1 or x.stride(-1) == 1


def as_vector(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """An index, scale or noise as a kernel reads it: contiguous, in `dtype`. None stays None."""
    return None if x is None else x.detach().to(dtype).contiguous()


# checks: they raise GrowthError before any work, with a way to fix the call

# fields that belong to each axis of the weight
MAPS = ("rows", "cols")
FACTORS = (("row_scale", "row_noise"), ("col_scale", "col_noise"))


def _check_layout(name: str, x: Tensor | None) -> None:
    if isinstance(x, Tensor) and x.layout != torch.strided:
        layout = str(x.layout).removeprefix("torch.")
        raise GrowthError(f"{name} is {layout}, but must be dense: use {name}.to_dense()")


def _check_tensor(name: str, x: Tensor, device: torch.device) -> None:
    if not isinstance(x, Tensor):
        kind = type(x).__name__
        raise GrowthError(f"{name} must be a tensor, got {kind}: use torch.tensor({name})")
    if x.device != device:
        raise GrowthError(f"{name} is on {x.device}, but the result is on {device}: move {name}")


def _check_index(name: str, x: Tensor, device: torch.device) -> None:
    _check_tensor(name, x, device)
    if x.ndim != 1:
        raise GrowthError(f"{name} must be a vector of indices, got shape {tuple(x.shape)}")
    if x.dtype != torch.int64:
        raise GrowthError(f"{name} must be an int64 tensor, got {x.dtype}: use {name}.long()")


def _is_followed(x: Tensor) -> bool:
    # here, because a plan imports this module, and must be quick
    from growkern.ops.backend import has_tangent

    return (x.requires_grad and torch.is_grad_enabled()) or has_tangent(x)


def _check_factor(name: str, x: Tensor, n: int, device: torch.device) -> None:
    _check_tensor(name, x, device)
    if tuple(x.shape) != (n,):
        raise GrowthError(f"{name} must have shape ({n},), got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise GrowthError(f"{name} must be a float tensor, got {x.dtype}")
    if _is_followed(x):
        raise GrowthError(f"{name} gets no gradient: use {name}.detach()")


def _check_weight(weight: Tensor, upper: Tensor | None) -> None:
    if isinstance(weight, torch.nn.Module):
        raise GrowthError(
            f"expand takes a tensor, got {type(weight).__name__}: use expand(layer.weight, ...), "
            "or growkern.widen(small, large) for whole modules"
        )
    if not isinstance(weight, Tensor):
        raise GrowthError(f"weight must be a tensor, got {type(weight).__name__}")
    if weight.ndim not in (1, 2):
        raise GrowthError(f"weight must have 1 or 2 dimensions, got shape {tuple(weight.shape)}")
    if weight.dtype not in DTYPES:
        raise GrowthError(f"weight must be one of {DTYPES}, got {weight.dtype}")
    if upper is None:
        return
    for name in ("shape", "dtype", "device"):
        given, wanted = getattr(upper, name), getattr(weight, name)
        if given != wanted:
            raise GrowthError(f"upper has {name} {given}, but the weight has {wanted}")


def _device_of_result(call: ExpandCall, reads_host: bool) -> torch.device:
    """The device of the weight, or that of `out` if the backend reads the weight from the host."""
    weight, out = call.weight, call.out
    if not (reads_host and weight.device.type == "cpu" and out is not None and out.is_cuda):
        return weight.device
    for name, x in (("weight", weight), ("upper", call.upper)):
        if x is None:
            continue
        if not x.is_pinned():
            raise GrowthError(f"{name} is on the CPU, but not pinned: use {name}.pin_memory()")
        # the copy that other layouts need would not be pinned
        if not has_contiguous_columns(x):
            raise GrowthError(
                f"{name} is on the CPU and has strides {x.stride()}, but the elements of a row "
                f"must lie side by side: use {name}.contiguous().pin_memory()"
            )
    return out.device


def check_sizes(call: ExpandCall, shape: Sequence[int]) -> None:
    """Refuse axes that are too long for kernels; the call's `out` is not looked at."""
    times = 1 if call.upper is None else 2
    if any(n > MOST_ENTRIES for n in (*shape, *(times * n for n in call.weight.shape))):
        also = "" if call.upper is None else ", and as much again of upper"
        raise GrowthError(
            f"weight has shape {tuple(call.weight.shape)}{also}, and the result has shape "
            f"{tuple(shape)}: an axis may have {MOST_ENTRIES} entries. Expand its parts one by one"
        )


def _check_out(call: ExpandCall, shape: tuple[int, ...], device: torch.device) -> None:
    out = call.out
    if tuple(out.shape) != shape:
        raise GrowthError(f"out has shape {tuple(out.shape)}, but the result has shape {shape}")
    if out.dtype not in DTYPES:
        raise GrowthError(f"out must be one of {DTYPES}, got {out.dtype}")
    if out.device != device:
        raise GrowthError(f"out is on {out.device}, but the weight is on {call.weight.device}")
    if any(n > 1 and step == 0 for n, step in zip(out.shape, out.stride(), strict=True)):
        raise GrowthError(f"out has strides {out.stride()}: it needs memory for every element")
    if any(map(_is_followed, [x for x in (out, call.weight, call.upper) if x is not None])):
        raise GrowthError("out= has no gradient: leave out= away, or use torch.no_grad()")


def _check_routing(routing: Routing, shape: list[int], device: torch.device) -> None:
    if not isinstance(routing, Routing):
        raise GrowthError(
            f"routing must be a growkern.Routing, got {routing!r}: growkern.widening(source_shape, "
            "target_shape) makes it, with the index maps that belong to it"
        )
    dim, copies, amplitude = routing
    if dim not in (0, 1):
        raise GrowthError(f"routing.dim must be 0 (rows) or 1 (columns), got {dim}")
    _check_tensor("routing.copies", copies, device)
    wanted = (shape[dim], 2)
    if copies.dtype != torch.int64 or tuple(copies.shape) != wanted:
        given = f"{copies.dtype} of shape {tuple(copies.shape)}"
        raise GrowthError(f"routing.copies must be torch.int64 of shape {wanted}, got {given}")
    if not 0 <= amplitude <= MOST_AMPLITUDE:
        raise GrowthError(
            f"routing.amplitude must be in 0 .. {MOST_AMPLITUDE:g}, got {amplitude:g}: beyond, "
            "copies would not add up exactly"
        )


def check_expand(
    call: ExpandCall, out_dtype: torch.dtype | None, *, reads_host: bool = False
) -> None:
    """Check everything that shapes, dtypes and devices can tell, of a call as the user gave it.

    With `reads_host` the backend reads a weight in pinned memory of the host, and the result is on
    the device of `out`.
    """
    for name, x in call._asdict().items():
        _check_layout(name, x)
    weight = call.weight
    _check_weight(weight, call.upper)
    device = _device_of_result(call, reads_host)
    not_for_vectors = ("cols", "row_noise", "col_scale", "col_noise", "routing")
    if weight.ndim == 1 and any(getattr(call, name) is not None for name in not_for_vectors):
        raise GrowthError(
            "a 1-D weight takes rows and row_scale only: no columns, no noise, no routing"
        )
    if sum(x is not None for x in (call.row_noise, call.col_noise, call.routing)) > 1:
        raise GrowthError(
            "noise or routing goes on the axis that is read: give one of row_noise, col_noise and "
            "routing"
        )
    if not 0 <= call.seed < 2**63:
        raise GrowthError(f"seed must be in [0, 2**63), got {call.seed}")

    shape = list(weight.shape)
    for axis, name in enumerate(MAPS):
        index = getattr(call, name)
        if index is not None:
            _check_index(name, index, device)
            shape[axis] = index.shape[0]
    check_sizes(call, shape)
    for axis, names in enumerate(FACTORS):
        for name in names:
            factor = getattr(call, name)
            if factor is not None:
                _check_factor(name, factor, shape[axis], device)

    if call.routing is not None:
        _check_routing(call.routing, shape, device)

    if out_dtype not in (None, *DTYPES):
        raise GrowthError(f"out_dtype must be one of {DTYPES}, got {out_dtype}")
    if call.out is not None:
        _check_out(call, tuple(shape), device)
        if out_dtype not in (None, call.out.dtype):
            raise GrowthError(f"out has dtype {call.out.dtype}, but out_dtype={out_dtype}")


def check_ranges(call: ExpandCall) -> None:
    """Refuse an index out of range, on the CPU only: a GPU would have to wait."""
    for name, size in zip(MAPS, call.weight.shape, strict=True):
        index = getattr(call, name)
        if index is None or index.device.type != "cpu" or not index.numel():
            continue
        low, high = (int(x) for x in index.aminmax())
        limit = size if call.upper is None else 2 * size
        if low < 0 or high >= limit:
            fix = "; indices past the end of the weight need `upper`" if call.upper is None else ""
            raise GrowthError(f"{name} holds {low} to {high}, allowed are 0 to {limit - 1}{fix}")
    copies = None if call.routing is None else call.routing.copies
    if copies is None or copies.device.type != "cpu" or not copies.numel():
        return
    number, count = copies.unbind(1)
    if int(number.min()) < 0 or bool((number >= count).any()) or int(count.max()) > MOST_COPIES:
        raise GrowthError(
            f"routing.copies must hold numbers from 0 to count - 1, and counts up to {MOST_COPIES}"
        )


def check_no_overlap(call: ExpandCall) -> None:
    """Refuse a result whose memory overlaps an input: writing it would overwrite that."""
    first, end = _span(call.out)
    for name, x in (("weight", call.weight), ("upper", call.upper)):
        if x is not None and first < _span(x)[1] and _span(x)[0] < end:
            raise GrowthError(f"out shares memory with {name}: give out memory of its own")


def _span(x: Tensor) -> tuple[int, int]:
    """First and one-past-last address; both 0 for an empty tensor."""
    if not x.numel():
        return 0, 0
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
