"""Quantised weights as the numbers that they stand for, computed a few rows at a time.

fp8: a matrix `NAME` of 8-bit numbers, and one scale for each of its blocks in `NAME_scale_inv`.
mxfp4: `NAME_blocks` and `NAME_scales`, the two halves of the microscaling format of the OCP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.growth.source.files import EIGHT_BITS
from growkern.growth.source.stored import Filled, StoredTensor

# numbers of 4 bits, in the order of their codes
FP4_NUMBERS = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)
# columns that are computed at a time
FP4_COLUMNS = 64
BLOCKS = "_blocks"


@dataclass(frozen=True)
class Dequantised(Filled):
    """What a quantised tensor stands for. It is computed when it is read.

    Attributes:
        values, scales: the two stored tensors.
    """

    values: StoredTensor
    scales: StoredTensor

    @property
    def file(self) -> str:
        return self.values.file


@dataclass(frozen=True)
class BlockScaled(Dequantised):
    """A matrix of 8-bit numbers. Every block of it has one scale, at the lower ends a part of one.

    Attributes:
        block: rows and columns of a block.
    """

    block: tuple[int, int]

    def fill(self, out: Tensor, start: int, stop: int) -> None:
        rows, cols = self.block
        for number in range(start // rows, -(-stop // rows)):
            first, last = max(start, number * rows), min(stop, (number + 1) * rows)
            scales = self.scales.rows(number, number + 1).float().repeat_interleave(cols, 1)
            values = self.values.rows(first, last).float()
            out[first - start : last - start] = values * scales[:, : self.shape[1]]


@dataclass(frozen=True)
class PackedFp4(Dequantised):
    """One matrix per expert of 4-bit numbers (mxfp4), two in a byte. 32 of them share a power of 2.

    `values` has the axes expert, column, group of rows, byte.
    """

    def fill(self, out: Tensor, start: int, stop: int) -> None:
        numbers = torch.tensor(FP4_NUMBERS)
        for number in range(start, stop):
            packed = self.values.rows(number, number + 1)[0]
            powers = self.scales.rows(number, number + 1)[0]
            for first in range(0, len(packed), FP4_COLUMNS):
                at = slice(first, first + FP4_COLUMNS)
                pair = torch.stack([packed[at] & 15, packed[at] >> 4], -1)
                power = torch.ldexp(torch.ones(powers[at].shape), powers[at].int() - 127)
                values = numbers[pair.flatten(2).int()] * power[..., None]
                out[number - start, :, at] = values.flatten(1).T


def dequantised(
    headers: Mapping[str, StoredTensor], block: Sequence[int] | None, where: str
) -> dict[str, StoredTensor]:
    """The stored tensors, with those that quantised ones stand for in the place of these.

    Args:
        block: from `scale_block`.
    """
    result = dict(headers)
    if block is None:
        return result
    for name, header in headers.items():
        if name.endswith(BLOCKS) and len(header.shape) == 4:
            whole = name.removesuffix(BLOCKS)
            scales = _scales_of(result, f"{whole}_scales", header.shape[:-1], where)
            experts, columns, groups, size = header.shape
            shape = (experts, 2 * groups * size, columns)
            result[whole] = PackedFp4(shape, torch.bfloat16, result.pop(name), scales)
        elif header.dtype == EIGHT_BITS and block and len(header.shape) == 2:
            rows, cols = block
            needed = (-(-header.shape[0] // rows), -(-header.shape[1] // cols))
            scales = _scales_of(result, f"{name}_scale_inv", needed, where)
            wide = torch.bfloat16
            result[name] = BlockScaled(header.shape, wide, header, scales, (rows, cols))
    return result


def _scales_of(
    headers: dict[str, StoredTensor], name: str, shape: tuple[int, ...], where: str
) -> StoredTensor:
    found = headers.pop(name, None)
    if found is None or found.shape != shape:
        have = "missing" if found is None else f"{list(found.shape)}"
        raise GrowthError(
            f"{where}: {name} is {have}, and its weight needs scales of the shape {list(shape)}: "
            "check that config.json and the weights are of one checkpoint"
        )
    return found
