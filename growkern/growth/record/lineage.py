"""Writes and reads `lineage.json`, the record of how a grown checkpoint was made.

`growkern.verify` and the next growth work from this file. It holds both configs,
the options and seeds, all maps and shares (key `maps`), and the origin of each tensor (key
`tensors`, see `origin_of`). Maps consist of few runs, so run lengths keep the file
small:

    index    "0-11 0-5"        0, 1, ... 11, 0, 1, ... 5
    values   "1.0x12 0.5x6"    1 twelve times, 0.5 six times; a value without a count occurs once

Values read back bit for bit. The keys and texts are a file format: a change of them needs another
`FORMAT`.

Plans are made of a record with the source, or of the record alone: the optimizer of a grown model
needs the maps of the growth, but neither the source nor its weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import safetensors
import torch
import transformers
from huggingface_hub import ModelCard
from torch import Tensor, nn

from growkern.arguments import Limit, between, check_fields, check_kind
from growkern.errors import GrowthError, a_kind, reason
from growkern.families import Family, ModelSpec, growable_fields, value_of
from growkern.files import check_format, read_json, text_of
from growkern.growth import history
from growkern.growth.history import (
    CARD_FILE,
    EARLIER,
    LINEAGE_FILE,
    MOST_LINEAGE_BYTES,
    NEEDED,
    TABLE_KEY,
    History,
    has_record,
    history_from,
)
from growkern.growth.options import GrowthOptions
from growkern.growth.plan import GrowthPlan, Task, kind_of, plan_growth
from growkern.growth.source import (
    Source,
    checked_config,
    config_directory,
    name_of,
    read_config,
)
from growkern.growth.space import class_that_became, upcycled
from growkern.ops.expand import DTYPES as GROWN_DTYPES
from growkern.package import version

if TYPE_CHECKING:
    from growkern.growth.disk import ShardLayout

CARD = "source_card"
TABLES = ("options", "settings", "sizes", "maps", "tensors", "versions", CARD)
# what the source's card says that is true of the grown model too
KEPT = ("license", "license_name", "license_link", "language", "datasets", "tags", "pipeline_tag")
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)


# the entries of most origins, which are not written
USUAL = {
    # how the target holds the source: "copies"; "block", in the leading entries of every space; or
    # "" if it does not (random, 0, or a norm that only normalises)
    "holds": "copies",
    "layer": None,
    "upper": None,  # the same tensor of the next source layer, if AKI mixes it in
    "norm": None,  # the spaces that a norm reads and writes
    "factor": 1.0,
    "offset": 0.0,  # that the model adds to the stored value. Growth scales the sum
    "is_gain": False,  # the weight of a norm; False for its bias
}


def origin_of(plan: GrowthPlan, task: Task) -> dict[str, Any]:
    """Where a target tensor comes from. With the maps of its axes, its inverse undoes it."""
    kind, tensor = kind_of(plan, task), task.tensor
    known = {
        # the source tensor; "identity" or "zero" if the source has no such tensor
        "source": kind.source,
        "source_shape": tuple(plan.small.axis_size(axis) for axis in tensor.axes),
        "shape": task.shape,
        # each "write:SPACE", "read:SPACE" or the name of a size (`growkern.families.spec`)
        "axes": tensor.axes,
        "holds": kind.holds,
        "layer": task.source_layer,
        "upper": task.upper,
        "norm": tensor.norm,
        "factor": kind.factor,
        "offset": kind.offset,
        "is_gain": tensor.norm is not None and not tensor.is_bias,
    }
    return {k: x for k, x in known.items() if k not in USUAL or x != USUAL[k]}


def spaces_of(plan: GrowthPlan) -> dict[str, dict[str, Any]]:
    """All spaces that the growth uses as JSON data, by their names, as NAME@LAYER in some."""
    result = {}
    for task in plan.tasks:
        axes = {name for axis in task.tensor.axes for name in axis.partition(":")[2].split("|")}
        for name in sorted(axes.union(task.tensor.norm or ()) - {""}):
            _, layer = plan.layout.key(name, task.source_layer)
            key = name if layer is None else f"{name}@{layer}"
            if key not in result:
                space = plan.layout.space(name, task.source_layer)
                result[key] = {
                    "source": space.source,
                    "write_index": index_text(space.write_index),
                    "write": value_text(space.write),
                    "read_index": index_text(space.read_index),
                    "read": value_text(space.read),
                    "signs": list(space.signs),
                }
    return result


# ---------------------------------------------------------------------- texts


def index_text(index: Tensor) -> str:
    """The text of an index vector, (n,) int64, with values >= 0."""
    # value - position is constant within a run
    starts, counts = _runs(index - torch.arange(len(index)))
    runs = zip(index[starts].tolist(), counts, strict=True)
    return " ".join(f"{a}-{a + n - 1}" if n > 1 else str(a) for a, n in runs)


def value_text(values: Tensor) -> str:
    """The text of a vector, (n,) float64."""
    starts, counts = _runs(values)
    runs = zip(values[starts].tolist(), counts, strict=True)
    return " ".join(f"{x!r}x{n}" if n > 1 else repr(x) for x, n in runs)


def _runs(values: Tensor) -> tuple[Tensor, list[int]]:
    """Start and length of every run of equal values."""
    counts = torch.unique_consecutive(values, return_counts=True)[1]
    return counts.cumsum(0) - counts, counts.tolist()


DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in GROWN_DTYPES}

# of the file
FORMAT = 1
# the key of a record whose weights were trained or changed after the growth
TRAINED = "trained_since"
# the key with the config of a dense model that became a mixture
DENSE = "dense_config"
# where there is a record, for messages
RECORD = f"a grown checkpoint, or its {LINEAGE_FILE}"


@dataclass(frozen=True)
class GrowthSettings:
    """Settings besides the plan that decide the bytes of a grown checkpoint."""

    backend: str | None = None  # of the expansion kernel; None: chosen automatically
    max_shard_size: int = 5 * 10**9
    allow_nonfinite: bool = False  # NaN and Inf in the source are grown, not refused

    LIMITS: ClassVar[dict[str, Limit]] = {"max_shard_size": between(1, (1 << 63) - 1)}

    def __post_init__(self) -> None:
        check_fields(self)


def versions() -> dict[str, str]:
    """Versions of the packages that a growth's bytes depend on."""
    modules = (torch, transformers, safetensors)
    return {"growkern": version(), **{m.__name__: m.__version__ for m in modules}}


