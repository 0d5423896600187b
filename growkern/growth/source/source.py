"""Opens the model to grow, from memory or from a checkpoint directory, as a `Source`.

A `Source` knows the dtype of every tensor at once and reads values on demand, by the model's own
tensor names. The headers of a checkpoint are checked against the family table before any weight is
read; tensors are memory-mapped one at a time.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from growkern.errors import GrowthError, a_kind, warn
from growkern.families import ANY, Family, ModelSpec, TensorSpec, load_family, supported_families
from growkern.files import no_collections
from growkern.growth.history import History, family_in, history_in, history_of, no_weights
from growkern.growth.models import class_of, is_dtensor, refuse_flattened, unwrapped
from growkern.growth.source import live, refused
from growkern.growth.source.config import (
    check_sizes_and_activation,
    config_directory,
    read_config_file,
    read_generation,
)
from growkern.growth.source.files import HANDLED, STORED_FLOATS, refuse_eight_bits
from growkern.growth.source.formats import BARE, MODULES_FILE, Format, Stamps, format_of
from growkern.growth.source.hub import HubModel, hub_model
from growkern.growth.source.parts import Parts, dequantised, files_of, stacked
from growkern.growth.source.unknown import refuse_unknown
from growkern.growth.stored import (
    OTHER_CHECKPOINT,
    Read,
    StoredTensor,
    check_names_and_shapes,
    check_number_of_tensors,
    check_ties,
    entries_of,
    own_name,
    read_entries,
    refuse_adapted,
    refuse_nonfinite,
    spellings,
)


@dataclass(frozen=True)
class Source:
    """A trained model to grow."""

    spec: ModelSpec  # its sizes, tensors and shapes
    dtypes: Mapping[str, torch.dtype]  # of every tensor, without tied duplicates
    read: Read = field(repr=False)
    directory: Path | None = None  # None for a model in memory
    format: Format | None = None  # of `directory`
    # the tensors in its files, by name
    headers: Mapping[str, StoredTensor] = field(default_factory=dict, repr=False)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    # the `GenerationConfig` that it comes with
    generation: Any | None = field(default=None, repr=False)
    history: History = field(default_factory=History)  # the growths that made it
    # the JSON object of its config.json; empty for a model in memory
    keys: Mapping[str, Any] = field(default_factory=dict, repr=False)
    # what growth does not take over of a model in memory, one line each
    warned: tuple[str, ...] = field(default=(), repr=False)
    # of the files of `directory`, before they were read
    stamps: Stamps | None = field(default=None, repr=False)
    # the `Upcycling` (`growkern.growth.space`) of a mixture that stands for a dense model
    upcycling: Any = field(default=None, repr=False)
    needs: str = ""  # what growth needs instead, where this is enough for a plan alone
    way: str = ""  # the same of quantised weights, in a few words

    def __deepcopy__(self, memo: Any) -> Source:
        # tensors are only read: copies of a grown model share the source in its plan
        return self

    def __getstate__(self) -> dict[str, Any]:
        # a pickle leaves out tensors in memory: they are another model's
        return {**vars(self), "read": no_weights if self.directory is None else self.read}

    def refuse_changed(self, is_same: Callable[[], bool] = lambda: False) -> None:
        """Refuse files that changed since the source was opened, after they were read."""
        if self.stamps is not None:
            self.stamps.check(is_same)

    @property
    def stored(self) -> Source:
        """What files or a model in memory hold: the dense model behind a mixture, or this."""
        return self.upcycling.dense if self.upcycling else self

    @property
    def parts(self) -> Mapping[str, Parts]:
        """The tensors that are made of those of `stored`."""
        return self.upcycling.parts if self.upcycling else {}

    @property
    def files(self) -> set[str]:
        """The files that hold its tensors."""
        return set().union(*map(files_of, self.headers.values()))

    @property
    def on_hub(self) -> HubModel | None:
        """The model on the Hub that `directory` is a snapshot of."""
        return hub_model(self.directory)

    def without_second(self) -> Source:
        """What transformers reads of it: no layers that predict a second token."""
        if not self.spec.second:
            return self
        spec = self.spec.in_memory
        dtypes = {name: x for name, x in self.dtypes.items() if name in spec.shapes}
        headers = {name: x for name, x in self.headers.items() if name in spec.shapes}
        return dataclasses.replace(self, spec=spec, dtypes=dtypes, headers=headers)

    @property
    def config(self) -> Any:
        """The Hugging Face config."""
        return self.spec.config

    @property
    def class_name(self) -> str:
        """The model class in transformers."""
        return self.spec.class_name

    @property
    def dtype(self) -> torch.dtype:
        """The most common floating dtype."""
        floating = [d for d in self.dtypes.values() if d.is_floating_point]
        return max(set(floating), key=floating.count)


def open_source(
    source: Any,
    *,
    allow_nonfinite: bool = False,
    weights: bool = True,
    family: Family | None = None,
    dequantize: bool = False,
    second: bool = False,
) -> Source:
    """Open a `PreTrainedModel` or a checkpoint directory for growth.

    Files, names, shapes and values that contradict each other are refused, and a model in memory
    that computes something else than its config says.

    Args:
        allow_nonfinite: False: reading a tensor with NaN or Inf raises a GrowthError.
        weights: False: a directory may hold a config alone, or quantised weights that growth does
            not read, as a plan needs no more.
        family: a table of one's own; default: that of the growth which made the directory, or the
            package's.
        dequantize: whether a directory may hold weights in fp8 or mxfp4.
        second: whether layers of a directory that predict a second token belong to it.
    """
    refused.refuse_adapters(source, "source")
    # directories first: asking for PreTrainedModel imports the modelling code, 0.5 s
    if isinstance(source, (str, Path)):
        opened = _open_directory(Path(source), weights, family, dequantize)
    elif isinstance(source, nn.Module):
        opened = _open_model(unwrapped(source, "source"), family)
    else:
        raise GrowthError(f"source is {a_kind(source)}; expected a PreTrainedModel or a directory")
    opened = opened if second else opened.without_second()
    if allow_nonfinite:
        return opened
    return dataclasses.replace(opened, read=partial(_read_checked, opened.read, set()))


def refuse_unreadable(source: Source, *, in_memory: bool = False) -> None:
    """Refuse a source whose weights have no values here to grow, or that only files can have."""
    if in_memory and source.spec.stored:
        raise GrowthError(
            f"{source.directory}: transformers makes other tensors of {min(source.spec.stored)} "
            "when it loads them: use grow_checkpoint (growkern grow), or give the model that "
            f"{source.class_name}.from_pretrained makes"
        )
    if source.needs:
        raise GrowthError(source.needs)
    for name in source.dtypes if source.directory is None else ():
        tensor = source.read(name)
        if is_dtensor(tensor):
            raise GrowthError(
                f"{name} of the source is spread over processes: save the model with "
                "torch.distributed.checkpoint and give its directory as the source, or grow it "
                "inside a run of growkern train"
            )
        if tensor.is_meta:
            raise GrowthError(
                f"{name} of the source is on the meta device and has no values: load the model "
                f"whole with {source.class_name}.from_pretrained(...), without offloading, or give "
                "its directory as the source"
            )


# readers: functions of a module, as a grown model carries its plan, and so a reader, into a pickle


def _read_stored(
    headers: Mapping[str, StoredTensor], name: str, entries: Sequence[int] | None = None
) -> Tensor:
    return read_entries(headers[name], entries)


def _read_live(
    tensors: Mapping[str, Tensor], name: str, entries: Sequence[int] | None = None
) -> Tensor:
    return entries_of(tensors[name].detach(), entries)


def _read_checked(
    read: Read, known: set[Any], name: str, entries: Sequence[int] | None = None
) -> Tensor:
    """Refuse NaN and Inf when a tensor is read for the first time; `known` has the others."""
    tensor, key = read(name, entries), (name, tuple(entries or ()))
    if key not in known:
        refuse_nonfinite(name, tensor)
    known.add(key)
    return tensor


def _open_model(model: Any, family: Family | None) -> Source:
    refused.refuse_quantised(model.config)
    kind, plan = model.config.model_type, getattr(model, "growth_plan", None)
    if family is None and plan:
        family = plan.small.family.whole
    elif family is None and kind not in supported_families():
        refuse_unknown(kind, model.config.to_dict())
    spec = ModelSpec.of(model.config, class_of(model).__name__, family)
    for name, _ in model.named_parameters():
        refuse_flattened(name)
    live.refuse_computed(model)
    state = {own_name(name): tensor for name, tensor in model.state_dict().items()}
    where = f"{spec.class_name} in memory"
    refuse_adapted(state, where)
    spec.check_sizes(where)
    check_names_and_shapes(spec, {n: tuple(t.shape) for n, t in state.items()}, where)
    warned = live.check_live(model, spec)
    spec = check_ties(spec, state.keys(), lambda name: state[name])
    own = {name: t for name, t in state.items() if name not in spec.ties}
    for name, tensor in own.items():
        if tensor.dtype not in STORED_FLOATS:
            raise GrowthError(
                f"{name} has dtype {tensor.dtype}, as in a quantised model: "
                f"{refused.quantised_advice()} ({HANDLED})"
            )
    return Source(
        *(spec, {name: t.dtype for name, t in own.items()}, partial(_read_live, own)),
        device=next(iter(own.values())).device,
        generation=getattr(model, "generation_config", None),
        history=history_of(model),
        warned=warned,
    )


@no_collections()
def _open_directory(
    directory: Path, weights: bool, family: Family | None, dequantize: bool
) -> Source:
    stamps = Stamps.of(directory)
    beside = config_directory(directory)
    own = family or family_in(beside)
    spec, keys, block, needs, way = _read_spec(directory, own, dequantize, weights)
    format = BARE if needs else format_of(directory, weights=weights)
    if format == BARE and not needs:
        needs = refused.WITHOUT_WEIGHTS.format(directory)
    expected = _with_second(spec, None, directory)
    found_headers = dequantised(format.read(directory, expected), block, str(directory))
    for part in (keys, *(x for x in keys.values() if isinstance(x, dict))):
        for name in refused.QUANTISATION:
            part.pop(name, None)
    refuse_adapted(found_headers, str(directory))
    refuse_eight_bits(found_headers)
    spec = _with_second(spec, found_headers, directory)
    headers = stacked(spec, found_headers, str(directory))
    spec = _with_towers(spec, headers, directory)
    check_number_of_tensors(spec, len(headers), str(directory))
    if not (beside / MODULES_FILE).is_file():
        # sentence-transformers reads the body alone
        spec = _with_head(spec, headers, directory)
    names = _canonical_names(spec, headers, directory)
    _leave_out_other_heads(spec, names)
    for name, owner in spec.ties.items():
        # the files may hold a tensor under its tied name alone
        if name in names and owner not in names:
            names[owner] = names.pop(name)
    shapes = {name: headers[raw].shape for name, raw in names.items()}
    check_names_and_shapes(spec, shapes, str(directory))
    spec = check_ties(spec, names.keys(), lambda name: headers[names[name]].read())
    stored = {name: headers[raw] for name, raw in names.items() if name not in spec.ties}
    for name, header in stored.items():
        if header.dtype not in STORED_FLOATS:
            raise GrowthError(f"{header.file}: {name} has dtype {header.dtype}; {HANDLED}")
    dtypes = {name: header.dtype for name, header in stored.items()}
    return Source(
        *(spec, dtypes, partial(_read_stored, stored), directory, format, stored),
        generation=read_generation(beside, keys),
        history=history_in(beside, spec.config),
        keys=keys,
        stamps=stamps,
        needs=needs,
        way=way,
    )


def _read_spec(
    directory: Path, family: Family | None, dequantize: bool, weights: bool
) -> tuple[ModelSpec, dict[str, Any], tuple[int, ...] | None, str, str]:
    """The model that config.json describes, the JSON object of that file, and `scale_block`.

    The last two are what growth needs instead of quantised weights that it does not read, in full
    and in a few words. They are "" if it reads them; with `weights` others are refused.
    """
    config, keys = read_config_file(directory, family=family)
    family = family or load_family(config.model_type)
    block, needs, way, (method, _) = None, "", "", refused.quantisation_of(config)
    try:
        block = refused.scale_block(config, directory, dequantize=dequantize)
    except GrowthError as error:
        if dequantize and method not in refused.READ:
            known = " and ".join(refused.READ)
            why = f"dequantize=True (--dequantize) reads {known}, not {method}"
            error = GrowthError(f"{error}; {why}")
        if weights:
            raise error
        way = "from the full-precision checkpoint"
        with suppress(GrowthError):
            refused.scale_block(config, directory, dequantize=True)
            way = "with --dequantize"
        named = "quantised" if method in ("", refused.UNNAMED) else method
        needs, way = str(error), f"{named} weights; {way}"
        refused.leave_out_quantisation(config)
    if not config.architectures:
        # a class without a head would leave out the one in the files
        some_class = max(family.classes, key=lambda name: bool(family.classes[name].heads))
        raise GrowthError(
            f'{directory / "config.json"}: no "architectures": add the model class, for example '
            f'"architectures": ["{some_class}"]'
        )
    spec = ModelSpec.of(config, config.architectures[0], family)
    check_sizes_and_activation(directory / "config.json", spec)
    return spec, keys, block, needs, way


def _with_second(
    model: ModelSpec, headers: Mapping[str, StoredTensor] | None, directory: Path
) -> ModelSpec:
    """The model with the layers that predict a second token, as many as the files have.

    Without the headers of files it has as many as the config says. With a tied head they need
    another eps, which norms over inner units do not allow.
    """
    second, plain = model.family.second, model.in_memory
    is_held = model.has_tied_head and any(s.is_inner for s in model.family.spaces.values())
    if second is None or is_held or not model.family.classes[model.class_name].behind:
        return plain
    if headers is None:
        count = getattr(model.text, str(second.layers), None) or 0
        return dataclasses.replace(model, second=count * len(second.kinds))
    known, found, lacking = {own_name(raw) for raw in headers}, plain, list[TensorSpec]()
    while True:
        more = dataclasses.replace(plain, second=found.second + 1)
        own = [t for t in more.tensors if t.name not in plain.shapes]
        stored, lacks = more.stored_names, []
        for t in own:
            names = stored.get(t.name, t.name)
            parts = [names] if isinstance(names, str) else chain.from_iterable(names)
            whole = {t.name, *more.second_files((t.template,), t.layer)}
            if not known.issuperset(parts) and not known & whole:
                lacks.append(t)
        if all(t in lacks for t in own if t.layer == more.second_layers[-1]):
            break
        found, lacking = more, lacks
    # a copy of the embedding or of the head may be missing
    if lost := [t.name for t in lacking if "vocab" not in t.axes]:
        warn(f"{directory}: it lacks {lost[0]}: layers that predict a second token are left out")
        return plain
    return dataclasses.replace(found, lacking=frozenset(t.template for t in lacking))


def _with_towers(
    model: ModelSpec, headers: Mapping[str, StoredTensor], directory: Path
) -> ModelSpec:
    """The model with the towers of the files, where transformers makes others of their tensors."""
    if not any(row.as_stored for _, row, _ in model.family.rows_of(model.class_name)):
        return model
    own = {n: shape for n, shape in model.tower.items() if model.is_as_stored(n)}
    found = {}
    for raw, header in headers.items():
        if name := next(filter(model.is_as_stored, spellings(model, own_name(raw))), None):
            found[name] = header.shape
    counts = [sum(map(math.prod, shapes.values())) for shapes in (found, own)]
    if counts[0] != counts[1]:
        first = min(found or own)
        raise GrowthError(
            f"{directory}: {first} and its tower have {counts[0]} numbers in the files, but "
            f"{counts[1]} by the config: {OTHER_CHECKPOINT}"
        )
    return model if found.keys() == own.keys() else dataclasses.replace(model, stored=found)


def _canonical_names(
    model: ModelSpec, headers: Mapping[str, StoredTensor], directory: Path
) -> dict[str, str]:
    """The model's name -> the name in the file, for every stored tensor that models still read.

    Names in files, where the table does not give others, differ from the model's in five known
    ways:

    - the table says how names of the class begin in `files`;
    - the model was saved as a part of another one (`spellings`);
    - a head class was saved without the prefix of its body, or a body was saved with it;
    - norms have `gamma` and `beta`, where the model has no tensor of that name;
    - the file has buffers that models no longer store.
    """
    prefix = model.family.classes[model.class_name].prefix
    layers = str(model.size(next(iter(model.family.stacks.values()))))
    wild = {"{l}": r"\d+", "{layers}": layers, ANY: ".*"}
    parts = [re.split(r"(\{l\}|\{layers\}|\*)", name) for name in model.family.ignored]
    ignored = ["".join(wild.get(part) or re.escape(part) for part in name) for name in parts]
    names: dict[str, str] = {}
    for raw in headers:
        name = own_name(raw)
        if not model.shapes.keys() & {*spellings(model, name)}:
            name = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
        candidates = spellings(model, name)
        bare = candidates[-1] if not prefix else name.removeprefix(prefix)
        name = next((c for c in candidates if c in model.shapes), name)
        if name not in model.shapes and any(re.fullmatch(pattern, bare) for pattern in ignored):
            continue
        if name in names and name in model.shapes:
            raise GrowthError(
                f"{directory}: {names[name]} and {raw} are both {name} of {model.class_name}: "
                "remove the one that is out of date"
            )
        names[name] = raw
    return names


def _with_head(model: ModelSpec, headers: Mapping[str, StoredTensor], directory: Path) -> ModelSpec:
    """The model of the class that has all tensors in the files, if its config names a bare body.

    Refused if the files have a head, and no class of the family has all of their tensors.
    """
    family = model.family.whole
    if family.classes[model.class_name].heads:
        return model
    lost = [n for n in _canonical_names(model, headers, directory) if n not in model.shapes]
    fitting = []
    for name in (name for name, other in family.classes.items() if lost and other.heads):
        other = ModelSpec.of(model.config, name, family)
        names = _canonical_names(other, headers, directory)
        if names.keys() <= other.shapes.keys() <= names.keys() | other.ties.keys():
            return other
        fitting += [name for one in lost if one in other.shapes]
    if fitting:
        raise GrowthError(
            f'{directory}: "architectures" in config.json names {model.class_name}, which has no '
            f"{lost[0]} (and {len(lost) - 1} more that are there): name the class that was saved, "
            f'such as "{max(fitting, key=fitting.count)}"'
        )
    return model


def _leave_out_other_heads(model: ModelSpec, names: dict[str, str]) -> None:
    """Drop, with a warning, tensors of another class of the family.

    The published BERT files are an example: their config says BertForMaskedLM, but they also hold
    a pooler and a next-sentence head. transformers drops these on loading, too.
    """
    unknown, family = [name for name in names if name not in model.shapes], model.family.whole
    classes = [ModelSpec.of(model.config, name, family) for name in family.classes if unknown]
    known = {name for other in classes for name in other.shapes}
    others = [name for name in unknown if name in known]
    for name in others:
        del names[name]
    if others:
        warn(f"{model.class_name} has no {', '.join(others)}: left out of the growth")
