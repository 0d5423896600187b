"""The interface of a tensor in files, and checks of the tensors of a source.

`BareTensor` has no values. `growkern.growth.source.files.Header` is a tensor of a safetensors file,
`growkern.growth.source.distributed.DistributedTensor` one of a distributed checkpoint, and
`growkern.growth.source.parts` has those that files hold in parts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.families import ModelSpec

# the integer types occur in buffers, which growth skips
STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    # 8-bit weights, which have scales
    "F8_E4M3": torch.float8_e4m3fn,
}
# in one file
MOST_TENSORS = 1 << 17

# a source tensor by name; with numbers, those entries of its first axis alone
Read = Callable[..., Tensor]


class StoredTensor:
    """A tensor in the files of a checkpoint: its shape is known at once, its values on demand.

    Attributes:
        file: the file that holds it; of a distributed checkpoint, the metadata file.
        is_mapped: True if reading only maps the file, so that reading again costs nothing.
    """

    __slots__ = ()
    is_mapped = False
    if TYPE_CHECKING:
        # a dataclass would take a property of its base for the default of a field

        @property
        def file(self) -> str: ...

        @property
        def shape(self) -> tuple[int, ...]: ...

        @property
        def dtype(self) -> torch.dtype: ...

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def file_bytes(self) -> int:
        """Bytes that it takes in its files."""
        return self.nbytes

    def read(self) -> Tensor:
        """The whole tensor."""
        return self.rows(0, self.shape[0])

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the first axis."""
        return self.read()[start:stop]

    def part(self, start: int, stop: int) -> StoredTensor:
        """Rows [start, stop) of the first axis, as a tensor of their own."""
        return RowsOf((stop - start, *self.shape[1:]), self.dtype, self, start)

    def read_entries(self, index: Sequence[Tensor]) -> Tensor:
        """A tensor of the whole shape, in which only the wanted entries have to be right.

        Args:
            index: per axis the wanted entries, (k,) int64, in any order and with repetitions.
        """
        return self.read()


@dataclass(frozen=True)
class BareTensor(StoredTensor):
    """A tensor that a config describes, without a file: its values are on the meta device."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_mapped = True

    def read(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class Filled(StoredTensor):
    """A tensor that is put together when it is read: `fill` writes its rows."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def fill(self, out: Tensor, start: int, stop: int) -> None:
        """Write rows [start, stop) into `out`."""
        raise NotImplementedError

    def rows(self, start: int, stop: int) -> Tensor:
        out = torch.empty(stop - start, *self.shape[1:], dtype=self.dtype)
        self.fill(out, start, stop)
        return out

    def read_entries(self, index: Sequence[Tensor]) -> Tensor:
        # memory that is not written takes no room
        out = torch.empty(self.shape, dtype=self.dtype)
        for start, stop in consecutive(index[0].unique()):
            self.fill(out[start:stop], start, stop)
        return out


@dataclass(frozen=True)
class RowsOf(Filled):
    """Rows of another stored tensor, from `first` on."""

    whole: StoredTensor
    first: int

    @property
    def file(self) -> str:
        return self.whole.file

    def fill(self, out: Tensor, start: int, stop: int) -> None:
        out.copy_(self.whole.rows(self.first + start, self.first + stop))


# processor time to grow to 4.6 GB, without writing: 7.1 s in pieces of 1 MB, 3.5 s in 4 MB, 2.4 s
# in these 16 MB, 2.2 s in 32 MB
PIECE_BYTES = 16 << 20


