"""The parts of a family table, as records: their fields are the keys, and have the types of values.

`growkern/families/README.md` explains the keys. A record may name further rules for them:

- `CHOICES`: key -> the values that it may have.
- `KEY`: the field that has the name of the entry in the table.
- `PLAIN`: type of an entry that is no table -> the field that it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from growkern.errors import GrowthError, UnfitError
from growkern.families.fields import value_of

# a size that transformers computes; in a name: any text
ANY = "*"
# of `Size.follows`
NOTHING = "nothing"


@dataclass(frozen=True)
class Size:
    """One entry of [config]: where a config holds one size."""

    PLAIN: ClassVar[dict[type, str]] = {int: "number", str: "field"}

    field: str | None = None
    number: int = 0
    default: str | None = None
    plus: int = 0
    reserved: int = 0
    follows: str | None = None
    fixed: bool = False
    count_of: str | None = None

    def of(self, config: Any) -> int:
        """The size, read from a Hugging Face config; it needs a value, or the family a default."""
        value = value_of(config, self.field, None) if self.field else self.number or None
        if isinstance(value, list):
            value = self._of_layers(value)
        if value is None and self.default is not None:
            names = self.default.split()[::2]
            values = [int(x) if x.isdigit() else value_of(config, x) for x in names]
            value = values[0] // values[1] if "/" in self.default else math.prod(values)
            value = sum(values) if "+" in self.default else value
            if not self.field and "/" in self.default and values[0] % values[1]:
                pairs = [f"{x}={y}" for x, y in zip(names, values, strict=True)]
                raise UnfitError(f"{pairs[0]} is not a multiple of {pairs[1]}")
        if value is None and self.field is not None:
            raise GrowthError(f"{self.field} of the config has no value: give it a whole number")
        return int(value or 0) + self.plus

    def put(self, config: Any, size: int) -> None:
        """Set the size in the config that has its field."""
        if self.count_of is None:
            setattr(config, str(self.field or self.default), size - self.plus)
        else:
            # layers of any kind, until it is known which ones they copy
            setattr(config, self.count_of, (size * getattr(config, self.count_of))[-size:])

    def _of_layers(self, values: list[Any]) -> Any:
        """The one value of a field that has an entry for each layer."""
        if len({*values}) != 1:
            raise GrowthError(
                f"{self.field}={values} of the config differs between layers: growth needs one "
                "number for all of them"
            )
        return values[0]

    @property
    def factors(self) -> tuple[str, ...]:
        """The config fields that a size without a field of its own is made of."""
        return () if self.field or not self.default else tuple(self.default.split())


# the model's own factors, which growth undoes
ROOTS = ("sqrt(stream)", "rounded(sqrt(stream))")


@dataclass(frozen=True)
class SpaceSpec:
    """One activation space of a family."""

    KEY: ClassVar[str] = "name"
    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "kind": (
            *("stream", "normed", "heads", "head", "units", "layers", "experts", "fixed"),
            "tied_output",
        ),
        "part": ("value", "query", "key", "before_norm"),
        "scale": ROOTS,
    }

    name: str
    kind: str
    of: str | None = None
    untied: str | None = None
    heads: str | None = None
    keys: str | None = None
    width: int | None = None
    entries: str | None = None
    part: str = "value"
    weighted: bool = False
    size: str | None = None
    activated: bool = False
    scale: str | None = None
    scale_when: str | None = None
    chosen: str | None = None
    averaged: str | None = None
    asleep: str | None = None
    groups: tuple[str, ...] = ()

    @property
    def blocks(self) -> tuple[str, ...]:
        """The spaces that one head or unit consists of."""
        return tuple(self.entries.split("|")) if self.entries else ()

    @property
    def parts(self) -> tuple[str, ...]:
        """The roles of the entries of one head, in the order in which they lie there."""
        return tuple(self.part.split("|"))


@dataclass(frozen=True)
class Refusal:
    """A config value that the table does not cover: this one, also as an entry of a list, or any
    that differs from a field, or from a number."""

    KEY: ClassVar[str] = "field"

    field: str
    why: str
    value: Any = None
    differs: str | int | None = None

    def check(self, config: Any) -> None:
        """Refuse a config that has such a value."""
        value = config
        for name in self.field.split("."):
            value = getattr(value, name, None)
        if self.differs is not None:
            is_field = isinstance(self.differs, str)
            other = getattr(config, str(self.differs)) if is_field else self.differs
            refused = value not in (None, other)
        else:
            refused = value == self.value or (isinstance(value, list) and self.value in value)
        if refused:
            raise GrowthError(f"config.{self.field}={value}: {self.why}")


@dataclass(frozen=True)
class Attention:
    """[attention]: how scores and positions depend on head_dim.

    Attributes:
        positions: `rotary`, `learned`, `relative` or `none`. Rotary positions turn R entries of a
            head: pair i turns by theta ** (-2 i / R).
        pairs: where pair i lies. `halves`: entries i and i + R / 2. `adjacent`: 2 i and 2 i + 1.
        whole_pairs: True if the model cannot run with an odd R. Others then turn R + 1 entries.
        scale: scores are divided by the root of `head_dim`, or by a `constant`.
        divisor: that head_dim, if it is a size of another name.
        field: config field that holds the square of that constant.
        when: config flag; without it scores are not divided.
        partial: True if R is head_dim times the config's `partial_rotary_factor`, False if R is
            head_dim.
        turning: config field that holds R, where it does not depend on head_dim.
        sections: how many pairs of a head turn with the time, height and width of a patch of an
            image, unless `rope_parameters.mrope_section` says so; None: all turn with the position.
        clip: config field with the limit that queries, keys and values are clipped to.
    """

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "positions": ("rotary", "learned", "relative", "none"),
        "scale": ("head_dim", "constant"),
        "pairs": ("halves", "adjacent"),
    }

    positions: str
    scale: str
    when: str | None = None
    partial: bool = False
    field: str | None = None
    pairs: str = "halves"
    whole_pairs: bool = False
    turning: str | None = None
    clip: str | None = None
    sections: tuple[int, ...] | None = None
    divisor: str | None = None


@dataclass(frozen=True)
class Row:
    """One line of a tensor table."""

    KEY: ClassVar[str] = "name"
    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "keep": ("float32",),
        "extra": ("free", "zero", "carry"),
        "scale": (*ROOTS, *(f"1/{root}" for root in ROOTS)),
    }

    name: str
    axes: tuple[str, ...] = ()
    norm: str | None = None
    extra: str | None = None
    into: str | None = None
    tied: str | None = None
    when: str | None = None
    only: str | None = None
    stack: str | None = None
    scale: str | None = None
    scale_when: str | None = None
    fallback: str | None = None
    stored: str | None = None
    files: tuple[str, ...] = ()
    factor: str | None = None
    keep: str | None = None
    transposed: bool = False
    alone: bool = False
    computed: bool = False
    dense: tuple[str, ...] = ()

    def uses(self, stack: str) -> tuple[set[str], set[str]]:
        """The spaces, and the sizes of [config], that its axes and its norm refer to."""
        spaces, sizes = set(self.norm.split(">") if self.norm else ()), set()
        for axis in self.axes:
            _, colon, names = axis.partition(":")
            if colon:
                spaces |= set(names.split("|"))
            elif axis != ANY:
                sizes.add(axis)
        return {name.replace("{s}", stack) for name in spaces}, sizes

    def is_in(self, kinds: Mapping[str, bool]) -> bool:
        """True if `only` allows a layer that is, or is not, of these kinds."""
        name = str(self.only).removeprefix("not_")
        return kinds[name] == (name == self.only)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of one model, and the row of the table that describes it.

    Attributes:
        name: in the state dict.
        template: the name without the class's prefix and with `{l}` for the layer. The same
            tensor of all layers has the same template.
        layer: number of its layer within `stack`; None outside the layers.
        axes: one entry per axis, as in the row, with stack and layer filled in.
        norm: the spaces that a norm reads and writes; None for other tensors.
        into, tied, fallback, stored, factor: as in the row, but full names of tensors.
        files: as in the row, but full names, with `{e}` left in them.
        in_body: True if it belongs to the body of the model, False if to a head.
    """

    name: str
    template: str
    row: Row
    stack: str
    layer: int | None
    axes: tuple[str, ...]
    in_body: bool
    norm: tuple[str, str] | None = None
    into: str | None = None
    tied: str | None = None
    fallback: str | None = None
    stored: str | None = None
    files: tuple[str, ...] = ()
    factor: str | None = None

    @property
    def is_split(self) -> bool:
        """True if files have a tensor for every expert."""
        return any("{e}" in file for file in self.files)

    @property
    def is_bias(self) -> bool:
        return self.name.endswith(".bias")

    @property
    def is_copied(self) -> bool:
        """True if it never grows and is copied as it is, as a tensor that is one number."""
        return ANY in self.row.name or not self.axes

    def is_one_of(self, rows: tuple[str, ...]) -> bool:
        """True if one of these rows describes this tensor; a norm's row covers weight and bias."""
        own = (self.template, self.template.rpartition(".")[0] if self.norm else "")
        return any(row.replace("{s}", self.stack) in own for row in rows)


