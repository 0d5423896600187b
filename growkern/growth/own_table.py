"""Compares a table, drafted or of one's own, with its model, and grows a tiny one.

The names, shapes and ties of every class are those of the class in transformers, on the meta
device. The tiny model has random parameters, of norms and biases too. It grows in each size alone,
evenly and unevenly, and in all of them at once, and its outputs are compared in float64.
"""

from __future__ import annotations

import copy
import json
import math
import re
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from growkern.errors import GrowthError, GrowthWarning, nearest, reason
from growkern.families import (
    NORM_KINDS,
    Family,
    ModelSpec,
    class_faults,
    field_faults,
    growable_fields,
    read_family,
)
from growkern.growth.grow import grow
from growkern.growth.models import (
    computed_tensors,
    persistent_buffers,
    restore_buffers,
    tie,
    untrained_model,
)
from growkern.growth.outputs import Float64, all_outputs, random_inputs
from growkern.growth.plan import BY_LAYER, OUTPUT_ERROR, PLAIN_ROTARY, has_errors
from growkern.growth.record import PLANNED_ERROR, compare_outputs, measured_level, planned_error
from growkern.growth.source import Source, leave_out_quantisation, open_source, read_config
from growkern.growth.space import period_of

# of the tiny model: layers, heads and groups of them, their entries, units, ids of tokens
LAYERS, HEADS, KEY_HEADS, HEAD_DIM, UNITS, TOKENS = 2, 4, 2, 8, 24, 64
EXPERTS, CHOSEN = 8, 2
# of norms, so large that one which growth forgets shows
EPS = 1e-2
# of a config's JSON, those that are no fields, or that name stages by the number of layers
NO_FIELDS = {
    *("transformers_version", "architectures", "model_type", "dtype", "_name_or_path"),
    *("stage_names", "out_features", "out_indices"),
}
# sizes of a growth that are named one by one
MOST_NAMED = 3
# of a growth, the worst last. Refusals say nothing of a table
VERDICTS = ("refused", "exact", "approximate", "changed", "wrong")
# standard deviations of weights, and of what norms multiply by
SPREAD, GAIN = 0.3, 0.4


@dataclass(frozen=True)
class SizeCheck:
    """One growth of the tiny model."""

    sizes: str  # that grew, such as "hidden_size 32 -> 64"
    # "exact", "approximate" or "changed" as planned and measured; "wrong" if the plan is
    # contradicted; "refused"
    verdict: str
    # largest difference of outputs over the largest output
    error: float | None = None
    why: str = ""


@dataclass(frozen=True)
class TableReport:
    """Result of `check_table`."""

    # where the table differs from the model, one line each; nothing grows then
    faults: tuple[str, ...]
    growths: tuple[SizeCheck, ...]

    @property
    def verified(self) -> bool:
        """True if the table describes the model, a growth was exact, and no plan was wrong."""
        verdicts = {growth.verdict for growth in self.growths} & {"exact", "wrong"}
        return not self.faults and verdicts == {"exact"}

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {"ok": self.verified, **asdict(self)}

    @property
    def sizes(self) -> dict[str, dict[str, str]]:
        """Verdict -> the sizes for whose growths alone it is the worst one, and why."""
        growths = sorted(self.growths, key=lambda growth: VERDICTS.index(growth.verdict))
        worst = {m[1]: g for g in growths if (m := re.fullmatch(r"(\S+) \d+ -> \d+", g.sizes))}
        said = [(g.verdict, size, " ".join(g.why.split())) for size, g in worst.items()]
        return {word: {size: why for one, size, why in said if one == word} for word in VERDICTS}

    @property
    def notes(self) -> list[str]:
        """Whether the table is verified, and which sizes it grows, one line per verdict."""
        word = "verified by growing a tiny model" if self.verified else "NOT verified"
        grown = [(verdict, self.sizes[verdict]) for verdict in VERDICTS[1:-1]]
        return [word, *(f"{verdict} in: {', '.join(names)}" for verdict, names in grown if names)]

    def table(self, more: Iterable[str] = ()) -> Any:
        """The report as a rich renderable, which ends with `more`, or else with its notes."""
        if self.faults:
            # rows to paste stay whole
            return Text("\n".join(self.faults), "red", no_wrap=True, overflow="ignore")
        table = Table(title="a tiny model, grown", title_justify="left")
        for name in ("growth", "verdict", "error of outputs"):
            table.add_column(name, justify="right" if name.startswith("error") else "left")
        colors = {"exact": "green", "wrong": "red", "refused": ""}
        for check in self.growths:
            error = "" if check.error is None else f"{check.error:.1e}"
            verdict = Text(check.verdict, colors.get(check.verdict, "yellow"))
            table.add_row(check.sizes, verdict, error)
        whys = [f"{check.sizes}: {check.why}" for check in self.growths if check.why]
        return Group(table, *map(Text, (*whys, *(more or self.notes))))


