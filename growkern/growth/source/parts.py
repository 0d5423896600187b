"""Tensors that are made of several in files: quantised ones, and those of single experts.

Quantised weights are computed as the numbers that they stand for, a few rows at a time. fp8: a
matrix `NAME` of 8-bit numbers, and one scale for each of its blocks in `NAME_scale_inv`. mxfp4:
`NAME_blocks` and `NAME_scales`, the two halves of the microscaling format of the OCP.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain, pairwise, product
from pathlib import Path

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.families import ModelSpec, TensorSpec
from growkern.files import read_all
from growkern.growth.source.files import EIGHT_BITS, Header, Transposed, WeightFile, weight_file
from growkern.growth.stored import (
    OTHER_CHECKPOINT,
    Filled,
    Read,
    StoredTensor,
    spellings,
)

# positive numbers of 4 bits, in the order of their codes; those of the negative ones follow
FP4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# columns that are computed at a time
FP4_COLUMNS = 64
BLOCKS = "_blocks"


@dataclass(frozen=True)
class Dequantised(Filled):
    """What a quantised tensor, two stored ones, stands for. It is computed when it is read."""

    values: StoredTensor
    scales: StoredTensor

    @property
    def file(self) -> str:
        return self.values.file

    @property
    def file_bytes(self) -> int:
        return self.values.file_bytes + self.scales.file_bytes


@dataclass(frozen=True)
class BlockScaled(Dequantised):
    """A matrix of 8-bit numbers. Each block, rows and columns, has one scale; the last are cut."""

    block: tuple[int, int]

    def fill(self, out: Tensor, start: int, stop: int) -> None:
        rows, cols = self.block
        for number in range(start // rows, -(-stop // rows)):
            first, last = max(start, number * rows), min(stop, (number + 1) * rows)
            scales = self.scales.rows(number, number + 1).float().repeat_interleave(cols, 1)
            values = self.values.rows(first, last).float()
            out[first - start : last - start] = values * scales[:, : self.shape[1]]


@dataclass(frozen=True)
class TensorScaled(Dequantised):
    """A matrix of 8-bit numbers that share one scale."""

    def fill(self, out: Tensor, start: int, stop: int) -> None:
        scale = self.scales.read().float().reshape(())
        torch.mul(self.values.rows(start, stop).float(), scale, out=out)


@dataclass(frozen=True)
class PackedFp4(Dequantised):
    """One matrix per expert of 4-bit numbers (mxfp4), two in a byte. 32 of them share a power of 2.

    `values` has the axes expert, column, group of rows, byte.
    """

    def fill(self, out: Tensor, start: int, stop: int) -> None:
        numbers = torch.tensor([*FP4_NUMBERS, *(-x for x in FP4_NUMBERS)])
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

    `block` is that of `scale_block`.
    """
    result = dict(headers)
    if block is None:
        return result
    for name, header in headers.items():
        if name.endswith(BLOCKS) and len(header.shape) == 4:
            whole = name.removesuffix(BLOCKS)
            scales = _scales_of(result, f"{whole}_scales", header.shape[:-1], where)
            experts, columns, groups, size = header.shape
            whole_shape = (experts, 2 * groups * size, columns)
            result[whole] = PackedFp4(whole_shape, torch.bfloat16, result.pop(name), scales)
        elif header.dtype == EIGHT_BITS and block and len(header.shape) == 2:
            wide, (rows, cols) = torch.bfloat16, block
            if not rows:
                of_tensor = f"{name}_scale_inv"
                own = headers.get(of_tensor)
                # transformers writes one number with any number of axes
                one = own.shape if own is not None and math.prod(own.shape) == 1 else ()
                scales = _scales_of(result, of_tensor, one, where)
                result[name] = TensorScaled(header.shape, wide, header, scales)
                continue
            needed = (-(-header.shape[0] // rows), -(-header.shape[1] // cols))
            scales = _scales_of(result, f"{name}_scale_inv", needed, where)
            result[name] = BlockScaled(header.shape, wide, header, scales, (rows, cols))
    return result


def _scales_of(
    headers: dict[str, StoredTensor], name: str, shape: tuple[int, ...], where: str
) -> StoredTensor:
    scales = headers.pop(name, None)
    if scales is None or scales.shape != shape:
        have = "missing" if scales is None else f"{list(scales.shape)}"
        raise GrowthError(
            f"{where}: {name} is {have}, and its weight needs scales of the shape {list(shape)}: "
            f"{OTHER_CHECKPOINT}"
        )
    return scales


NUMBERED = re.compile(r"(.*)\.(\d+)\.(.*)")


# bytes of a file: its path, the first byte and their number
Run = tuple[str, int, int]


@dataclass(frozen=True)
class Stacked(Filled):
    """A tensor of one matrix per expert, from files with one tensor or more for each.

    Attributes:
        name: of the first one in the files.
        runs: where the matrix of each expert lies. They are plain tuples, which the garbage
            collector leaves out: a model has 100,000.
        opened: the files, by their paths.
    """

    name: str
    runs: tuple[tuple[Run, ...], ...]
    opened: Mapping[str, WeightFile]

    @classmethod
    def of(
        cls, shape: tuple[int, ...], dtype: torch.dtype, name: str, parts: Iterable[Iterable[Run]]
    ) -> Stacked:
        """A tensor of these parts: those of an expert that lie side by side become one run."""
        result = []
        for own in parts:
            runs: list[Run] = []
            for file, at, size in own:
                if runs and (file, at) == (runs[-1][0], runs[-1][1] + runs[-1][2]):
                    runs[-1] = (file, runs[-1][1], runs[-1][2] + size)
                else:
                    runs.append((file, at, size))
            result.append(tuple(runs))
        files = {file: weight_file(file) for own in result for file, _, _ in own}
        return cls(shape, dtype, name, tuple(result), files)

    @property
    def file(self) -> str:
        return self.runs[0][0][0]

    def inside(self, directory: Path) -> Stacked:
        """The same tensor, whose files lie in a directory."""
        runs = [[(str(directory / f), at, size) for f, at, size in own] for own in self.runs]
        return Stacked.of(self.shape, self.dtype, self.name, runs)

    def places(self, start: int, stop: int) -> Iterator[Run]:
        """Every run of the rows [start, stop)."""
        return chain.from_iterable(self.runs[start:stop])

    def fill(self, out: Tensor, start: int, stop: int) -> None:
        """Read rows [start, stop). Reading is faster than to map thousands of small tensors."""
        view, done = out.view(-1).view(torch.uint8).numpy().data, 0
        for file, at, size in self.places(start, stop):
            try:
                opened = self.opened[file].opened()
                read_all(opened.number, view[done : done + size], at)
            except OSError as error:
                raise GrowthError(
                    f"{file}: {self.name} or one after it cannot be read: {error}"
                ) from error
            done += size


@dataclass(frozen=True)
class StackedParts(Filled):
    """A tensor of one matrix per expert, whose rows quantised tensors stand for."""

    parts: tuple[tuple[StoredTensor, ...], ...]

    @property
    def file(self) -> str:
        return self.parts[0][0].file

    @property
    def file_bytes(self) -> int:
        return sum(part.file_bytes for part in chain.from_iterable(self.parts))

    def fill(self, out: Tensor, start: int, stop: int) -> None:
        for row, parts in zip(out, self.parts[start:stop], strict=True):
            torch.cat([part.read() for part in parts], out=row)


@dataclass(frozen=True)
class Parts:
    """A tensor of a mixture, made of a dense model's."""

    names: tuple[str, ...]  # of the dense tensors; their rows lie one after another
    experts: int  # how many share their units; 0: the tensor has no axis of experts
    axis: int  # of their units
    size: int  # of that axis, without experts: there may be the first units only

    def of_experts(self, tensors: Sequence[Tensor], numbers: Sequence[int] | None = None) -> Tensor:
        """The matrices of these experts, or of all, from the dense tensors."""
        matrices = []
        for expert in range(self.experts) if numbers is None else numbers:
            own = [x.chunk(self.experts, self.axis)[expert] for x in tensors]
            matrices.append(own[0].contiguous() if len(own) == 1 else torch.cat(own))
        # of a single tensor nothing is copied
        return matrices[0][None] if len(matrices) == 1 else torch.stack(matrices)


@dataclass(frozen=True)
class Assembled:
    """Reads tensors of a mixture, from a dense model those in `parts`."""

    read: Read
    parts: Mapping[str, Parts]

    def __call__(self, name: str, entries: Sequence[int] | None = None) -> Tensor:
        part = self.parts.get(name)
        if part is None:
            return self.read(name) if entries is None else self.read(name, entries)
        tensors = [self.read(own) for own in part.names]
        if not part.experts:
            return tensors[0].narrow(part.axis, 0, part.size)
        return part.of_experts(tensors, entries)


def files_of(tensor: StoredTensor) -> set[str]:
    """The files that hold a tensor."""
    if isinstance(tensor, Stacked):
        return {file for file, _, _ in tensor.places(0, len(tensor.runs))}
    parts = chain.from_iterable(tensor.parts) if isinstance(tensor, StackedParts) else [tensor]
    pairs = ([p.values, p.scales] if isinstance(p, Dequantised) else [p] for p in parts)
    return {stored.file for pair in pairs for stored in pair}


def stacked(
    model: ModelSpec, headers: Mapping[str, StoredTensor], where: str
) -> dict[str, StoredTensor]:
    """The stored tensors, with the model's names for those that its table names otherwise in files.

    The tensors of single experts become one `Stacked`. One of several is cut.
    """
    known: dict[str, list[tuple[TensorSpec, int]]] = {}
    for t in model.tensors:
        for part, file in enumerate([t.stored] if t.stored else t.files):
            known.setdefault(file, []).append((t, part))

    @cache
    def places_of(key: str) -> list[tuple[TensorSpec, int]]:
        return next((known[n] for n in spellings(model, key) if n in known), [])

    # experts of a layer that predicts a second token may be joined in files, as in the model
    plain = {n: t.name for t in model.tensors for n in model.second_files((t.template,), t.layer)}
    result: dict[str, StoredTensor] = {}
    joined: dict[str, dict[tuple[int, int], StoredTensor]] = {}
    for raw, header in headers.items():
        # the last number in a name is that of the expert
        number = NUMBERED.fullmatch(raw) if known else None
        places = places_of(f"{number[1]}.{{e}}.{number[3]}") if number else []
        expert = int(number[2]) if number and places else 0
        places = places or places_of(raw)
        if not places:
            result[plain.get(raw, raw)] = header
            continue
        shapes = [model.shapes[t.name] for t, _ in places]
        cut = _cut(header, shapes, f"{where}: {raw}") if len(places) > 1 else [header]
        for (t, part), own in zip(places, cut, strict=True):
            if joined.setdefault(t.name, {}).setdefault((expert, part), own) is not own:
                raise GrowthError(
                    f"{where}: {raw} is there twice: remove the one that is out of date"
                )
    # files may swap the last two axes
    swapped = {*model.transposed}
    for raw, own in [*result.items()] if swapped else ():
        for name in swapped.intersection(spellings(model, raw)):
            shape = model.shapes[name]
            turned = Transposed(own) if isinstance(own, Header) and len(shape) == 3 else own
            result[raw] = turned if own.shape != shape == turned.shape else own
    tensors = {t.name: t for t, _ in chain.from_iterable(known.values())}
    for name, parts in joined.items():
        if name in result:
            raise GrowthError(
                f"{where}: {name} is there as a whole and in parts: remove what is out of date"
            )
        result[name] = _joined(model, tensors[name], parts, where)
    return result


def _cut(stored: StoredTensor, shapes: Sequence[tuple[int, ...]], name: str) -> list[StoredTensor]:
    """Tensors of these shapes, which files hold one after another in one."""
    ends = [0, *accumulate(shape[0] for shape in shapes)]
    if stored.shape != (whole := (ends[-1], *shapes[0][1:])):
        raise GrowthError(
            f"{name} has shape {list(stored.shape)}, but its config says {list(whole)}: "
            f"{OTHER_CHECKPOINT}"
        )
    return [stored.part(*rows) for rows in pairwise(ends)]


def _joined(
    model: ModelSpec, tensor: TensorSpec, parts: Mapping[tuple[int, int], StoredTensor], where: str
) -> StoredTensor:
    """One tensor of the model from the tensors in files, by expert and part."""
    files = tensor.files or (str(tensor.stored),)
    experts = model.shapes[tensor.name][0] if tensor.is_split else 1

    def name(expert: int, part: int) -> str:
        return f"{where}: tensor {files[part].replace('{e}', str(expert))}"

    for place in product(range(experts), range(len(files))):
        if place not in parts:
            raise GrowthError(f"{name(*place)} is missing: {OTHER_CHECKPOINT}")
    first = [parts[0, part] for part in range(len(files))]
    kinds = [(part.shape, part.dtype) for part in first]
    for place, header in parts.items():
        if place[0] >= experts:
            raise GrowthError(f"{name(*place)} is there, but the config has {experts}")
        if (header.shape, header.dtype) != kinds[place[1]]:
            shape, dtype = kinds[place[1]]
            raise GrowthError(
                f"{name(*place)} is {list(header.shape)} {header.dtype}, but that of expert 0 is "
                f"{list(shape)} {dtype}"
            )
    if not tensor.is_split:
        return first[0]
    if len({(len(shape), shape[1:], dtype) for shape, dtype in kinds}) > 1 or not first[0].shape:
        names = " and ".join(file.replace("{e}", "0") for file in files)
        raise GrowthError(f"{where}: {names} have other shapes or dtypes than each other")
    shape, dtype = (experts, sum(s[0] for s, _ in kinds), *kinds[0][0][1:]), kinds[0][1]
    of_expert = [[(e, part) for part in range(len(files))] for e in range(experts)]
    places = {p: (x.file, x.start, x.nbytes) for p, x in parts.items() if isinstance(x, Header)}
    if len(places) < len(parts):
        return StackedParts(shape, dtype, tuple(tuple(parts[p] for p in own) for own in of_expert))
    runs = ([places[p] for p in own] for own in of_expert)
    return Stacked.of(shape, dtype, files[0].replace("{e}", "0"), runs)
