"""One model family, as its table describes it: everything that is the same for all its models.

`growkern.families.model` adds a config and a class, and so sizes and tensors. Everything that
growth must know about a kind of norm is a field of `NormKind`. Other modules ask for such a field
and never compare the names of kinds. A new kind is a new entry of `NORM_KINDS`.
"""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, ClassVar

from growkern.errors import GrowthError, UnfitError, nearest
from growkern.families.spec import (
    Attention,
    Dense,
    Depth,
    ModelClass,
    OlderKey,
    Refusal,
    Row,
    Second,
    Size,
    SpaceSpec,
    condition_of,
    holds,
    is_met,
    value_of,
)


@dataclass(frozen=True)
class Nested:
    """The fields of a config within another: those of the inner one, and `.field` of the whole."""

    inner: Any
    whole: Any

    def __getattr__(self, name: str) -> Any:
        return attrgetter(name[1:])(self.whole) if name[0] == "." else getattr(self.inner, name)


@dataclass(frozen=True)
class NormKind:
    """The facts about one kind of norm, y = gamma (x - m) / sqrt(v + eps) + beta.

    Attributes:
        centres: True if m is the mean of x and v its variance. False if m is 0 and v the mean
            square of x.
        tensors: last part of the names of gamma and beta. Without one of them it is 1, or 0.
    """

    centres: bool
    tensors: tuple[str, ...]


NORM_KINDS = {
    "layernorm": NormKind(centres=True, tensors=("weight", "bias")),
    "layernorm_without_bias": NormKind(centres=True, tensors=("weight",)),
    "layernorm_without_weight": NormKind(centres=True, tensors=()),
    "rmsnorm": NormKind(centres=False, tensors=("weight",)),
    "rmsnorm_without_weight": NormKind(centres=False, tensors=()),
}


@dataclass(frozen=True)
class Norm:
    """[norm]: the function that a family's norms compute."""

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "kind": tuple(NORM_KINDS),
        "placement": ("pre", "post", "sandwich", "output"),
    }

    kind: str
    placement: str
    eps: str | float
    plus_one: bool = False
    bias: str | None = None

    @property
    def centres(self) -> bool:
        """True if the norm subtracts the mean."""
        return NORM_KINDS[self.kind].centres

    @property
    def has_weight(self) -> bool:
        """True if growth can change what the norm multiplies by."""
        return bool(NORM_KINDS[self.kind].tensors)

    def epsilon(self, config: Any) -> float:
        """The number that is added to the variance."""
        return self.eps if isinstance(self.eps, float) else float(getattr(config, self.eps))

    def offset(self, is_bias: bool) -> float:
        """The number that the model adds to a stored weight (or bias) before it uses it."""
        return 1.0 if self.plus_one and not is_bias else 0.0

    def tensors(self, config: Any) -> tuple[str, ...]:
        """Last part of the names of a norm's tensors: "weight", and "bias" if it has one."""
        has_bias = holds(self.bias, config)
        return tuple(t for t in NORM_KINDS[self.kind].tensors if has_bias or t != "bias")


# multiply-adds of a token for each number of a state: to read what it holds for the key, to take
# that out, to add the new value, and to read it by the query
STATE_PRODUCTS = 4


