"""Completes a draft: conditions of rows, kinds of layers, attention and scales; and its text."""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from growkern.growth.draft.probe import NoRule, shapes, template, with_field
from growkern.growth.draft.sizes import Draft, row_of

ACTIVATIONS = ("hidden_act", "activation_function", "hidden_activation", "activation")
ADJACENT = r"def rotate_(half|every_two)[^}]*?\[\.\.\., 0?::2\]|view_as_complex|rotate_every_two"
POOLER = ("pooler.dense.weight", "pooler.dense.bias")
SOFTCAP = "final_logit_softcapping"
NO_TENSOR = "a table drafted without these tensors has no rule for them"


def add_conditions(draft: Draft) -> None:
    """Flags that make tensors come or go: biases have a condition, all others are refused."""
    for flag, (value, new, gone) in draft.probe.flags.items():
        names = sorted({template(name) for name in new | gone})
        rows = [row_of(draft, name.removesuffix("bias") + "weight") or {} for name in names]
        is_bias = all(name.endswith(".bias") for name in names) and not (new and gone)
        if is_bias and gone and value and all(map(_norm_of, rows)):
            draft.norm["bias"] = flag
        elif is_bias and all(map(_axes, rows)):
            for name, row in zip(names, rows, strict=True):
                axis = next(axis for axis in row["axes"] if not axis.startswith("read:"))
                condition = flag if bool(gone) == value else f"!{flag}"
                draft.rows[name] = {**draft.rows.get(name, {"axes": [axis]}), "when": condition}
        else:
            draft.refuse[flag] = {"value": not value, "why": NO_TENSOR}


def _zero(draft: Draft) -> list[str]:
    """What is zero in an identity block: all that writes the stream last."""
    is_last = draft.place in ("sandwich", "output")
    return [
        name
        for name, row in draft.rows.items()
        if name.startswith(f"{draft.stack}.")
        and (_norm_of(row) == "stream>stream" if is_last else "write:stream" in _axes(row))
    ]


def find_kinds(draft: Draft) -> dict[str, list[str]]:
    """[kinds]: a condition for the tensors that only some layers have."""
    count, kinds = draft.layers, dict[str, list[str]]()
    having: dict[str, set[int]] = {}
    for name in draft.probe.base:
        if match := re.match(re.escape(draft.stack) + r"\.(\d+)\.", name):
            having.setdefault(template(name), set()).add(int(match[1]))
    # mixtures have a name that growth knows
    kind = "sparse" if "experts" in draft.spaces else "special"
    tried = dict(_conditions(draft.config.to_dict(), count))
    for own in sorted(having, key=lambda name: "expert" not in name):
        key, layers = own if own in draft.rows else own.rpartition(".")[0], having[own]
        if len(layers) == count or key not in draft.rows:
            continue
        # all rows have one condition, of the first or its opposite
        known = kinds.get(kind) or [text for text, those in tried.items() if those == layers]
        others = {*range(count)} - layers
        known = known or [text for text, those in tried.items() if those == others]
        if known and tried[known[0]] in (layers, others):
            kinds[kind] = known[:1]
            only = kind if tried[known[0]] == layers else f"not_{kind}"
        else:
            word = {(count - 1,): "last", tuple(range(1, count)): "not_first", (0,): "first"}
            if tuple(sorted(layers)) not in word:
                raise NoRule(f"{own} is in layers {sorted(layers)}, which no field says")
            only = word[tuple(sorted(layers))]
        draft.rows[key]["only"] = only
    return kinds


def _conditions(fields: Mapping[str, Any], count: int) -> Iterator[tuple[str, set[int]]]:
    """Conditions that a config may have on its layers, and the layers that meet them."""
    for key, value in fields.items():
        if type(value) is int and 0 < value < count and re.search("dense|moe|start", key):
            yield f"from:{key}", {*range(value, count)}
        if not isinstance(value, list) or not value:
            continue
        if len(value) == count and all(isinstance(v, str) for v in value):
            for word in sorted({*value}):
                yield f"is:{key}={word}", {i for i, v in enumerate(value) if v == word}
        elif all(type(v) is int for v in value):
            yield f"in:{key}", {*value}