def source_files(source: Source) -> dict[str, dict[str, Any]]:
    """Size, time and header checksum of the source's files, to notice changes.

    Weights are not read. A model in memory has no files.
    """
    result: dict[str, dict[str, Any]] = {}
    if source.format is None:
        return result
    for name in sorted(source.files):
        file = Path(name)
        result[file.name] = {
            "size": file.stat().st_size,
            "modified": file.stat().st_mtime_ns,
            "header": hashlib.sha256(source.format.read_header(file)).hexdigest(),
        }
    return result


def identity(plan: GrowthPlan, layout: ShardLayout, settings: GrowthSettings) -> dict[str, Any]:
    """Everything that decides a growth's bytes. Runs with equal identities write equal files.

    The resume journal stores it, so that only the same growth resumes.
    """
    heads = {name: hashlib.sha256(head).hexdigest() for name, head in layout.heads.items()}
    return {
        # findings decide no byte, and a bound that is measured differs between kinds of CPUs
        **plan.summary(),
        "target config": config_dict(plan.large.config),
        "source": source_files(plan.source),
        "input": plan.source.stamps.identity() if plan.source.stamps else {},
        "backend": settings.backend or "",
        "max_shard_size": settings.max_shard_size,
        "files": {n: {"size": layout.sizes[n], "header": head} for n, head in heads.items()},
    }


