"""Completes a config.json that transformers wrote: keys of the source, and of older software.

transformers drops the keys that its own classes no longer read. Other software reads them, and
computes with defaults where they are missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from growkern.families.family import Family
from growkern.families.load import load_family, supported_families
from growkern.growth.source.source import Source

# of the source's files and of the package that wrote them
NOT_KEPT = ("_name_or_path", "transformers_version")
# what transformers before version 4.56 calls the dtype
OLD_DTYPE = "torch_dtype"


def complete_config(directory: Path, source: Source | None = None, model: Any = None) -> None:
    """Add to a config.json what transformers left out.

    - Older names of what growth set, such as `rope_theta` (`growkern.families.older`).
    - Every key of the source's config.json that growth did not change, with the source's value.

    A config of a family without a table stays as it is.

    Args:
        directory: where `save_pretrained` has just written config.json.
        source: that the model was grown from, if it is known.
        model: config of the saved model; needed with `source`.
    """
    file = directory / "config.json"
    saved = json.loads(file.read_text(encoding="utf-8"))
    if saved.get("model_type") not in supported_families():
        return
    before = {} if source is None else json.loads(source.config.to_json_string())
    given = {} if source is None else source.keys
    result = {**saved, **_unchanged(given, before, saved, source and source.config, model)}
    result = _with_older(load_family(saved["model_type"]), result, given, before)
    # as transformers writes it
    text = json.dumps(result, indent=2, sort_keys=True) + "\n"
    file.write_text(text, encoding="utf-8")


def _unchanged(
    given: Mapping[str, Any],
    before: Mapping[str, Any],
    saved: Mapping[str, Any],
    small: Any,
    large: Any,
) -> dict[str, Any]:
    """The keys of the source's config.json that say of the target what they say of the source.

    Args:
        given: the source's config.json.
        before, saved: configs of source and target, as transformers writes them.
        small, large: the same as objects, whose attributes have more names.
    """
    kept = {}
    for key, value in given.items():
        if key == OLD_DTYPE:
            kept[key] = saved.get("dtype", value)
        elif key in NOT_KEPT:
            continue
        elif key in saved or key in before:
            # null means a default that may follow from the sizes
            is_same = key in saved and key in before and saved[key] == before[key]
            if is_same and value is not None:
                kept[key] = value
        else:
            # other names of sizes, such as num_hidden_layers of BART
            old, new = getattr(small, key, None), getattr(large, key, None)
            kept[key] = value if old == new else new
    return kept


def _with_older(
    family: Family, config: dict[str, Any], given: Mapping[str, Any], before: Mapping[str, Any]
) -> dict[str, Any]:
    """A config with the older keys of its family; those that nothing describes are left out."""
    result = dict(config)
    for key in family.older:
        now = result.pop(key.field, None)
        value = key.value(config, now)
        if not key.is_pattern and key.field in given and value == key.value(before):
            value = given[key.field]
            result[key.field] = value
        elif value is not None:
            result[key.field] = value
    return result