def check_table(path: str | Path | Family, directory: Path) -> TableReport:
    """Compare a table with the model, or config.json alone, of a directory, and grow a tiny one.

    Raises:
        TableError: the table has faults by itself.
        GrowthError: the model cannot be read.
    """
    family = read_family(path)
    config = read_config(directory, family=family)
    leave_out_quantisation(config)
    faults = faults_of(family, config)
    if not faults:
        try:
            open_source(directory, allow_nonfinite=True, weights=False, family=family)
        except GrowthError as error:
            faults = (str(error),)
    name = (config.architectures or [next(iter(family.classes))])[0]
    return TableReport(faults, () if faults else tuple(growths_of(family, config, name)))


def check_family(family: Family, config: Any, class_name: str) -> TableReport:
    """`check_table` without files."""
    faults = faults_of(family, config)
    return TableReport(faults, () if faults else tuple(growths_of(family, config, class_name)))


def faults_of(family: Family, config: Any) -> tuple[str, ...]:
    """Where a table differs from the classes of a config, one line each."""
    own = [*class_faults(*family.classes), *field_faults(family, config)]
    if faults := own or [*_list_faults(family, config)]:
        return tuple(faults)
    specs = (ModelSpec.of(config, class_name, family) for class_name in family.classes)
    return tuple(f"{spec.class_name}: {line}" for spec in specs for line in _class_faults(spec))


def _list_faults(family: Family, config: Any) -> Iterator[str]:
    """Lists with an entry for each layer, whose length the class checks, that have no key."""
    fields, text = family.fields(config), family.text(config)
    known = {*family.per_layer, *family.conditional("in"), family.depth.in_place}
    for key in family.stacks.values():
        size = family.config[key].of(fields)
        lists = {k for k, v in text.to_dict().items() if isinstance(v, list) and len(v) == size}
        longer = {**text.to_dict(), str(family.config[key].field): size + 1}
        for name in sorted(lists - known - NO_FIELDS):
            given = {k: v for k, v in longer.items() if k not in NO_FIELDS}
            if _refuses(text, given) and not _refuses(
                text, {**given, name: [*given[name], given[name][-1]]}
            ):
                yield f'{name} has one entry per layer: add it, per_layer = ["{name}"]'


def _refuses(config: Any, fields: dict[str, Any]) -> bool:
    try:
        type(config)(**fields)
    except Exception:
        return True
    return False