def config_dict(config: Any) -> dict[str, Any]:
    """A whole config as JSON data, without the path that it was read from."""
    result = json.loads(config.to_json_string(use_diff=False))
    result.pop("_name_or_path", None)
    return dict(result)


def record_of(plan: GrowthPlan) -> dict[str, Any]:
    """The part of `lineage.json` that follows from the plan, as JSON data."""
    record = {
        # findings may need weights, which a plan of a record does not have
        **(plan.to_dict() if "findings" in vars(plan) else plan.summary()),
        **({} if (table := plan.small.family.table) is None else {TABLE_KEY: table}),
        "source_config": config_dict(plan.small.config),
        **({DENSE: config_dict(plan.source.stored.config)} if plan.upcycling else {}),
        "target_config": config_dict(plan.large.config),
        "source_dtype": str(plan.source.dtype).removeprefix("torch."),
        "maps": spaces_of(plan),
        "tensors": {task.name: origin_of(plan, task) for task in plan.tasks},
    }
    return dict(json.loads(json.dumps(record)))


def lineage_text(
    plan: GrowthPlan, settings: GrowthSettings, files: Mapping[str, Any], *, trained: bool = False
) -> str:
    """`lineage.json` of a grown checkpoint. It does not depend on where directories are.

    `files` are `source_files` before the growth. `trained` says that the weights changed since.
    """
    source, on_hub = plan.source.directory, plan.source.on_hub
    lineage = {
        "format": FORMAT,
        **record_of(plan),
        "settings": vars(settings),
        "versions": versions(),
        "source": name_of(source) if source else "",
        **({"source_commit": on_hub.commit} if on_hub else {}),
        **({CARD: card} if (card := card_of(source)) else {}),
        "source_files": without_times(files),
        EARLIER: records_in(plan.source.history),
        **({TRAINED: True} if trained else {}),
    }
    return json.dumps(lineage, indent=1, ensure_ascii=False) + "\n"


def card_of(directory: Path | None) -> dict[str, Any]:
    """What the card of the source says of the grown model too."""
    text = text_of(directory / CARD_FILE) if directory else ""
    # huggingface_hub warns of a card without metadata, which is nothing to warn of here
    if not text.lstrip().startswith("---"):
        return {}
    try:
        data = ModelCard(text, ignore_metadata_errors=True).data
    except Exception:
        # a card is free text: one that nobody can read says nothing
        return {}
    return kept_of_card(data.to_dict())


def kept_of_card(data: Mapping[str, Any]) -> dict[str, Any]:
    """The texts of a card's metadata that are kept."""
    return {name: texts for name in KEPT if (texts := _texts(data.get(name)))}


def _texts(value: Any) -> str | list[str]:
    """A text or a list of texts; other values of a list are left out, and others are empty."""
    if isinstance(value, list):
        return [text for text in map(_texts, value) if isinstance(text, str) and text]
    # half of a surrogate pair, which YAML can spell, cannot be written
    is_text = isinstance(value, str) and value == value.encode(errors="ignore").decode()
    return value if is_text else ""


def records_in(history: History) -> list[Any]:
    """The records of the growths in a history, the latest first; None for one that is lost."""
    if history.plan is None:
        return [record if isinstance(record, dict) else None for record in history.records]
    text = lineage_text(history.plan, GrowthSettings(), {}, trained=True)
    return [*history_from(Path(LINEAGE_FILE), json.loads(text)).records]


def keep_lineage(history: History, directory: Path) -> None:
    """Write the record of the growths of a model that may have been trained since, if it is known.

    A record that is in the directory stays.
    """
    last, *earlier = records_in(history) or [None]
    if isinstance(last, dict) and not (directory / LINEAGE_FILE).exists():
        data = {**last, TRAINED: True, EARLIER: earlier}
        write_lineage(json.dumps(data, indent=1, ensure_ascii=False) + "\n", directory)


def write_lineage(text: str, directory: Path) -> None:
    """Write the text of `lineage_text` into a grown checkpoint."""
    (directory / LINEAGE_FILE).write_text(text, encoding="utf-8")


