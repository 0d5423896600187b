"""One call of `expand`, the argument of every backend."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# which axis has noise
NO_NOISE, ROW_NOISE, COL_NOISE = 0, 1, 2


class ExpandJob(NamedTuple):
    """The arguments of one `expand`, 2-D and with `out`; what is None changes nothing."""

    out: Tensor
    weight: Tensor
    upper: Tensor | None = None
    rows: Tensor | None = None
    cols: Tensor | None = None
    row_scale: Tensor | None = None
    col_scale: Tensor | None = None
    row_noise: Tensor | None = None
    col_noise: Tensor | None = None
    seed: int = 0
    row_offset: int = 0
    col_offset: int = 0

    @property
    def noise_kind(self) -> int:
        given = self.col_noise is not None, self.row_noise is not None
        return COL_NOISE if given[0] else ROW_NOISE if given[1] else NO_NOISE

    @property
    def is_wide(self) -> bool:
        """Whether 16 bytes of the output can be written at a time, known before the kernel runs."""
        sources = [x for x in (self.weight, self.upper) if x is not None]
        places = (self.out.data_ptr(), self.out.stride(0), self.out.shape[1])
        return all(x.stride(1) == 1 for x in (self.out, *sources)) and not any(
            place % 16 for place in places
        )

    @property
    def kind(self) -> tuple[str, str, bool, int, bool]:
        """Jobs of one kind share a launch."""
        dtypes = str(self.out.dtype), str(self.weight.dtype)
        return (*dtypes, self.upper is not None, self.noise_kind, self.is_wide)
