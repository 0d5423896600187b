"""The record of one `expand` call: the only argument of every backend.

`op.py` defines the fields, in formulas (1) to (4). Shape letters used in this file: R, C rows and
columns of the weight; M, N rows and columns of the result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# the axis of the result that has noise; kernels in Triton and CUDA C++ use the same numbers
NO_NOISE, ROW_NOISE, COL_NOISE = 0, 1, 2


class ExpandCall(NamedTuple):
    """The arguments of one `expand`. Backends get them checked, as matrices, and fill `out`.

    A field that is None changes nothing: every row once, a scale of 1, no noise. Only the checks
    of the public function see a call whose `out` is still None, or whose tensors are vectors.
    """

    out: Tensor  # (M, N), any strides
    weight: Tensor  # (R, C), any strides
    upper: Tensor | None = None  # (R, C), any strides
    rows: Tensor | None = None  # (M,) int64
    cols: Tensor | None = None  # (N,) int64
    row_scale: Tensor | None = None  # (M,) float
    col_scale: Tensor | None = None  # (N,) float
    row_noise: Tensor | None = None  # (M,) float; at most one of the two noises is given
    col_noise: Tensor | None = None  # (N,) float
    seed: int = 0
    row_offset: int = 0
    col_offset: int = 0

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

    def with_contiguous_columns(self) -> ExpandCall:
        """The same call with column strides of 1 in `weight` and `upper`, copied if necessary."""
        # the weight is smaller than the result: a copy costs a fraction of writing the result
        call = self
        if self.weight.stride(1) != 1:
            call = call._replace(weight=self.weight.contiguous())
        if self.upper is not None and self.upper.stride(1) != 1:
            call = call._replace(upper=self.upper.contiguous())
        return call

    @property
    def noise_kind(self) -> int:
        """NO_NOISE, ROW_NOISE or COL_NOISE."""
        if self.col_noise is not None:
            return COL_NOISE
        return NO_NOISE if self.row_noise is None else ROW_NOISE

    @property
    def noise(self) -> Tensor | None:
        """The noise that is given: (N,) with COL_NOISE, (M,) with ROW_NOISE, else None."""
        return self.row_noise if self.col_noise is None else self.col_noise

    @property
    def lines(self) -> tuple[int, int]:
        """The lines that noise runs along: how many there are, and the position of the first.

        A line is a row of the result with COL_NOISE and a column with ROW_NOISE.
        """
        M, N = self.out.shape
        return (M, self.row_offset) if self.noise_kind == COL_NOISE else (N, self.col_offset)


def as_vector(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """An index, scale or noise as a kernel reads it: contiguous, in `dtype`. None stays None."""
    return None if x is None else x.detach().to(dtype).contiguous()
