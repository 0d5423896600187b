"""The parts of a family table, as records: their fields are the keys, and have the types of values.

`growkern/families/README.md` explains the keys. A record may name further rules for them:

- `CHOICES`: key -> the values that it may have.
- `KEY`: the field that has the name of the entry in the table.
- `PLAIN`: type of an entry that is no table -> the field that it stands for.

Rows of a table have conditions on the config, and its [kinds] have conditions on layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from growkern.errors import GrowthError, UnfitError

# a size that transformers computes; in a name: any text
ANY = "*"
# of `Size.follows`
NOTHING = "nothing"


def value_of(config: Any, name: str, *default: Any) -> Any:
    """A field of a config. "KIND:FIELD" is that of the layers of a kind, by `layer_types`.

    Where layers differ, a plain name is the value of those layers that have none of their own.
    """
    kind, _, field = name.rpartition(":")
    if kind and kind in config.layer_types:
        return getattr(config.per_layer_config[kind], field, *default)
    try:
        return getattr(config, field, *default)
    except RuntimeError:
        # transformers refuses to read it from the whole config
        return vars(getattr(config, "inner", config))[field]


def holds(condition: str | None, config: Any) -> bool:
    """True if a condition holds for a config; None: always.

    "flag", "!flag", "field != field", or "?flag", which holds where the config's class lacks it.
    """
    if condition is None:
        return True
    if " and " in condition:
        return all(holds(part, config) for part in condition.split(" and "))
    left, unequal, right = condition.partition(" != ")
    if unequal:
        return bool(getattr(config, left) != getattr(config, right))
    value = bool(getattr(config, condition.lstrip("!?"), condition.startswith("?")))
    return value != condition.startswith("!")


# of a layer's number, the config's value and the text behind "=" -> whether the layer is meant
CONDITIONS: Mapping[str, Callable[[int, Any, str], bool]] = {
    "in": lambda layer, value, _: isinstance(value, list) and layer in value,
    "every": lambda layer, value, _: type(value) is int and value > 0 and (layer + 1) % value == 0,
    "from": lambda layer, value, _: type(value) is int and layer >= value,
    "is": lambda layer, value, text: isinstance(value, list) and value[layer : layer + 1] == [text],
    "last": lambda layer, value, count: type(value) is int and layer >= int(count) - value,
}
# the words whose fields follow copied layers, but for lists with an entry for each layer
FOLLOWING = ("in", "from", "last")


def followed(word: str, value: Any, layers: Sequence[int]) -> Any:
    """The value that such a condition needs where `layers` are copied, one after another."""
    if word == "in":
        return [i for i, layer in enumerate(layers) if layer in (value or ())]
    if word == "from" and type(value) is int:
        return sum(layer < value for layer in layers)
    if word == "last" and type(value) is int:
        return sum(layer > max(layers) - value for layer in layers)
    return [*map(value.__getitem__, layers)] if isinstance(value, list) else value


def unfollowed(word: str, value: Any, layers: Sequence[int]) -> Any:
    """The source's value for a target's: of copied `layers`, the first copies count."""
    if word == "in" and isinstance(value, list):
        return [layer for layer in sorted({*layers}) if layers.index(layer) in value]
    if word == "from" and type(value) is int:
        return len({*layers[: max(value, 0)]})
    return value


def follow_layers(
    config: Any, source: Any, fields: Mapping[str, str], layers: Sequence[int] | None
) -> None:
    """Set the `fields` of a target's config that say, by a condition, of which kind its layers are.

    `layers` has the source layer of every target layer. None: the source has no layers, and the
    config's class fills the lists.
    """
    for name, word in fields.items():
        value = getattr(source, name, None)
        if layers is not None and value is not None:
            # None stays: the config's class, and other software, then read another field
            setattr(config, name, followed(word, value, layers))
        elif value == []:
            given = {key: kept for key, kept in config.to_dict().items() if key != name}
            setattr(config, name, getattr(type(config).from_dict(given), name))


def condition_of(text: str) -> tuple[bool, str, str, str]:
    """A condition of [kinds]: whether it is negated, its word, the config field and the text."""
    word, _, rest = text.removeprefix("not ").partition(":")
    field, _, value = rest.partition("=")
    return text.startswith("not "), word, field, value


def is_met(text: str, layer: int, config: Any, layers: Sequence[int] = ()) -> bool:
    """True if a layer meets a condition of [kinds]; of a model with copies of `layers`, if any."""
    negated, word, field, wanted = condition_of(text)
    value = getattr(config, field)
    value = followed(word, value, layers) if layers else value
    if word == "last":
        wanted = str(len(layers) or getattr(config, wanted))
    return CONDITIONS[word](layer, value, wanted) != negated


# what a pattern tells apart: layers with full attention, those without positions (a 0), or those
# that are no mixtures
MARKED = ("full_attention", 0, "dense")

# form -> whether a layer has full attention, by its number and the key's value
PATTERNS: Mapping[str, Callable[[int, int], bool]] = {
    "full_first": lambda layer, period: layer % period == 0,
    "full_last": lambda layer, period: (layer + 1) % period == 0,
    "full_until": lambda layer, count: layer < count,
}
# a value, or a table of scaled rotary positions whose kind is called `rope_type` or `type`
FORMS = ("value", "runs", "letters", "scaling", "typed_scaling", *PATTERNS)
# of a text with a letter for each layer
LETTER_OF = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}


# the only entries that a table with `type` may hold beside it: older versions count them
TYPED_KEYS = ("factor", "short_factor", "long_factor")
# of a pattern that is a text: layers with sliding and with full attention
LETTERS = "LG"


@dataclass(frozen=True)
class OlderKey:
    """One entry of [older].

    Attributes:
        of: where the new form holds the same: names separated by dots.
        form: one of `FORMS`. `runs` are pairs [entries, times] that spell a list with one entry for
            each layer. `letters` is a text with a letter for each layer. Patterns are whole
            numbers n that say which layers have full attention: every n-th, beginning with the
            first (`full_first`) or ending with the last of n (`full_last`), or the first n
            (`full_until`). Or which have no positions, in lists
            where those have a 0; or which are dense. A config may have a text instead, such as
            "LLLG", which repeats.
        when: the flag of the config without which software ignores the key.
    """

    KEY: ClassVar[str] = "field"
    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {"form": FORMS}

    field: str
    of: str
    form: str = "value"
    when: str | None = None

    @property
    def is_pattern(self) -> bool:
        """True if the key says which layers have full attention."""
        return self.form in PATTERNS

    @property
    def is_periodic(self) -> bool:
        """True if the key says after how many layers their kinds repeat."""
        return self.form in ("full_first", "full_last")

    def value(
        self, config: Mapping[str, Any], now: Any = None, beside: Collection[str] = ()
    ) -> Any:
        """The value that says the same as the new form in a config's JSON object, if there is one.

        `now`, the value that the key has, stays if it says the same. `beside` has the entries of
        rotary positions that stand in keys of their own, and not in the table of the scaling.
        """
        result: Any = config
        for name in self.of.split("."):
            result = result.get(name) if isinstance(result, Mapping) else None
        if self.is_pattern:
            return self._pattern(result, config, now)
        if self.form == "letters":
            return "".join(LETTER_OF[kind] for kind in result or ()) or now
        if self.form == "runs":
            spelled = [entry for entries, times in now or () for entry in times * [*entries]]
            return now if not result or spelled == result else [[result, 1]]
        return result if self.form == "value" else self._scaling(result, config, beside)

    def _pattern(self, kinds: Any, config: Mapping[str, Any], now: Any) -> int | str | None:
        if not kinds or (self.when is not None and not config.get(self.when)):
            return now
        if type(now) in (int, str) and self.describes(kinds, now):
            return now
        if isinstance(now, str):
            letters = "".join(LETTERS[kind in MARKED] for kind in kinds)
            starts = (letters[:n] for n in range(1, len(letters) + 1))
            return next(start for start in starts if self.describes(kinds, start))
        return next((n for n in range(len(kinds) + 2) if self.describes(kinds, n)), None)

    def describes(self, kinds: Sequence[str], value: int | str) -> bool:
        """True if the value, of a pattern, gives these kinds of layers."""
        if isinstance(value, str):
            pairs = enumerate(LETTERS[kind in MARKED] for kind in kinds)
            return bool(value) and all(value[i % len(value)] == letter for i, letter in pairs)
        is_full = PATTERNS[self.form]
        if value < 1 and self.form != "full_until":
            return False
        return all((kind in MARKED) == is_full(i, value) for i, kind in enumerate(kinds))

    def _scaling(
        self, rope: Any, config: Mapping[str, Any], beside: Collection[str]
    ) -> dict[str, Any] | None:
        rope = rope if isinstance(rope, Mapping) else {}
        kind = rope.get("rope_type", "default")
        if kind == "default" and "mrope_section" not in rope:
            return None
        rest = {k: v for k, v in rope.items() if k not in ("rope_type", "type", *beside)}
        other = rest.keys() - TYPED_KEYS
        if self.form == "typed_scaling" and all(config.get(key) == rest[key] for key in other):
            return {"type": kind, **{key: rest[key] for key in TYPED_KEYS if key in rest}}
        # transformers 5 reads this table and no other. Versions that read only `type` refuse it,
        # where they would compute something else without it
        return {"rope_type": kind, **rest}


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
    narrowed: tuple[str, ...] = ()

    def of(self, config: Any) -> int:
        """The size, read from a Hugging Face config; it needs a value, or the family a default."""
        if self.narrowed and value_of(config, self.narrowed[0], False):
            times, multiple = (value_of(config, name) for name in self.narrowed[1:])
            wide = int(times * int(2 * value_of(config, str(self.field)) / 3))
            return int(-(-wide // multiple) * multiple)
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
            for flag in self.narrowed[:1]:
                setattr(config, flag, False)
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


def parse_scale(scale: str) -> tuple[float, bool, str]:
    """A `scale`: the power of a size that it is, whether it is rounded, and the size.

    The forms are "SIZE", "sqrt(SIZE)", "rounded(sqrt(SIZE))", and "1/" before one of these.
    """
    root = scale.removeprefix("1/")
    size = root.removeprefix("rounded(").removeprefix("sqrt(").rstrip(")")
    power = 0.5 if "sqrt(" in root else 1.0
    return power if root == scale else -power, root.startswith("rounded("), size


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
    def is_inner(self) -> bool:
        """True for units over which a norm lies, behind a product: no factor there is free."""
        return self.kind == "units" and self.activated and self.size != "stream"

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
    FORM: ClassVar[str] = 'FIELD = { value = V, why = "..." }'

    field: str
    why: str
    value: Any = None
    differs: str | int | None = None

    def check(self, config: Any) -> None:
        """Refuse a config that has such a value."""
        value = config
        # a field that begins with a dot lies in the whole config
        for name in [self.field] if self.field[0] == "." else self.field.split("."):
            value = getattr(value, name, None)
        if self.differs is not None:
            is_field = isinstance(self.differs, str)
            other = getattr(config, str(self.differs)) if is_field else self.differs
            refused = value not in (None, other)
        else:
            refused = value == self.value or (isinstance(value, list) and self.value in value)
        if refused:
            shown = self.value if isinstance(value, list) else value
            raise GrowthError(f"config.{self.field.lstrip('.')}={shown}: {self.why}")


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
    as_stored: bool = False
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
    reads: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[str, ...]:
        """All parts of the table that it consists of."""
        return (*self.body, *self.behind, *self.beside, *self.heads)

    def prefix_of(self, part: str) -> str:
        """How the names of a part begin in the model."""
        if part in self.beside:
            return self.prefix[: self.prefix.rstrip(".").rfind(".") + 1]
        return self.prefix if part in (*self.body, *self.behind) else ""


@dataclass(frozen=True)
class Second:
    """[second]: layers that predict a second token, which files have behind the last layer."""

    layers: str | None = None
    kinds: tuple[str, ...] = ("",)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Depth:
    """[depth]: what inserted layers need."""

    zero: tuple[str, ...] = ()
    one: tuple[str, ...] = ()
    inner_norms: tuple[str, ...] = ()
    outer_norm: str | None = None
    in_place: str | None = None
    ahead: str | None = None
    heads: Mapping[str, str] = field(default_factory=dict)
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