def attention_of(draft: Draft) -> dict[str, Any]:
    """[attention]: positions and scale. Which entries turn is a guess for the check."""
    config, model = draft.config, draft.watch.model
    rope = getattr(config, "rope_parameters", None)
    names = " ".join(name for name, _ in model.named_modules()).lower()
    is_rotary = bool(rope) or "rotary" in names or hasattr(config, "rotary_dim")
    is_relative = any("relative" in name for name in draft.probe.base)
    positions = "rotary" if is_rotary else "relative" if is_relative else "learned"
    found: dict[str, Any] = {"positions": positions, "scale": "head_dim"}
    # where the number of entries that turn is fixed, no growth shows which
    source = inspect.getsource(inspect.getmodule(draft.cls) or type(draft))
    if is_rotary and "partial_rotary_factor" in f"{rope} {source}":
        found["partial"] = True
    elif is_rotary and hasattr(config, "rotary_dim"):
        found["turning"] = "rotary_dim"
    if is_rotary and re.search(ADJACENT, source):
        found["pairs"] = "adjacent"
    scales = (
        value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if "att" in name.lower() and key in ("scaling", "scale", "softmax_scale")
    )
    scale = next((value for value in scales if isinstance(value, float)), None)
    if scale and abs(scale - draft.head_dim**-0.5) > 1e-9:
        found["scale"] = "constant"
        if (field := scale_field(config, scale)) is not None:
            found["field"] = field
    return found


def scale_field(config: Any, scale: float | None = None) -> str | None:
    """The field with the square of what scores are divided by, or with that scale."""
    for key, value in config.to_dict().items():
        is_scale = bool(re.search("attn.*scalar|scalar.*attn", key)) and type(value) in (int, float)
        if is_scale and value > 0 and (scale is None or abs(value**-0.5 - scale) < 1e-9):
            return str(key)
    return None


def add_scales(draft: Draft) -> None:
    """The model's factor on its embeddings, if it is a root of the hidden size."""
    weight = draft.watch.model.get_submodule(draft.embedding.rpartition(".")[0])
    raw = nn.functional.embedding(draft.watch.ids, draft.watch.model.get_input_embeddings().weight)
    calls = draft.watch.calls
    values = [c.y for c in calls if c.module is weight]
    values += [c.x for c in calls if c.name == f"{draft.stack}.0"]
    root = draft.width**0.5
    for value in values:
        if value is None or value.shape != raw.shape:
            continue
        ratio = (value / raw).median().item()
        if abs(ratio - 1) < 1e-6 or not torch.allclose(value, raw * ratio, rtol=1e-6):
            continue
        if abs(ratio - root) < 5e-2:
            scale = "sqrt(stream)" if abs(ratio - root) < 1e-9 else "rounded(sqrt(stream))"
            draft.rows[template(draft.embedding)]["scale"] = f"1/{scale}"
            draft.spaces["final"]["scale"] = scale
            return


def add_final(draft: Draft) -> None:
    """What the head reads: the last norm's output, or that of the last block of a post-norm."""
    rows = draft.rows.values()
    is_final = any(_norm_of(r) == "stream>final" or "read:final" in _axes(r) for r in rows)
    heads = [row for row in draft.rows.values() if _axes(row) == {"vocab", "read:stream"}]
    if draft.place == "post" and "head" not in draft.spaces and heads:
        row = draft.rows[draft.outer_norm]
        draft.rows[draft.outer_norm] = [{**row, "norm": "stream>final", "only": "last"}, row]
        for head in heads:
            head["axes"] = ["vocab", "read:final"]
    elif not is_final:
        draft.spaces.pop("final", None)


def _norm_of(row: Any) -> Any:
    return row.get("norm") if isinstance(row, dict) else None


def _axes(row: Any) -> set[str]:
    return {*row.get("axes", ())} if isinstance(row, dict) else set()