@dataclass(frozen=True)
class ModelClass:
    """[classes]: which parts of the table a model class consists of, and how it names them."""

    prefix: str = ""
    body: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    output: str | None = None
    stacks: tuple[str, ...] = ()
    repeats: Mapping[str, str] = field(default_factory=dict)
    cache: str | None = None
    beside: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[str, ...]:
        """All parts of the table that it consists of."""
        return (*self.body, *self.beside, *self.heads)

    def prefix_of(self, part: str) -> str:
        """How the names of a part begin in the model."""
        if part in self.beside:
            return self.prefix[: self.prefix.rstrip(".").rfind(".") + 1]
        return self.prefix if part in self.body else ""


@dataclass(frozen=True)
class Depth:
    """[depth]: what inserted layers need."""

    zero: tuple[str, ...] = ()
    one: tuple[str, ...] = ()
    inner_norms: tuple[str, ...] = ()
    outer_norm: str | None = None
    in_place: str | None = None
    refuse: tuple[Refusal, ...] = ()


@dataclass(frozen=True)
class Dense:
    """[dense]: the dense models that can become a mixture of this family."""

    of: tuple[str, ...]
    set: Mapping[str, Any] = field(default_factory=dict)
    refuse: tuple[Refusal, ...] = ()
    renormalised: str | None = None
    routed: str | None = None
    shared: float = 1.0
