"""The arguments of `adamw_step`: tensors, the factors of their entries, and numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class StatePart(NamedTuple):
    """A parameter or a part of it, its gradient and its moments, all of one shape and device.

    `largest` is the maximum of amsgrad, or None.
    """

    value: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    largest: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        return [x for x in self if x is not None]

    def rows(self, here: slice) -> StatePart:
        """Some rows of all tensors."""
        return StatePart(*(x[here] for x in self.tensors()))

    def sizes(self) -> tuple[int, int]:
        """M and N: rows and columns of a matrix. A vector is a matrix of one row."""
        shape = self.value.shape
        return (1 if len(shape) == 1 else shape[0]), shape[-1]


class UpdateRule(NamedTuple):
    """The settings of one step of AdamW, and its number (from 1)."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool
    step: float


@dataclass(frozen=True)
class Factors:
    """u, e, s and z of (2) in `step.py`: per axis one vector that is shaped to broadcast.

    Attributes:
        lr: u, float64 for weights in float64, otherwise float32.
        eps: e.
        old: bool; an entry is old if it is true on all axes.
        centre: z, one vector along the only axis; () if it is 0.
    """

    lr: tuple[Tensor, ...]
    eps: tuple[Tensor, ...]
    old: tuple[Tensor, ...]
    centre: tuple[Tensor, ...] = ()

    def rows(self, here: slice, rows: int) -> Factors:
        """Those of some of the rows. Vectors of other axes stay whole."""

        def cut(vectors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(x[here] if len(x) == rows else x for x in vectors)

        return Factors(*map(cut, (self.lr, self.eps, self.old, self.centre)))

    @cached_property
    def matrix(self) -> dict[str, Tensor]:
        """The vectors of a matrix, by the names of `VECTORS`; a vector counts as one row.

        Each is (M,) or (N,), contiguous, of the dtype of `lr`. They are made once, because every
        step needs them.
        """
        like = self.lr[0]
        every = (self.lr, self.eps, self.old)
        flat = [[x.reshape(-1).to(like.dtype).contiguous() for x in vectors] for vectors in every]
        rows = (vectors[0] if len(vectors) == 2 else like.new_ones(1) for vectors in flat)
        columns = [vectors[-1] for vectors in flat]
        centre = self.centre[0] if self.centre else torch.zeros_like(columns[0])
        columns.append(centre.reshape(-1).to(like.dtype).contiguous())
        return dict(zip(VECTORS, (*rows, *columns), strict=True))

    @cached_property
    def folded(self) -> dict[str, Tensor | None]:
        """`matrix` for a kernel that reads only columns that differ.

        A column vector of equal numbers is None, and the vector of the rows has their product. So
        is a centre of zeros.
        """
        vectors: dict[str, Tensor | None] = dict(self.matrix)
        for name in ("lr", "eps", "old"):
            rows, columns = (self.matrix[f"{axis}_{name}"] for axis in ("row", "col"))
            if bool((columns == columns[0]).all()):
                vectors |= {f"row_{name}": rows * columns[0], f"col_{name}": None}
        if not self.centre:
            vectors["col_centre"] = None
        return vectors


# the vectors of `Factors.matrix`, in the order in which kernels take them
VECTORS = ("row_lr", "row_eps", "row_old", "col_lr", "col_eps", "col_old", "col_centre")
