"""Tensors that files hold in parts: one or two for each expert of a mixture."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.families.model import ModelSpec
from growkern.families.spec import TensorSpec
from growkern.files import no_collections, read_all
from growkern.growth.source.files import Header
from growkern.growth.source.parts.quantised import Dequantised
from growkern.growth.source.stored import Read, StoredTensor, spellings

NUMBERED = re.compile(r"(.*)\.(\d+)\.(.*)")


@dataclass(frozen=True)
class Stacked:
    """A tensor of one matrix per expert, from files with one tensor or more for each.

    Attributes:
        parts: the stored tensors of each expert. They are rows of its matrix, one after another.
    """

    # `Header`s of safetensors files, or what they stand for
    parts: tuple[tuple[Any, ...], ...]

    @property
    def file(self) -> str:
        return self.parts[0][0].file

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0]
        return (len(self.parts), sum(part.shape[0] for part in first), *first[0].shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0][0].dtype

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in self.parts for part in parts)

    @property
    def is_mapped(self) -> bool:
        return False

    def inside(self, directory: Path) -> Stacked:
        """The same tensor, whose files lie in a directory."""
        parts = (tuple(replace(p, file=str(directory / p.file)) for p in x) for x in self.parts)
        return Stacked(tuple(parts))

    def places(self, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """File, first byte and number of bytes of every run of the rows [start, stop)."""
        yield from chain.from_iterable(self._runs[start:stop])

    @cached_property
    def _runs(self) -> list[list[tuple[str, int, int]]]:
        """`places` of every expert: parts that lie side by side in a file are one run."""
        if any(type(part) is not Header for part in chain.from_iterable(self.parts)):
            return []
        sizes = [part.nbytes for part in self.parts[0]]
        result = []
        for parts in self.parts:
            runs: list[tuple[str, int, int]] = []
            for part, size in zip(parts, sizes, strict=True):
                file, first, before = runs[-1] if runs else ("", 0, 0)
                if (file, first + before) == (part.file, part.start):
                    runs[-1] = (file, first, before + size)
                else:
                    runs.append((part.file, part.start, size))
            result.append(runs)
        return result

    def read(self) -> Tensor:
        return self.rows(0, len(self.parts))

    def rows(self, start: int, stop: int) -> Tensor:
        out = torch.empty(stop - start, *self.shape[1:], dtype=self.dtype)
        self._fill(out, start, stop)
        return out

    def _fill(self, out: Tensor, start: int, stop: int) -> None:
        """Read rows [start, stop). Reading is faster than to map thousands of small tensors."""
        if not self._runs:
            for one, parts in zip(out, self.parts[start:stop], strict=True):
                torch.cat([part.read() for part in parts], out=one)
            return
        view, done = out.view(-1).view(torch.uint8).numpy().data, 0
        with ExitStack() as stack:
            files: dict[str, int] = {}
            for file, at, size in self.places(start, stop):
                if file not in files:
                    files[file] = os.open(file, os.O_RDONLY)
                    stack.callback(os.close, files[file])
                try:
                    read_all(files[file], view[done : done + size], at)
                except OSError as error:
                    name = self.parts[start][0].raw_name
                    raise GrowthError(
                        f"{file}: {name} or one after it cannot be read: {error}"
                    ) from error
                done += size

    def read_entries(self, index: Sequence[Tensor]) -> Tensor:
        # memory that is not written takes no room
        out = torch.empty(self.shape, dtype=self.dtype)
        for number in index[0].unique().tolist():
            self._fill(out[number], number, number + 1)
        return out


@dataclass(frozen=True)
class Parts:
    """A tensor of a mixture, made of a dense model's.

    Attributes:
        names: the dense tensors; their rows lie one after another.
        experts: how many experts share their units; 0: the tensor has no axis of experts.
        axis: the axis of their units.
    """

    names: tuple[str, ...]
    experts: int
    axis: int

    def of_expert(self, tensors: Sequence[Tensor], expert: int) -> Tensor:
        """The matrix of one expert, from the dense tensors."""
        own = [x.chunk(self.experts, self.axis)[expert] for x in tensors]
        return own[0].contiguous() if len(own) == 1 else torch.cat(own)


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
            return tensors[0]
        numbers = range(part.experts) if entries is None else entries
        found = [part.of_expert(tensors, number) for number in numbers]
        # of a single tensor nothing is copied
        return found[0][None] if len(found) == 1 else torch.stack(found)

    def __deepcopy__(self, memo: Any) -> Assembled:
        return self


def files_of(tensor: StoredTensor) -> set[str]:
    """The files that hold a tensor."""
    parts = chain.from_iterable(tensor.parts) if isinstance(tensor, Stacked) else [tensor]
    pairs = ([p.values, p.scales] if isinstance(p, Dequantised) else [p] for p in parts)
    return {one.file for pair in pairs for one in pair}


@no_collections()
def stacked(
    model: ModelSpec, headers: Mapping[str, StoredTensor], where: str
) -> dict[str, StoredTensor]:
    """The stored tensors, with the model's names for those that its table names otherwise in files.

    The tensors of single experts become one `Stacked`.
    """
    known = {file: (t, part) for t in model.tensors for part, file in enumerate(t.files)}
    known |= {t.stored: (t, 0) for t in model.tensors if t.stored}

    @cache
    def place_of(key: str) -> tuple[TensorSpec, int] | None:
        return next((known[n] for n in spellings(model, key) if n in known), None)

    result: dict[str, StoredTensor] = {}
    found: dict[str, dict[tuple[int, int], StoredTensor]] = {}
    for raw, header in headers.items():
        # the last number in a name is that of the expert
        number = NUMBERED.fullmatch(raw) if known else None
        place = place_of(f"{number[1]}.{{e}}.{number[3]}") if number else None
        expert = int(number[2]) if number and place else 0
        place = place or place_of(raw)
        if place is None:
            result[raw] = header
        elif found.setdefault(place[0].name, {}).setdefault((expert, place[1]), header) != header:
            raise GrowthError(f"{where}: {raw} is there twice: remove the one that is out of date")
    tensors = {t.name: t for t, _ in known.values()}
    for name, parts in found.items():
        if name in result:
            raise GrowthError(
                f"{where}: {name} is there as a whole and in parts: remove what is out of date"
            )
        result[name] = _joined(model, tensors[name], parts, where)
    return result


def _joined(
    model: ModelSpec,
    tensor: TensorSpec,
    found: Mapping[tuple[int, int], StoredTensor],
    where: str,
) -> StoredTensor:
    """One tensor of the model from the tensors in files, by expert and part."""
    files = tensor.files or (str(tensor.stored),)
    experts = model.shapes[tensor.name][0] if tensor.is_split else 1
    for expert, part in product(range(experts), range(len(files))):
        if (expert, part) not in found:
            name = files[part].replace("{e}", str(expert))
            raise GrowthError(
                f"{where}: tensor {name} is missing: check that config.json and the weights are of "
                "one checkpoint"
            )
    first = [found[0, part] for part in range(len(files))]
    for (expert, part), header in found.items():
        name = files[part].replace("{e}", str(expert))
        if expert >= experts:
            raise GrowthError(f"{where}: tensor {name} is there, but the config has {experts}")
        if (header.shape, header.dtype) != (first[part].shape, first[part].dtype):
            raise GrowthError(
                f"{where}: {name} is {list(header.shape)} {header.dtype}, but that of expert 0 is "
                f"{list(first[part].shape)} {first[part].dtype}"
            )
    if not tensor.is_split:
        return first[0]
    kinds = {(len(part.shape), part.shape[1:], part.dtype) for part in first}
    if len(kinds) > 1 or not first[0].shape:
        names = " and ".join(file.replace("{e}", "0") for file in files)
        raise GrowthError(f"{where}: {names} have other shapes or dtypes than each other")
    return Stacked(
        tuple(tuple(found[e, part] for part in range(len(files))) for e in range(experts))
    )