def without_times(files: Mapping[str, Any]) -> dict[str, Any]:
    """`source_files` as it is stored: copying a source changes the times of its files."""
    return {name: {k: v for k, v in f.items() if k != "modified"} for name, f in files.items()}


@dataclass(frozen=True)
class Lineage:
    """A lineage file.

    If a dense model became a mixture, `source_config` shows it as a mixture of one copy.
    """

    file: Path
    data: Mapping[str, Any]
    options: GrowthOptions
    settings: GrowthSettings
    sizes: Mapping[str, tuple[int, int]]  # config field -> (source, target)
    dtype: torch.dtype  # of the target's weights
    source_dtype: torch.dtype
    source_config: Any
    target_config: Any
    earlier: History  # the growths that made the source
    family: Family | None = None  # the table of one's own that the growth used
    dense_config: Any = None

    def shown(self, source: Source) -> Source:
        """The source as the growth counts it: a dense model as a mixture of one copy."""
        is_dense = self.dense_config is not None
        return upcycled(source, self.source_config, self.options) if is_dense else source


def read_lineage(path: Path) -> Lineage:
    """Read a lineage file, or that of a grown checkpoint's directory."""
    file = path / LINEAGE_FILE if path.is_dir() else path
    if not file.is_file():
        raise GrowthError(f"{path}: no {LINEAGE_FILE}: give {RECORD}")
    try:
        data = read_json(file, MOST_LINEAGE_BYTES, "lineage")
    except GrowthError as error:
        raise _no_record(file, str(error).removeprefix(f"{file}: ")) from error
    return lineage_of(file, data)


def lineage_of(file: Path, data: dict[str, Any]) -> Lineage:
    """A lineage from the content of its file."""
    check_format(file, data, FORMAT, NEEDED)
    try:
        if missing := [name for name in NEEDED if name not in data]:
            raise ValueError(f"it has no {missing[0]!r}")
        for name in TABLES:
            if not isinstance(data.get(name, {}), dict):
                raise ValueError(f"{name} is {a_kind(data[name])}")
        family = history.family_from(file, data)
        tensors = len(data["tensors"])
        return Lineage(
            file,
            data,
            GrowthOptions(**data["options"]),
            GrowthSettings(**data["settings"]),
            {name: (old, new) for name, (old, new) in data["sizes"].items()},
            DTYPES[data["dtype"]],
            DTYPES[data["source_dtype"]],
            checked_config(file, data["source_config"], tensors, family),
            checked_config(file, data["target_config"], tensors, family),
            History(records=history.history_from(file, data).records[1:]),
            family,
            checked_config(file, data[DENSE], tensors) if DENSE in data else None,
        )
    except GrowthError as error:
        raise _no_record(file, str(error).removeprefix(f"{file}: ")) from error
    except MALFORMED as error:
        raise _no_record(file, reason(error)[:200]) from error


def _no_record(file: Path, why: str) -> GrowthError:
    return GrowthError(f"{file}: not a growth record: {why}: give {RECORD}")


def other_source(source: Source, lineage: Lineage) -> str:
    """Names the source in a record, if the directory of this one has another name."""
    name, given = lineage.data.get("source"), source.directory
    if not isinstance(name, str) or not name or given is None or name == name_of(given):
        return ""
    beside = lineage.file.parent.parent / name
    return f"{lineage.file}: grown from {beside if beside.is_dir() else name}, not from {given}"


def plan_from_lineage(source: Source, lineage: Lineage) -> GrowthPlan:
    """Make the plan of a lineage again, for this source."""
    before = lineage.dense_config
    try:
        keys = growable_fields(source.spec.family)
        for name, (size, _) in lineage.sizes.items():
            if before is None and name in keys and source.spec.size(keys[name]) == size:
                # also where a flag narrows what the field says
                continue
            own = size if before is None else getattr(before, name, None)
            has = value_of(source.spec.text, name, None)
            # a field may have the size once for each layer
            if has not in (own, None) and not (isinstance(has, list) and {*has} == {own}):
                raise GrowthError(
                    f"{lineage.file}: made from a model with {name}={own}, this source has {has}"
                )
        shown = lineage.shown(source)
        return plan_growth(shown, lineage.options, {}, lineage.target_config, lineage.dtype)
    except GrowthError as error:
        if other := other_source(source, lineage):
            why = str(error).removeprefix(f"{lineage.file}: ")
            raise GrowthError(f"{other}: give that. It does not fit this one: {why}") from error
        raise


