"""The record of one `expand` call, the only argument of every backend.

`op.py` defines the fields, in formulas (1) to (4), and `hashes.py` defines routing. Shape letters
used in this file: R, C rows and columns of the weight; M, N rows and columns of the result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