def table_of(draft: Draft, kinds: dict[str, list[str]]) -> dict[str, Any]:
    """The whole table, as TOML values."""
    config, prefix = draft.config, draft.prefix
    fields = config.to_dict()
    if "add_cross_attention" in fields:
        why = "cross-attention has no rule in a drafted table"
        draft.refuse["add_cross_attention"] = {"value": True, "why": why}
    activation = next((k for k in ACTIVATIONS if isinstance(fields.get(k), str)), None)
    lists = [k for k, v in fields.items() if isinstance(v, list) and len(v) == draft.layers]
    depth: dict[str, Any] = {"zero": [name.removeprefix(prefix) for name in _zero(draft)]}
    if draft.place == "post":
        depth["inner_norms"] = [name.removeprefix(prefix) for name in draft.inner_norms]
        depth["outer_norm"] = draft.outer_norm.removeprefix(prefix)
    if "asleep" in draft.spaces.get("experts", {}):
        experts = draft.spaces["experts"]
        experts["asleep"] = experts["asleep"].removeprefix(prefix)
    parts: dict[str, dict[str, Any]] = {"trunk": {}, "lm": {}}
    for name, row in draft.rows.items():
        is_trunk = bool(prefix) and name.startswith(prefix)
        row = copy.deepcopy(row)
        if is_trunk and isinstance(row, dict) and "into" in row:
            row["into"] = row["into"].removeprefix(prefix)
        parts["trunk" if is_trunk or not prefix else "lm"][name.removeprefix(prefix)] = row
    classes = _classes(draft, parts)
    table = {
        "model_type": config.model_type,
        "activation": activation,
        "softcap": SOFTCAP if fields.get(SOFTCAP) else None,
        "per_layer": lists,
        "norm": draft.norm,
        "attention": attention_of(draft),
        "config": draft.sizes,
        "refuse": draft.refuse,
        "kinds": kinds,
        "spaces": draft.spaces,
        "classes": classes,
        "depth": depth,
        "tensors": {part: rows for part, rows in parts.items() if rows},
    }
    return {key: value for key, value in table.items() if value not in (None, {}, [])}


def _classes(draft: Draft, parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """[classes]: the class with a head, and the body's if it has the same tensors."""
    config, prefix = draft.config, draft.prefix
    stream = draft.sizes["stream"]
    equal = [f for f in draft.probe.fields(draft.embedding, 1) if f != stream]
    equal = [f for f in equal if getattr(config, f) == draft.width]
    for name in equal:
        why = "embeddings of another size have no rule in a drafted table"
        draft.refuse[name] = {"differs": stream, "why": why}
    repeats = {"repeats": dict.fromkeys(equal, "stream")} if equal else {}
    heads = ["lm"] if parts["lm"] else []
    own = {draft.cls.__name__: {"prefix": prefix, "body": ["trunk"], "heads": heads, **repeats}}
    body = type(getattr(draft.watch.model, draft.cls.base_model_prefix, draft.watch.model))
    try:
        names = {template(name) for name in shapes(body, config)[0]}
    except Exception:
        # a body that its config alone does not build
        return own
    mine = {template(n).removeprefix(prefix) for n in draft.probe.base if n.startswith(prefix)}
    if not prefix or names not in (mine, mine | {*POOLER}):
        return own
    trunk = ["trunk"]
    if names != mine:
        trunk.append("pooler")
        draft.spaces["pool"] = {"kind": "units", "size": "stream"}
        weight = {"axes": ["write:pool", "read:stream"]}
        parts["pooler"] = dict(zip(POOLER, (weight, {"axes": ["write:pool"]}), strict=True))
    return {body.__name__: {"body": trunk, **repeats}, **own}


def other_flags(draft_config: Any, refused: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Flags of the class that no tensor follows, each with the config that has its other value."""
    general = {"tie_word_embeddings", "return_dict", "is_encoder_decoder", "is_decoder"}
    for key, value in draft_config.to_dict().items():
        is_known = key in refused or key in general or re.search("cache|output_|jitter|chunk", key)
        if type(value) is bool and not is_known:
            yield key, with_field(draft_config, key, not value)


def as_toml(table: Mapping[str, Any]) -> str:
    """A table as TOML: one row a line."""
    plain = {k: v for k, v in table.items() if not isinstance(v, Mapping)}
    lines = [f"{key} = {_value(value)}" for key, value in plain.items()]
    sections = {k: v for k, v in table.items() if isinstance(v, Mapping) and k != "tensors"}
    sections |= {f"tensors.{part}": rows for part, rows in table["tensors"].items()}
    for name, entries in sections.items():
        lines += ["", f"[{name}]", *(f"{_key(k)} = {_value(v)}" for k, v in entries.items())]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    return repr(value) if isinstance(value, float) else json.dumps(value)