# --------------------------------------------------------- without the source


def growth_plan_of(model: Any) -> GrowthPlan | None:
    """The plan by which a model was grown, or None if it was not grown.

    Args:
        model: from `growkern.grow` or `growkern.grow_into`; or loaded by `from_pretrained` from a
            directory that growkern wrote; or the path of such a directory.

    Raises:
        GrowthError: it is neither; the record of its growth is missing or damaged; or there is no
            such directory.
    """
    plan = getattr(model, "growth_plan", None)
    if plan is not None:
        return plan
    check_kind("model", model, (str, Path, nn.Module), "a model, or the path of its directory")
    is_path = isinstance(model, str | Path)
    directory = config_directory(Path(model)) if is_path else history.directory_of(model)
    if directory is not None and has_record(directory):
        return recorded_plan(read_lineage(directory))
    # a model without a directory, such as a pair of grown ones, never had a record of its own
    if directory is not None:
        config = read_config(directory) if is_path else model.config
        if lost := history.history_in(directory, config).lost:
            raise GrowthError(lost)
    return None


def plan_of_source(plan: GrowthPlan) -> GrowthPlan | None:
    """The plan by which the source of a growth was grown itself; None if it was not."""
    known = plan.source.history
    earlier = known.plan
    if known.records:
        record = known.records[0]
        if isinstance(record, str):
            raise GrowthError(record)
        file = (plan.source.directory or Path()) / LINEAGE_FILE
        before = History(records=known.records[1:])
        earlier = recorded_plan(replace(lineage_of(file, record), earlier=before))
    if earlier is None:
        return None
    if earlier.large.shapes != plan.small.shapes:
        raise GrowthError(f"the {plan.small.class_name} is not as its growth made it")
    # the steps of random weights follow no source
    return None if earlier.options.is_baseline else earlier


def unknown_growth(plan: GrowthPlan) -> str:
    """What the optimizer lacks, if a growth before this one is not known; "" if all are."""
    earlier: GrowthPlan | None = plan
    try:
        while earlier is not None:
            earlier = plan_of_source(earlier)
    except GrowthError as error:
        return history.forgotten(str(error))
    return ""


def misfit(plan: GrowthPlan, model: Any) -> str | None:
    """The first parameter that is not as growth made it: layers or tokens may have been added."""
    shapes, named = plan.large.shapes, model.named_parameters()
    return next((name for name, p in named if tuple(p.shape) != shapes.get(name)), None)


def recorded_plan(lineage: Lineage) -> GrowthPlan:
    """The plan of a lineage, made without the source. Its findings cannot be asked for."""
    name = lineage.data.get("model_class")
    small = ModelSpec.of(lineage.source_config, str(name), lineage.family)
    if (config := lineage.dense_config) is not None:
        small = ModelSpec.of(config, class_that_became(config, small))
    small = small.with_own_heads(lineage.data["tensors"])
    dtypes = {name: lineage.source_dtype for name in small.shapes if name not in small.ties}

    def read(name: str) -> Tensor:
        raise GrowthError(f"{lineage.file} has no weights: {name} is in the source")

    source = lineage.shown(Source(small, dtypes, read, history=lineage.earlier))
    plan = plan_growth(
        source, lineage.options, {}, lineage.target_config, lineage.dtype, judged=False
    )
    if spaces_of(plan) != lineage.data.get("maps"):
        raise GrowthError(
            f"{lineage.file}: this version of growkern draws other maps than the one that grew the "
            "model"
        )
    return plan