def _class_faults(spec: ModelSpec) -> Iterator[str]:
    """Tensors of a class that have no row, rows without a tensor, other shapes and other ties."""
    with torch.device("meta"):
        model = untrained_model(spec)
    # some classes change a field
    spec = spec.with_config(model.config)
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    rows = {tensor.name: tensor for tensor in spec.tensors}
    seen: set[str] = set()
    for name, tensor in rows.items():
        row, found, own = f"row {tensor.row.name!r}", shapes.get(name), [*spec.shapes[name]]
        if tensor.template in seen or found == tuple(own):
            continue
        seen.add(tensor.template)
        if found is None:
            fix = f"to remove the row: {json.dumps(tensor.row.name)} = []"
            yield f"{row} gives {name}, which it lacks ({fix}){nearest(name, shapes)}"
        else:
            axes = ", ".join(tensor.axes)
            yield f"{row}, axes [{axes}], gives {own}, but {name} has {[*found]}"
    for name, shape in sorted((n, s) for n, s in shapes.items() if n not in rows):
        like = ".".join("{l}" if part.isdigit() else part for part in name.split("."))
        if like not in seen:
            seen.add(like)
            alike = re.escape(like).replace(re.escape("{l}"), r"\d+")
            is_alone = [x for x in shapes if re.fullmatch(alike, x)] == [name] != [like]
            only = f', only = "{"first" if ".0." in name else "last"}"' if is_alone else ""
            yield f"no row for {name} {[*shape]}: add {_row(spec, like, shape, only)}"
    ties = dict(getattr(model, "all_tied_weights_keys", None) or {})
    for name in {*ties} ^ {*spec.ties} if spec.shares else ():
        owner = ties.get(name)
        fix = f'add tied = "{owner}"' if owner else "remove `tied` from its row"
        yield f"{name} is {'' if owner else 'not '}tied: {fix}"


def _row(spec: ModelSpec, name: str, shape: tuple[int, ...], more: str) -> str:
    """The row of a tensor, to paste, with the first axes that are as long as its own."""
    own, axes = spec.family.classes[spec.class_name], list[str]()
    (part, *_) = own.body if name.startswith(own.prefix) or not own.heads else own.heads
    for word, length in zip(["write", *["read"] * len(shape)], shape, strict=False):
        # what a matrix reads has passed a norm
        kind = "stream" if word == "write" else "tied_output" if part in own.heads else "normed"
        spaces = sorted(spec.family.spaces.values(), key=lambda space: space.kind != kind)
        known = [*(f"{word}:{space.name}" for space in spaces), *spec.family.config]
        axes.append(next((axis for axis in known if spec.axis_size(axis) == length), "*"))
    name, keys = name.removeprefix(own.prefix), f"axes = {json.dumps(axes)}"
    if "norm" in name and axes == ["write:stream"] and "normed" in spec.family.spaces:
        name, keys = name.removesuffix(".weight"), 'norm = "stream>normed"'
    return f'to [tensors.{part}], if its axes are these: "{name}" = {{ {keys}{more} }}'


def _tiny(spec: ModelSpec, *, flat: bool = False) -> Any:
    """A model of the same kind with few units, every parameter random, float64.

    `flat`: all weights of a norm are equal, so that extra coordinates carry a mean exactly.
    """
    small = spec.with_config(_tiny_config(spec))
    model = untrained_model(small, torch.float64)
    if small.family.mixtures:
        # others take neither float64 nor every size
        model.set_experts_implementation("eager")
    randomize(model, flat=flat)
    # with other values heads of another size are refused, and wrong pairs would not be seen
    own = model.state_dict()
    for name, values in computed_tensors(small).items():
        own[name].copy_(values)
    tie(model, small)
    restore_buffers(model)
    return model.eval()


