"""Finds the family of a config. Without a table, says what the model is: the nearest family, say.

Only a refusal does more than read a table. It imports modelling code, which takes a second or two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from growkern.errors import GrowthError
from growkern.families.family import Family
from growkern.families.load import load_family, supported_families

# config fields that count experts
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# the share of a model's names that a family must have to be worth naming
LEAST = 0.5
# of a model's layers; more of them add no names
LAYERS = 2


def family_of(model_type: str, config: Any) -> Family:
    """The family of a config.

    Args:
        config: the config, or the JSON object of its file.

    Raises:
        GrowthError: there is no table for it; the message says what is known of the model.
    """
    try:
        return load_family(model_type)
    except GrowthError as error:
        data = config if isinstance(config, Mapping) else config.to_dict()
        raise GrowthError(f"{error}{_what_it_is(model_type, data)}") from None


def _what_it_is(model_type: str, config: Mapping[str, Any]) -> str:
    """A clause about a model without a table, after a semicolon, or nothing."""
    inner = config.get("text_config")
    kind = inner.get("model_type") if isinstance(inner, Mapping) else None
    if kind in supported_families():
        return f"; its text_config is a {kind}, which has a table: grow that part by itself"
    for name in EXPERTS:
        if isinstance(config.get(name), int):
            return f"; it is a mixture of experts ({name}={config[name]})"
    names = _names_of(model_type)
    if not names:
        return ""
    # of families with equally many of its names, the one with the fewest others
    known = {kind: _names_in_table(kind) for kind in supported_families()}
    nearest = max(known, key=lambda kind: (len(names & known[kind]), -len(known[kind])))
    share = len(names & known[nearest]) / len(names)
    return f"; nearest: {nearest} ({share:.0%} of its tensor names)" if share >= LEAST else ""


def _names_of(model_type: str) -> set[str]:
    """The names of the tensors of such a model, of any sizes; none if transformers has no such."""
    import torch
    import transformers

    try:
        # the values of a file that is refused could take any time
        config = transformers.CONFIG_MAPPING[model_type]()
        config.num_hidden_layers = min(LAYERS, config.num_hidden_layers)
        with torch.device("meta"):
            return _short(transformers.AutoModel.from_config(config).state_dict())
    except Exception:
        # of any type: the model is refused in any case
        return set()


def _names_in_table(model_type: str) -> set[str]:
    """The names of a family's tensors in any of its bodies."""
    family, names = load_family(model_type), set[str]()
    parts = {part for model_class in family.classes.values() for part in model_class.body}
    for row in (row for part in parts for row in family.parts[part]):
        names |= {f"{row.name}.weight", f"{row.name}.bias"} if row.norm else {row.name}
    return _short(names)


def _short(names: Iterable[str]) -> set[str]:
    """Names behind the number of a layer: what is before it differs between classes."""
    behind = (re.split(r"\.(?:\d+|\{l\})\.", name, maxsplit=1)[-1] for name in names)
    return {".".join(name.split(".")[-3:]) for name in behind}