@dataclass(frozen=True)
class Family:
    """The parsed table of one model family, as `load_family` returns it.

    `growkern/families/README.md` explains the keys of a table, which the fields are but for two.

    Attributes:
        table: content of a table that is not part of the package; None: it is.
        before: this family as it was before `of_class`.
    """

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "runtimes": ("head_dim", "layers", "scale", "renormalised", "eps")
    }

    model_type: str
    norm: Norm
    attention: Attention
    config: Mapping[str, Size]
    spaces: Mapping[str, SpaceSpec]
    classes: Mapping[str, ModelClass]
    tensors: Mapping[str, tuple[Row, ...]] = field(repr=False)
    depth: Depth = Depth()  # noqa: RUF009
    extends: str | None = None
    under: str | None = None
    texts: tuple[str, ...] = ()
    activation: str | None = None
    softcap: str | None = None
    also: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    renamed: str | None = None
    per_layer: tuple[str, ...] = ()
    ties_by_value: bool = False
    stacks: Mapping[str, str] = field(default_factory=lambda: {"": "layers"})
    kinds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    states: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    runtimes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    refuse: tuple[Refusal, ...] = ()
    older: tuple[OlderKey, ...] = ()
    dense: Dense | None = None
    second: Second | None = None
    table: Mapping[str, Any] | None = field(default=None, repr=False)
    before: Family | None = field(default=None, repr=False)

    @property
    def whole(self) -> Family:
        """The family with the stacks, spaces and sizes of all classes."""
        return self.before or self

    @property
    def checksum(self) -> str:
        """SHA-256 of a table that is not part of the package."""
        return hashlib.sha256(json.dumps(self.table, sort_keys=True).encode()).hexdigest()

    def text(self, config: Any) -> Any:
        """The config that has the table's fields: one of this family, or one within it."""
        return config if self.under is None else getattr(config, self.under)

    def fields(self, config: Any) -> Any:
        """What the table's fields are read from."""
        return config if self.under is None else Nested(self.text(config), config)

    def config_field(self, key: str) -> str:
        """Name of the config field that holds the size called `key`, or its product of fields."""
        return str(self.config[key].field or self.config[key].default)

    @property
    def growable(self) -> tuple[str, ...]:
        """The sizes that may grow."""
        used = {"stream", "head_dim", "vocab", "kv_heads"}
        used |= {*self.query_heads, *self.unit_sizes, *self.stacks.values(), *self.ratios}
        mixed = ((space.size, space.chosen, *space.groups) for space in self.mixtures)
        used |= {str(size) for some in mixed for size in some}
        used |= {str(space.size) for space in self.spaces.values() if space.kind == "head"}
        used -= {str(space.size) for space in self.spaces.values() if space.kind == "fixed"}
        sizes = {key: size for key, size in self.config.items() if size.field and not size.fixed}
        return tuple(key for key in sizes if key in used)

    def largest(self, key: str) -> int:
        """An upper limit far beyond any model; a larger size is a typing error or damage."""
        return 1 << (14 if key in self.stacks.values() else 24)

    @property
    def unit_sizes(self) -> tuple[str, ...]:
        """The sizes that count independent units, such as those of an FFN, but not the stream."""
        used = {s.size for s in self.spaces.values() if s.kind == "units"}
        own = {key for key, size in self.config.items() if not size.factors}
        return tuple(key for key in self.config if key in used & own and key != "stream")

    @property
    def ffn(self) -> str | None:
        """The size of the units whose output enters a post-norm; None where there are none."""
        return "ffn" if "ffn" in self.config else next(iter(self.unit_sizes), None)

    @property
    def ratios(self) -> tuple[str, ...]:
        """The sizes that another one is a product of, but not the stream."""
        used = {field for size in self.config.values() for field in size.factors}
        fields = {key: size.field for key, size in self.config.items()}
        return tuple(key for key in fields if fields[key] in used and key != "stream")

    @property
    def mixtures(self) -> tuple[SpaceSpec, ...]:
        """The spaces of experts."""
        return tuple(space for space in self.spaces.values() if space.kind == "experts")

    def is_kind(self, kind: str, layer: int, config: Any) -> bool:
        """True if a layer is of one of [kinds]."""
        return all(is_met(text, layer, self.text(config)) for text in self.kinds[kind])

    def state_products(self, config: Any, layer: int) -> int | None:
        """Multiply-adds of a token with the state of a layer; None: the layer attends to tokens."""
        for kind, sizes in self.states.items():
            if self.is_kind(kind, layer, config):
                fields = self.fields(config)
                state = [self.config[key].of(fields) for key in sizes]
                return STATE_PRODUCTS * math.prod(state) if state else 0
        return None

    def conditional(self, *words: str) -> dict[str, str]:
        """The config fields that decide kinds of layers by one of these words -> the word."""
        texts = (text for of_kind in self.kinds.values() for text in of_kind)
        return {field: used for _, used, field, _ in map(condition_of, texts) if used in words}

    @property
    def sparse_fields(self) -> dict[str, str]:
        """The config fields that decide which layers are mixtures -> the words of conditions."""
        conditions = map(condition_of, self.kinds.get("sparse", ()))
        return {field: word for _, word, field, _ in conditions}

    @property
    def query_heads(self) -> tuple[str, ...]:
        """The sizes that count query heads: one, or one per stack."""
        used = {s.heads for s in self.spaces.values() if s.heads}
        return tuple(key for key in self.config if key in used - self.key_heads)

    @property
    def key_heads(self) -> set[str]:
        """The sizes that count heads of keys which several query heads may share."""
        return ({"kv_heads"} | {str(s.keys) for s in self.spaces.values()}) & self.config.keys()

    def refuse_groups(self, key: str, heads: int, kv_heads: int) -> None:
        """Refuse query heads that do not share equally the heads of keys that `key` counts."""
        if heads < kv_heads or heads % kv_heads:
            raise UnfitError(
                f"{self.config_field('q_heads')}={heads} is not a multiple of "
                f"{self.config_field(key)}={kv_heads}: give a multiple of it"
            )

    @property
    def forces_head_dim(self) -> bool:
        """True where the model computes head_dim as stream / heads."""
        return "head_dim" not in self.config

    def is_space(self, scale: str | None) -> bool:
        """Whether the `scale` of a row is a space; a name that is a size's too is the size."""
        return scale in self.spaces and scale not in self.config

    @property
    def carries(self) -> bool:
        """True where the table says which norms carry the mean past themselves."""
        return any(row.extra == "carry" for rows in self.tensors.values() for row in rows)

    @property
    def carriers(self) -> set[str]:
        """The units that pass the mean through the FFN: their matrix names the norm behind them."""
        rows = (row for rows in self.tensors.values() for row in rows if row.into)
        return {axis.removeprefix("write:") for row in rows for axis in row.axes[:1]}

    @property
    def computes(self) -> bool:
        """True where checkpoints hold tensors that follow from the config."""
        return any(row.computed for rows in self.tensors.values() for row in rows)

    @property
    def pads_exactly(self) -> bool:
        """True where a stream with empty entries computes the same: no norm outputs the stream."""
        written = {
            str(row.norm).partition(">")[2] for rows in self.tensors.values() for row in rows
        }
        is_free = self.norm.placement == "pre" and "stream" not in written
        return self.norm.has_weight and (is_free or not self.norm.centres)

    def rows_of(self, class_name: str) -> Iterator[tuple[str, Row, str]]:
        """The rows of a class: (part of the table, row, stack), one for each stack of a row."""
        model_class = self.classes[class_name]
        for part in model_class.parts:
            for row in self.tensors[part]:
                every = model_class.stacks or tuple(self.stacks)
                for stack in every if "{s}" in row.name else [row.stack or next(iter(self.stacks))]:
                    yield part, row, stack

    def of_class(self, class_name: str) -> Family:
        """This family without the stacks, spaces and sizes that no tensor of the class has."""
        if class_name not in self.classes:
            # its outputs are those of layers, by their numbers, in the layout of an image
            plain = next(iter(self.classes))
            why = f"; a backbone has the weights of a {plain}: load it as one, and grow that"
            raise GrowthError(
                f"{class_name}: no table for this {self.model_type} class; supported: "
                + ", ".join(self.classes)
                + (why if class_name.endswith("Backbone") else "")
                + ("; name it in [classes] of your table" if self.table else "")
            )
        rows = [(row, stack) for _, row, stack in self.rows_of(class_name)]
        stacks = {stack for row, stack in rows if "{l}" in row.name}
        spaces, sizes = (
            set().union(*names) for names in zip(*(row.uses(s) for row, s in rows), strict=True)
        )
        names = [*spaces, "stream"]
        for spec in (self.spaces[name] for name in names):
            # the list grows while it is read
            names += {spec.of, spec.untied, *spec.blocks} - {None, *names}
        specs = {name: spec for name, spec in self.spaces.items() if name in names}
        for spec in specs.values():
            sizes |= {spec.heads, spec.keys, spec.size, spec.chosen, *spec.groups}
        sizes |= {"stream", "head_dim", *self.ratios, *(self.stacks[stack] for stack in stacks)}
        sizes |= {self.attention.divisor, *self.classes[class_name].repeats.values()}
        return replace(
            self,
            config={key: size for key, size in self.config.items() if key in sizes},
            stacks={stack: size for stack, size in self.stacks.items() if stack in stacks},
            spaces=specs,
            before=self.whole,
        )


