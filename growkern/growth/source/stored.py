"""The interface of a tensor in files: its shape is known at once, its values are read on demand.

`BareTensor` has no values. `growkern.growth.source.files.Header` is a tensor of a safetensors file,
`growkern.growth.source.distributed.tensors.DistributedTensor` one of a distributed checkpoint, and
`Stacked` one that files hold in parts, one or two for each expert.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.families.model import ModelSpec
from growkern.families.spec import TensorSpec

NUMBERED = re.compile(r"(.*)\.(\d+)\.(.*)")


# a source tensor by name; with a number, that entry of its first axis alone
Read = Callable[..., Tensor]


@runtime_checkable
class StoredTensor(Protocol):
    """A tensor in the files of a checkpoint."""

    @property
    def file(self) -> str:
        """The file that holds it; of a distributed checkpoint, the metadata file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def is_mapped(self) -> bool:
        """True if reading only maps the file, so that reading again costs nothing."""

    def read(self) -> Tensor:
        """The whole tensor."""

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the first axis."""

    def read_entries(self, index: Sequence[Tensor]) -> Tensor:
        """A tensor of the whole shape, in which only the wanted entries have to be right.

        Args:
            index: per axis the wanted entries, (k,) int64, in any order and with repetitions.
        """


@dataclass(frozen=True)
class BareTensor:
    """A tensor that a config describes, without a file: its values are on the meta device."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_mapped: bool = True

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def rows(self, start: int, stop: int) -> Tensor:
        return self.read()[start:stop]

    def read_entries(self, index: Sequence[Tensor]) -> Tensor:
        return self.read()


def read_entry(tensor: StoredTensor, entry: int | None) -> Tensor:
    """One entry of the first axis of a stored tensor; None: the whole tensor."""
    return tensor.read() if entry is None else tensor.rows(entry, entry + 1)[0]


@dataclass(frozen=True)
class Stacked:
    """A tensor of one matrix per expert, from files with one tensor or more for each.

    Attributes:
        parts: the stored tensors of each expert. They are rows of its matrix, one after another.
    """

    # `StoredTensor`s; where files are written, `Header`s
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
        """File, first byte and number of bytes of every piece of the rows [start, stop)."""
        for parts in self.parts[start:stop]:
            for part in parts:
                yield from part.places(0, part.shape[0])

    def read(self) -> Tensor:
        return self.rows(0, len(self.parts))

    def rows(self, start: int, stop: int) -> Tensor:
        out = torch.empty(stop - start, *self.shape[1:], dtype=self.dtype)
        for number in range(start, stop):
            torch.cat([part.read() for part in self.parts[number]], out=out[number - start])
        return out

    def read_entries(self, index: Sequence[Tensor]) -> Tensor:
        # memory that is not written takes no room
        out = torch.empty(self.shape, dtype=self.dtype)
        for number in index[0].unique().tolist():
            torch.cat([part.read() for part in self.parts[number]], out=out[number])
        return out


def files_of(tensor: StoredTensor) -> set[str]:
    """The files that hold a tensor."""
    if isinstance(tensor, Stacked):
        return {part.file for parts in tensor.parts for part in parts}
    return {tensor.file}


def spellings(model: ModelSpec, name: str) -> list[str]:
    """The names that a tensor in a file may have in the model.

    A head class may have been saved without the prefix of its body, or a body with it. The table
    may say that names of the class begin otherwise in files.
    """
    classes = model.family.classes
    prefix = classes[model.class_name].prefix
    prefixes = {c.prefix for c in classes.values() if c.prefix and not prefix}
    begins = classes[model.class_name].files.items()
    renamed = (own + name.removeprefix(file) for file, own in begins if name.startswith(file))
    return [name, *renamed, prefix + name, *(name.removeprefix(p) for p in prefixes)]


def stacked(
    model: ModelSpec, headers: Mapping[str, StoredTensor], where: str
) -> dict[str, StoredTensor]:
    """The stored tensors, with the model's names for those that its table names otherwise in files.

    The tensors of single experts become one `Stacked`.
    """
    known = {file: (t, part) for t in model.tensors for part, file in enumerate(t.files)}
    known |= {t.stored: (t, 0) for t in model.tensors if t.stored}
    result: dict[str, StoredTensor] = {}
    found: dict[str, dict[tuple[int, int], StoredTensor]] = {}
    for raw, header in headers.items():
        # the last number in a name is that of the expert
        number = NUMBERED.fullmatch(raw) if known else None
        keys = {raw: 0, f"{number[1]}.{{e}}.{number[3]}": int(number[2])} if number else {raw: 0}
        places = ((known.get(n), e) for key, e in keys.items() for n in spellings(model, key))
        place, expert = next((p for p in places if p[0]), (None, 0))
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