def row_blocks(
    shape: tuple[int, ...], itemsize: int, piece_bytes: int = PIECE_BYTES
) -> list[tuple[int, int]]:
    """Rows [start, stop) of pieces of about `piece_bytes`, with at least one row each."""
    count = shape[0] if shape else 1
    rows = max(1, piece_bytes // max(1, math.prod(shape[1:]) * itemsize))
    return [(start, min(start + rows, count)) for start in range(0, count, rows)]


def consecutive(entries: Sequence[int] | Tensor) -> list[tuple[int, int]]:
    """The runs [start, stop) of rising numbers."""
    entries = torch.as_tensor(entries)
    breaks = (entries.diff() != 1).nonzero().flatten() + 1
    ends, numbers = [0, *breaks.tolist(), len(entries)], entries.tolist()
    return [(numbers[a], numbers[b - 1] + 1) for a, b in pairwise(ends) if a < b]


def joined_rows(rows: Callable[[int, int], Tensor], entries: Sequence[int]) -> Tensor:
    """Some entries of a tensor's first axis, in rising order; `rows` returns a run of them."""
    runs = [rows(*run) for run in consecutive(entries)]
    return runs[0] if len(runs) == 1 else torch.cat(runs)


def read_entries(tensor: StoredTensor, entries: Sequence[int] | None) -> Tensor:
    """Some entries of the first axis of a stored tensor; None: the whole tensor."""
    return tensor.read() if entries is None else joined_rows(tensor.rows, entries)


def entries_of(tensor: Tensor, entries: Sequence[int] | None) -> Tensor:
    """`read_entries` of a tensor in memory."""
    return tensor if entries is None else joined_rows(lambda a, b: tensor[a:b], entries)


# what wrappers add to names: DDP, torch.compile, activation checkpointing, FSDP, Fabric, the value
# heads of TRL, and PEFT
_WRAPPER = (
    r"(?:module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|_forward_module"
    r"|pretrained_model)\."
)
WRAPPERS = re.compile(rf"^(?:{_WRAPPER})*base_model\.model\.|(?<![^.]){_WRAPPER}")
# what adapters of PEFT and loralib call the weights beside them, and their own
ADAPTED = re.compile(r"(^|\.)(base_layer|original_module|modules_to_save|lora_\w+)(\.|$)")
# a text model that was loaded from the files of one with images is saved under the names there
IN_IMAGES = re.compile(r"^(model\.)?language_model\.")


def own_name(name: str) -> str:
    """The name of a tensor without what wrappers of a model, or of its parts, add to it."""
    return WRAPPERS.sub("", name)


def refuse_adapted(names: Iterable[str], where: str) -> None:
    """Refuse adapters that are not merged: the weights beside them are another model's."""
    if name := next(filter(ADAPTED.search, names), None):
        raise GrowthError(
            f"{where}: {name} is of adapters of PEFT that are not merged: load the model with "
            "them, and take what merge_and_unload() returns"
        )


def spellings(model: ModelSpec, name: str) -> list[str]:
    """The names that a tensor in a file may have in the model.

    - A head class may have been saved without the prefix of its body, or a body with it.
    - The table may say that names of the class begin otherwise in files.
    - The model may have been saved inside a wrapper, as the `model` of a module of Lightning, or as
      the text of a model with images.
    """
    bare = own_name(name)
    of_module = bare.removeprefix("model.")
    text = bare if model.family.under else IN_IMAGES.sub(r"\1", bare)
    return [name, *(n for x in (text, of_module, bare) for n in _spellings(model, x))]


def _spellings(model: ModelSpec, name: str) -> list[str]:
    classes = model.family.classes
    prefix = classes[model.class_name].prefix
    prefixes = {c.prefix for c in classes.values() if c.prefix and not prefix}
    begins = classes[model.class_name].files.items()
    renamed = (own + name.removeprefix(file) for file, own in begins if name.startswith(file))
    return [name, *renamed, prefix + name, *(name.removeprefix(p) for p in prefixes)]


# the end of a message about weights that another config describes
OTHER_CHECKPOINT = "check that config.json and the weights are of one checkpoint"


def _is_finite(tensor: Tensor) -> bool:
    # a tensor on the meta device has no values; aminmax propagates NaN, and reads 16-bit types 30
    # times as fast as isfinite
    return (
        tensor.is_meta
        or not tensor.numel()
        or bool(torch.isfinite(torch.stack(tensor.aminmax())).all())
    )


def refuse_nonfinite(name: str, tensor: Tensor) -> None:
    """Refuse NaN and Inf in a tensor, or in this part of it."""
    if _is_finite(tensor):
        return
    bad = int((~torch.isfinite(tensor)).sum())
    raise GrowthError(
        f"{name}: {bad} of {tensor.numel()} values are NaN or Inf: fix the checkpoint, or "
        "grow it as it is with allow_nonfinite=True (--allow-nonfinite)"
    )


def refuse_overflow(name: str, tensor: Tensor) -> None:
    """Refuse grown weights that are beyond the largest number of their dtype, or NaN.

    They overflow if they are converted to a narrower dtype, or if a copy gets more than the whole
    weight, as with `routing` above 1.
    """
    if _is_finite(tensor):
        return
    if bool(torch.isnan(tensor).any()):
        refuse_nonfinite(name, tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    raise GrowthError(
        f"{name}: weights are beyond {torch.finfo(tensor.dtype).max:g}, the largest number of "
        f"{dtype}: choose another dtype, or copies that are no larger than the weight (routing=1)"
    )


def check_number_of_tensors(model: ModelSpec, count: int, where: str) -> None:
    """Refuse a checkpoint with far more tensors than its model: names are compared one by one."""
    # old files name buffers in every layer, and tensors of other heads
    if count > 4 * len(model.shapes) + 1000:
        raise GrowthError(
            f"{where}: {count} tensors, but {model.class_name} has {len(model.shapes)}; is "
            "config.json that of another model?"
        )


def check_names_and_shapes(
    model: ModelSpec, shapes: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Refuse missing tensors but tied ones, unknown ones, and shapes that contradict the config."""
    expected = model.shapes
    spare = {*shapes, *model.ties, *(t.name for t in model.tensors if t.row.computed)}
    missing = [name for name in expected if name not in spare]
    if missing:
        stored: object = model.stored_names.get(missing[0])
        while isinstance(stored, tuple):
            stored = stored[0]
        named = missing[0] if stored is None else f"{missing[0]}, {stored} in files,"
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise GrowthError(
            f"{where}: tensor {named} is missing{more}: {OTHER_CHECKPOINT}, and that "
            '"architectures" names the class that was saved'
        )
    for name, shape in shapes.items():
        if name not in expected:
            raise GrowthError(
                f"{where}: no rule for tensor {name} {list(shape)}, which the class of the config "
                "does not have: load the model with transformers and save it again to leave it out"
            )
        if shape != expected[name]:
            said, fix = "its config", OTHER_CHECKPOINT
            if model.family.table is not None:
                said, fix = "its row in the table", "check that row"
            raise GrowthError(
                f"{where}: {name} has shape {list(shape)}, but {said} says "
                f"{list(expected[name])}: {fix}"
            )


def check_ties(model: ModelSpec, names: Set[str], read: Callable[[str], Tensor]) -> ModelSpec:
    """Refuse tensors with different values that the config calls tied.

    Returns the model, with heads of its own where its table lets values decide.
    """
    differ = {}
    for name, owner in model.ties.items():
        if {name, owner} <= names:
            values, others = read(name), read(owner)
            if values.data_ptr() != others.data_ptr() and not torch.equal(values, others):
                differ[name] = owner
    model = model.with_own_heads(differ)
    for name in differ.keys() - model.untied:
        raise GrowthError(
            f"{name} and {differ[name]} differ, which config.tie_word_embeddings=True "
            "makes one: set it to False where both are wanted"
        )
    return model
