"""The conditions of a family's table: on the config, of rows, and on layers, of [kinds]."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def holds(condition: str | None, config: Any) -> bool:
    """True if a condition holds for a config: "flag", "!flag" or "field != field"; None: always."""
    if condition is None:
        return True
    if " and " in condition:
        return all(holds(one, config) for one in condition.split(" and "))
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


def follow_layers(
    config: Any, source: Any, fields: Mapping[str, str], layers: Sequence[int] | None
) -> None:
    """Set the fields of a target's config that say of which kind its layers are.

    Args:
        config: of the target; is changed.
        source: the source's config.
        fields: names, and the word of the condition of each.
        layers: the source layer of every target layer. None: the source has no layers, and the
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
    """True if a layer meets a condition of [kinds].

    Args:
        layers: those of `config` that are copied, one after another, if that is another model.
    """
    negated, word, field, wanted = condition_of(text)
    value = getattr(config, field)
    return (
        CONDITIONS[word](layer, followed(word, value, layers) if layers else value, wanted)
        != negated
    )
