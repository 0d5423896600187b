"""The origin of every grown tensor and the maps between them, as stored in `lineage.json`.

Field names here are keys of that file. `record.fold` reads them to undo a growth. Maps consist of
few runs, so run lengths keep the file small:

    index    "0-11 0-5"        0, 1, ... 11, 0, 1, ... 5
    values   "1.0x12 0.5x6"    1 twelve times, 0.5 six times; a value without a count occurs once

Values read back bit for bit. A change of keys or texts needs another `FORMAT` of the lineage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from growkern.growth.plan.axes import from_next_layer
from growkern.growth.plan.blueprint import Task, affine_gain
from growkern.growth.plan.growth_plan import GrowthPlan
from growkern.growth.plan.tensors import norms
from growkern.growth.plan.tensors.experts import is_dropped
from growkern.growth.space.layout import Layer
from growkern.growth.space.spaces import Space


@dataclass(frozen=True)
class Origin:
    """Where one target tensor comes from. With the maps of its axes, it can be folded back.

    Attributes:
        source: the source tensor; "identity" or "zero" if the source has no such tensor.
        source_shape, shape: shape of the source tensor and of the target tensor.
        axes: per axis "write:SPACE", "read:SPACE" or the name of a size
            (`growkern.families.spec`).
        holds: how the target holds the source: "copies"; "block", in the leading entries of every
            space; or "" if it does not (random, 0, or a norm that only normalises).
        upper: the same tensor of the next source layer, if AKI mixes it in.
        next_layer: per axis, the target entries that come from there, as `index_text`.
        norm: the spaces that a norm reads and writes.
        offset: number that the model adds to the stored value. Growth scales the sum.
        is_gain: True for the weight of a norm, False for its bias.
    """

    source: str
    source_shape: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    holds: str = "copies"
    layer: Layer = None
    upper: str | None = None
    next_layer: tuple[str, ...] = ()
    norm: tuple[str, ...] | None = None
    factor: float = 1.0
    offset: float = 0.0
    is_gain: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        defaults = {f.name: f.default for f in fields(self) if f.default is not MISSING}
        own = asdict(self)
        return {k: v for k, v in own.items() if k not in defaults or v != defaults[k]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Origin:
        """The origin in a lineage file; ValueError or TypeError if it is damaged."""
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in data.items()
        }
        found = cls(**values)
        sizes = (*found.source_shape, *found.shape)
        texts = (found.source, *found.axes, *found.next_layer, *(found.norm or ()))
        lengths = {len(found.axes), len(found.source_shape), len(found.shape)}
        if not all(isinstance(n, int) for n in sizes) or len(lengths) != 1:
            raise ValueError(f"{found.source} has shapes {found.source_shape} and {found.shape}")
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{found.source} has axes {found.axes}")
        if found.norm is not None and len(found.norm) != 2:
            raise ValueError(f"{found.source} has norm spaces {found.norm}, expected two")
        return found


def origin_of(plan: GrowthPlan, task: Task) -> Origin:
    """The origin of one target tensor."""
    layout, options, is_norm = plan.layout, plan.options, task.tensor.norm is not None
    sizes = [plan.small.axis_size(axis) for axis in task.tensor.axes]
    copied = not options.is_baseline
    is_zero = copied and not is_norm and task.identity == "zero"
    factor = affine_gain(plan, task) if is_norm else layout.scale(task.tensor.row)
    return Origin(
        "zero" if is_zero else task.source,
        tuple(sizes),
        task.shape,
        task.tensor.axes,
        holds=_holds(plan, task),
        layer=task.source_layer,
        upper=task.upper,
        next_layer=_next_layer(plan, task),
        norm=task.tensor.norm,
        factor=factor if copied else 1.0,
        offset=plan.layout.family.norm.offset(task.tensor.is_bias) if is_norm and copied else 0.0,
        is_gain=is_norm and not task.tensor.is_bias,
    )


def _holds(plan: GrowthPlan, task: Task) -> str:
    """`Origin.holds` of a target tensor."""
    is_norm, method = task.tensor.norm is not None, plan.options.method
    if task.is_made or method == "random":
        return ""
    if method == "direct_copy":
        return "" if task.identity == "zero" and not is_norm else "block"
    is_kept = task.identity in (None, "affine") and not is_dropped(plan, task)
    return "copies" if is_kept else ""


def _next_layer(plan: GrowthPlan, task: Task) -> tuple[str, ...]:
    """`Origin.next_layer` of a target tensor."""
    if task.upper is None:
        return ()
    if task.tensor.norm is not None:
        return (index_text(norms.from_next_layer(plan, task).nonzero().flatten()),)
    result = []
    for axis in task.tensor.axes:
        role, _, names = axis.partition(":")
        pieces = [from_next_layer(plan, task, role, n) for n in names.split("|") if n]
        from_next = torch.cat(pieces) if pieces else torch.zeros(0)
        result.append(index_text(from_next.nonzero().flatten()))
    return tuple(result)


def spaces_of(plan: GrowthPlan) -> dict[str, dict[str, Any]]:
    """All spaces that the growth uses, by `space_key`, as JSON data."""
    result = {}
    for task in plan.tasks:
        axes = {name for axis in task.tensor.axes for name in axis.partition(":")[2].split("|")}
        for name in sorted(axes.union(task.tensor.norm or ()) - {""}):
            key = space_key(*plan.layout.key(name, task.source_layer))
            if key not in result:
                result[key] = space_to_dict(plan.layout.space(name, task.source_layer))
    return result


def space_key(name: str, layer: Layer) -> str:
    """The name of a space in the lineage; `layer` is None if all layers share the space."""
    return name if layer is None else f"{name}@{layer}"


def space_to_dict(space: Space) -> dict[str, Any]:
    """A space as JSON data, for the lineage."""
    return {
        "source": space.source,
        "write_index": index_text(space.write_index),
        "write": value_text(space.write),
        "read_index": index_text(space.read_index),
        "read": value_text(space.read),
        "signs": list(space.signs),
    }


def space_from_dict(data: Mapping[str, Any]) -> Space:
    """The space in a lineage file; data that is damaged raises one of `recorded.MALFORMED`."""
    indices = (read_index(data[name]) for name in ("write_index", "read_index"))
    values = (read_values(data[name]) for name in ("write", "read"))
    write_index, index = indices
    write, read = values
    if not len(write_index) == len(index) == len(write) == len(read):
        raise ValueError("maps of unequal length")
    source, signs = int(data["source"]), tuple(data["signs"])
    # indices from `source` on: one per sign, or the two rows that carry units pass through
    places = source + max(len(signs), 2)
    if len(write) and max(int(write_index.max()), int(index.max())) >= places:
        raise ValueError(f"an index beyond {places}")
    return Space(source, write_index, write, index, read, signs)


# ---------------------------------------------------------------------- texts


# more units than any space of any model has: a longer vector means a damaged file
LONGEST = 1 << 26


def index_text(index: Tensor) -> str:
    """The text of an index vector, (n,) int64, with values >= 0."""
    # value - position is constant within a run
    starts, counts = _runs(index - torch.arange(len(index)))
    firsts = index[starts].tolist()
    runs = zip(firsts, counts, strict=True)
    return " ".join(f"{a}-{a + n - 1}" if n > 1 else str(a) for a, n in runs)


def read_index(text: str) -> Tensor:
    """The index vector of a text, (n,) int64; ValueError if it is malformed."""
    ends = [run.partition("-") for run in text.split()]
    runs = [(int(first), int(last or first) + 1) for first, _, last in ends]
    _check_lengths([stop - start for start, stop in runs])
    return torch.cat([torch.empty(0, dtype=torch.int64), *(torch.arange(*run) for run in runs)])


def value_text(values: Tensor) -> str:
    """The text of a vector, (n,) float64."""
    starts, counts = _runs(values)
    runs = zip(values[starts].tolist(), counts, strict=True)
    return " ".join(f"{x!r}x{n}" if n > 1 else repr(x) for x, n in runs)


def read_values(text: str) -> Tensor:
    """The vector of a text, (n,) float64; ValueError if it is malformed."""
    runs = [run.partition("x") for run in text.split()]
    counts = [int(n or 1) for _, _, n in runs]
    _check_lengths(counts)
    values = torch.tensor([float(x) for x, _, _ in runs], dtype=torch.float64)
    return values.repeat_interleave(torch.tensor(counts, dtype=torch.int64))


def _check_lengths(lengths: list[int]) -> None:
    if min(lengths, default=1) < 1 or sum(lengths) > LONGEST:
        raise ValueError(f"runs of {min(lengths)} to {max(lengths)} numbers, {sum(lengths)} in all")


def _runs(values: Tensor) -> tuple[Tensor, list[int]]:
    """Start and length of every run of equal values."""
    counts = torch.unique_consecutive(values, return_counts=True)[1]
    return counts.cumsum(0) - counts, counts.tolist()
