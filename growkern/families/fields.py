"""How fields of a config are read: conditions, and the older keys of other runtimes.

Rows of a table have conditions on the config, and its [kinds] have conditions on layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


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
    """True if a condition holds for a config: "flag", "!flag" or "field != field"; None: always."""
    if condition is None:
        return True
    if " and " in condition:
        return all(holds(part, config) for part in condition.split(" and "))
    left, unequal, right = condition.partition(" != ")
    if unequal:
        return bool(getattr(config, left) != getattr(config, right))
    value = bool(getattr(config, condition.removeprefix("!"), False))
    return value != condition.startswith("!")


# of a layer's number, the config's value and the text behind "=" -> whether the layer is meant
CONDITIONS: Mapping[str, Callable[[int, Any, str], bool]] = {
    "in": lambda layer, value, _: isinstance(value, list) and layer in value,
    "every": lambda layer, value, _: type(value) is int and value > 0 and (layer + 1) % value == 0,
    "from": lambda layer, value, _: type(value) is int and layer >= value,
    "is": lambda layer, value, text: isinstance(value, list) and value[layer : layer + 1] == [text],
}


def followed(word: str, value: Any, layers: Sequence[int]) -> Any:
    """The value that such a condition needs where `layers` are copied, one after another."""
    if word == "in":
        return [i for i, layer in enumerate(layers) if layer in (value or ())]
    if word == "from" and type(value) is int:
        return sum(layer < value for layer in layers)
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
        if layers is not None and hasattr(source, name):
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


def _spelled(runs: Any) -> list[Any]:
    """The list that pairs [entries, times] stand for."""
    return [entry for entries, times in runs or () for entry in times * [*entries]]


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
            return now if not result or _spelled(now) == result else [[result, 1]]
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