def randomize(model: Any, *, flat: bool = False) -> None:
    """Give every parameter and kept buffer of a model random values; `flat` is that of `_tiny`."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        is_gain = parameter.ndim == 1 and name.endswith("weight")
        gain = noise[0].expand_as(noise).clone() if flat and is_gain else noise
        parameter.data = 1 + GAIN * gain if is_gain else SPREAD * noise
    for _, buffer in persistent_buffers(model):
        if buffer.is_floating_point():
            buffer += SPREAD * torch.randn(buffer.shape, generator=generator, dtype=buffer.dtype)


def _tiny_config(spec: ModelSpec) -> Any:
    """The config of `spec` with few units, and with all that its class computes from sizes."""
    config, family = copy.deepcopy(spec.config), spec.family
    for key, value in _tiny_sizes(spec).items():
        if key in family.config and family.config[key].field:
            above, _, name = family.config_field(key).rpartition(".")
            owner = attrgetter(above[1:])(config) if above[1:] else family.text(config)
            if spec.size(key) != value:
                # a field without a value stays so
                setattr(owner, name, value - family.config[key].plus)
    text = family.text(config)
    for name, value in vars(text).items():
        if name.endswith("_token_id") and isinstance(value, int):
            setattr(text, name, value % TOKENS)
        if name == "max_position_embeddings" or name == family.attention.turning:
            # rounding of rotary positions counts at the last one
            most = TOKENS if name != family.attention.turning else HEAD_DIM
            setattr(text, name, min(value, most))
    is_computed = isinstance(getattr(type(text), "head_dim", None), property)
    forces = family.forces_head_dim and family.query_heads
    if forces and getattr(text, "head_dim", None) and not is_computed:
        # it has a field that the table does not let grow
        text.head_dim = HEAD_DIM
    if isinstance(family.norm.eps, str) and family.norm.placement != "post":
        setattr(text, family.norm.eps, EPS)
    small = spec.with_config(config)
    layers = small.size(next(iter(family.stacks.values())))
    for name in (*family.per_layer, *family.conditional("in")):
        # Longformer also takes one number for all layers
        if isinstance(values := getattr(text, name, None), list):
            is_list = name in family.per_layer
            setattr(text, name, values[:layers] if is_list else [i for i in values if i < layers])
    if own := text.to_dict().get(BY_LAYER):
        text.per_layer_config = {i: value for i, value in own.items() if int(i) < layers}
    for name in family.conditional("from"):
        # layers of both kinds
        setattr(text, name, min(getattr(text, name) or 0, 1))
    for name in family.conditional("last"):
        # a layer of each kind before them
        most = layers - _layers_of_all_kinds(small)
        setattr(text, name, max(0, min(getattr(text, name) or 0, most)))
    if rope := getattr(text, "rope_parameters", None):
        whole = family.attention.divisor
        if whole is not None and "partial_rotary_factor" in rope:
            # Mistral 4 reads the share of a head that turns, but not with plain positions
            rope["partial_rotary_factor"] = small.turning / small.size(whole)
        else:
            text.rope_parameters = plain_rotary(rope, small.turning // 2)
    small.repeat(config)
    return _made_again(config)


def _tiny_sizes(spec: ModelSpec) -> dict[str, int]:
    family, stacks = spec.family, spec.family.stacks.values()
    grouped = "kv_heads" in family.config and spec.size("kv_heads") < spec.size("q_heads")
    period = _layers_of_all_kinds(spec)
    lasts = (getattr(spec.text, name) or 0 for name in family.conditional("last"))
    layers = max(LAYERS, period + min(period, max(lasts, default=0)))
    # the class computes how many entries heads have together from the stream
    bound = {s.size for s in family.spaces.values() if s.activated} if _followers(family) else set()
    sizes = {k: min(spec.size(k), UNITS) for k in family.unit_sizes if k not in bound}
    sizes |= dict.fromkeys(family.query_heads, HEADS)
    sizes |= {"stream": _tiny_stream(spec), "vocab": TOKENS}
    if "head_dim" in family.config:
        # the indexer of DeepSeek-V3.2 has no smaller heads
        sizes["head_dim"] = min(spec.size("head_dim"), HEAD_DIM)
    sizes["kv_heads"] = KEY_HEADS if grouped else HEADS
    sizes |= {key: min(spec.size(key), layers) for key in stacks}
    named = {own.field: key for key, own in family.config.items() if own.field}
    for key in _followers(family):
        sizes[key] = spec.size(key) * sizes["stream"] // spec.size("stream")
    for own in family.config.values():
        if own.factors[1:2] == ("/",):
            whole, part = (named.get(field) for field in own.factors[::2])
            if whole in sizes and part in sizes:
                sizes[part] = math.gcd(sizes[whole], sizes[part])
    for space in family.mixtures:
        sizes |= {key: min(spec.size(key), n) for key, n in zip(space.groups, (2, 1), strict=False)}
        sizes[str(space.size)] = min(spec.size(str(space.size)), EXPERTS)
        sizes[str(space.chosen)] = min(spec.size(str(space.chosen)), CHOSEN)
    return sizes


def _followers(family: Family) -> list[str]:
    """The sizes of units whose entries a class computes from the stream."""
    return [key for key, own in family.config.items() if own.follows == "stream"]


def _tiny_stream(spec: ModelSpec) -> int:
    """A size of the stream that keeps the ratio to `_followers`."""
    stream = spec.size("stream")
    steps = (stream // math.gcd(stream, spec.size(key)) for key in _followers(spec.family))
    return math.lcm(HEADS * HEAD_DIM, *steps)


def _layers_of_all_kinds(spec: ModelSpec) -> int:
    """How many of the first layers have every kind that the model has."""
    values = (getattr(spec.text, name, None) for name in spec.family.per_layer)
    lists = (x for x in values if isinstance(x, list))
    return max(period_of(spec), *(x.index(kind) + 1 for x in lists for kind in x), 1)


def plain_rotary(rope: dict[str, Any], pairs: int = 0) -> dict[str, Any]:
    """Rotary positions that fit few entries, of which `pairs` turn, and that growth may change."""
    if "rope_type" not in rope:
        return {kind: plain_rotary(one, pairs) if one else one for kind, one in rope.items()}
    if rope["rope_type"] not in PLAIN_ROTARY:
        rope = {**rope, "rope_type": "default"}
    if sections := rope.get("mrope_section"):
        some = [max(1, pairs * n // sum(sections)) for n in sections[1:]]
        rope = {**rope, "mrope_section": [pairs - sum(some), *some]}
    return rope


def _made_again(config: Any) -> Any:
    """The config as its class makes it from its fields, so that what follows from them follows."""
    known = {"tie_word_embeddings", *(f.name for f in fields(config))}
    given = {k: v for k, v in config.to_dict().items() if k not in NO_FIELDS}
    parts = {k: getattr(config, k, None) for k in type(config).sub_configs}
    given |= {k: _made_again(part) for k, part in parts.items() if part is not None}
    try:
        made = type(config)(**{k: v for k, v in given.items() if k in known})
    except Exception:
        # of any type: the class says the same when the model is built
        return config
    for name in given.keys() - vars(made).keys():
        # the class knows nothing of it
        setattr(made, name, given[name])
    made.architectures, made.dtype = config.architectures, config.dtype
    return made


class NormFacts(NamedTuple):
    """What a norm computes."""

    kind: str
    plus_one: bool
    eps: float


@torch.no_grad()
def norm_facts(module: Any, length: int) -> NormFacts | None:
    """What a norm computes, found by feeding it a row of random numbers; None: it is no norm.

    Raises:
        GrowthError: it computes what no kind of norm does.
    """
    if not re.search("norm", type(module).__name__, re.I) or any(True for _ in module.children()):
        return None
    found = {name: getattr(module, name, None) for name in ("weight", "bias")}
    gains = {name: p for name, p in found.items() if torch.is_tensor(p)}
    if any(p.ndim != 1 for p in gains.values()):
        return None
    shape, rng = gains["weight"].shape if gains else (length,), torch.Generator().manual_seed(0)
    x = 2 + torch.randn(1, 1, *shape, dtype=torch.float64, generator=rng)
    try:
        with Float64():
            y = module(x).double()
    except Exception:
        # norms that take a gate, or heads one by one, raise errors of any type
        return None
    eps = [v for k, v in vars(module).items() if "eps" in k and isinstance(v, float)]
    for kind, plus_one in product(NORM_KINDS, (False, True)):
        centred = x - x.mean() if NORM_KINDS[kind].centres else x
        expected = centred / centred.square().mean().sqrt()
        expected = expected * (plus_one + gains.get("weight", 1)) + gains.get("bias", 0)
        is_like = NORM_KINDS[kind].tensors == tuple(gains)
        if is_like and torch.allclose(y, expected, rtol=1e-2, atol=1e-2):
            return NormFacts(kind, plus_one, eps[0] if eps else 1e-5)
    has = " and ".join(gains) or "no weight"
    raise GrowthError(
        f"{type(module).__name__}, with {has}, computes none of {', '.join(NORM_KINDS)}"
    )


def _norm_faults(model: Any, spec: ModelSpec) -> Iterator[str]:
    """Norms that compute something else than [norm] says."""
    norm, rows = spec.family.norm, {t.template: t.name for t in spec.tensors if t.norm}
    said = norm.centres, norm.plus_one
    for weight in (name for name in rows.values() if name.endswith(".weight")):
        name = weight.removesuffix(".weight")
        try:
            facts = norm_facts(model.get_submodule(name), spec.shapes[weight][-1])
        except GrowthError as error:
            yield f"norm: {name}: {error}"
            continue
        if facts and (NORM_KINDS[facts.kind].centres, facts.plus_one) != said:
            computed = f"{facts.kind}{', plus_one' if facts.plus_one else ''}"
            yield f"norm: {name} computes a {computed}: mend [norm]"


def growths_of(
    family: Family, config: Any, class_name: str, names: Collection[str] = ("",)
) -> Iterator[SizeCheck]:
    """Every size alone, evenly and unevenly, and all that may grow at once.

    Other classes grow in the hidden size alone. Growths begin with one of these names.
    """
    spec, begins = ModelSpec.of(config, class_name, family), tuple(names)
    models = [_tiny(spec)]
    source = open_source(models[0], family=family)
    small, together = source.spec, dict[str, int]()
    if faults := [*_norm_faults(models[0], small)]:
        yield from (SizeCheck("the norms", "wrong", why=fault) for fault in faults)
        return
    if why := _failure(models[0], source):
        yield SizeCheck("the model", "wrong", why=why)
        return
    for sizes in _sizes_to_grow(small):
        if not _named(small, sizes).startswith(begins):
            continue
        check = _growth(models[0], family, sizes)
        if check.verdict == "changed":
            # a change of the head, or by norms whose weights differ, hides any other
            if len(models) == 1:
                models += _without_changes(spec, family)
            others = (_growth(model, family, sizes) for model in models[1:])
            check = next((c for c in others if c.verdict != "changed"), check)
        if check.verdict in ("exact", "approximate") and len(sizes) == 1:
            together = sizes | together
        yield check
    if len(together) > 1 and _named(small, together).startswith(begins):
        yield _growth(models[0], family, together)
    stream = family.config_field("stream")
    if stream in growable_fields(small.family):
        sizes = {stream: small.size("stream") * 3 // 2}
        for name in family.classes:
            if name != class_name and f"{name}: {_named(small, sizes)}".startswith(begins):
                yield from _of_other_class(spec, name, family, sizes)


def _of_other_class(
    spec: ModelSpec, name: str, family: Family, sizes: dict[str, int]
) -> Iterator[SizeCheck]:
    try:
        model = _tiny(ModelSpec.of(spec.config, name, family))
    except GrowthError:
        # this config does not fit the class, as its refusal says
        return
    source = open_source(model, family=family)
    if why := _failure(model, source):
        # question answering of Longformer wants a question
        yield SizeCheck(f"{name}: {_named(source.spec, sizes)}", "refused", why=why)
        return
    check = _growth(model, family, sizes)
    if check.verdict == "changed":
        check = _growth(model, family, {field: size // 3 * 4 for field, size in sizes.items()})
    yield replace(check, sizes=f"{name}: {check.sizes}")


def _failure(model: Any, source: Source) -> str:
    """Why a model cannot run on random tokens, so that no outputs can be compared; "": it can."""
    try:
        with Float64():
            # BigBird changes itself when it runs on few tokens
            all_outputs(copy.deepcopy(model), random_inputs(source))
    except Exception as error:
        # of any type: classes of transformers raise them
        return f"{type(model).__name__} does not run on random tokens: {reason(error)}"
    return ""


def _named(small: ModelSpec, sizes: dict[str, int]) -> str:
    fields = growable_fields(small.family)
    old = {field: small.size(fields[field]) for field in sizes}
    each = [f"{f} {old[f]} -> {n}" if old[f] != n else f"{f} {n}" for f, n in sizes.items()]
    return ", ".join(each) if len(each) <= MOST_NAMED else f"{len(each)} sizes at once"


def _sizes_to_grow(small: ModelSpec) -> Iterator[dict[str, int]]:
    family = small.family
    # the experts that a token takes, and their groups, grow with the experts
    follow = {str(key) for space in family.mixtures for key in (space.chosen, *space.groups)}
    for field, key in growable_fields(family).items():
        if key in follow or (key in family.query_heads and family.forces_head_dim):
            # heads follow the hidden size
            continue
        size, is_depth = small.size(key), key in family.stacks.values()
        if not size:
            # this config has none
            continue
        for new in (size + 1,) if is_depth else (2 * size, size + size // 2):
            yield {field: new}
            if key == "stream" and family.forces_head_dim:
                # heads get more entries in place of more heads
                kept = {*family.query_heads, *({"kv_heads"} & family.config.keys())}
                fields = (k for k in kept if k in family.growable)
                yield {field: new, **{family.config_field(k): small.size(k) for k in fields}}


def _without_changes(spec: ModelSpec, family: Family) -> Iterator[Any]:
    """Models whose growths change less: of equal weights in norms, and of a body alone."""
    yield _tiny(spec, flat=True)
    body = next((name for name, c in family.classes.items() if not c.heads), None)
    if body is not None and body != spec.class_name:
        yield _tiny(ModelSpec.of(spec.config, body, family), flat=True)


def _growth(model: Any, family: Family, sizes: dict[str, int]) -> SizeCheck:
    model = copy.deepcopy(model)
    source = open_source(model, family=family)
    named = _named(source.spec, sizes)
    try:
        with warnings.catch_warnings():
            # the verdict says it
            warnings.simplefilter("ignore", GrowthWarning)
            how: Any = {"family": family, **sizes}
            grown: Any = grow(model, **how)
    except GrowthError as error:
        return SizeCheck(named, "refused", why=str(error))
    except Exception as error:
        return SizeCheck(named, "wrong", why=f"growth fails: {reason(error)}")
    try:
        with Float64():
            plan, tokens = grown.growth_plan, random_inputs(source)
            outputs = compare_outputs(plan, model, grown, tokens, generates=False)
            if has_errors(plan):
                outputs[PLANNED_ERROR] = planned_error(plan, model, tokens)
    except Exception as error:
        # a wrong table makes models that transformers cannot run, with errors of any type
        return SizeCheck(named, "wrong", why=f"the grown model does not run: {reason(error)}")
    level, contradiction = measured_level(plan, outputs, torch.float64)
    # a change that the plan names is none
    changes = [f.why for f in plan.findings if f.level == "changed"]
    verdict = "wrong" if contradiction and not changes else level
    return SizeCheck(named, verdict, outputs[OUTPUT_ERROR], "; ".join(changes) or contradiction)