def growable_fields(family: Family) -> dict[str, str]:
    """Config field -> size, for the sizes that a user may set."""
    return {family.config_field(key): key for key in family.growable}


def inner(data: Mapping[str, Any], under: str | None) -> Mapping[str, Any]:
    """The part of a config's JSON object that has the fields of a table: see `Family.under`."""
    part = data if under is None else data.get(under)
    return part if isinstance(part, Mapping) else {}


def field_faults(family: Family, config: Any) -> Iterator[str]:
    """Fields of the table that the config does not have, or that hold no number there."""
    if family.under is not None and not hasattr(config, family.under):
        close = nearest(family.under, config.to_dict())
        yield f"under: a {config.model_type} has no field {family.under!r}{close}"
        return
    config = family.fields(config)
    sizes = {key: size for key, size in family.config.items() if size.default is None}
    fields = {f"config.{key}": size.field for key, size in sizes.items()}
    fields |= {"activation": family.activation, "softcap": family.softcap}
    for name, own in family.classes.items():
        fields |= {f"classes.{name}.reads": axis.split()[0] for axis in own.reads}
        others = [key for key in own.repeats.values() if key not in family.config]
        fields |= {f"classes.{name}.repeats.{key}": key for key in others}
    fields["norm.eps"] = family.norm.eps if isinstance(family.norm.eps, str) else None
    for key, name in ((key, name) for key, name in fields.items() if name is not None):
        try:
            value = value_of(config, name)
        except AttributeError:
            close = nearest(name, config.to_dict())
            yield f"{key}: a {config.model_type} has no field {name!r}{close}"
            continue
        if key.startswith("config.") and type(value) not in (int, float):
            value = " ".join(reprlib.repr(value).split())
            yield f"{key}: {name}={value} of a {config.model_type} is no size: name another field"
