"""The table of a draft: kinds of layers, attention, scales and classes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from growkern.errors import GrowthError
from growkern.families import is_met
from growkern.growth.draft.probe import LAYERS, shapes, watch
from growkern.growth.draft.walk import Draft, Row

ACTIVATIONS = ("hidden_act", "activation_function", "hidden_activation", "activation")
# fields that change neither a tensor nor a value of an output
GENERAL = (
    "use_cache|return_dict|output_|jitter|chunk|tie_word_emb|summary_|encoder_decoder|"
    "_token_id|dropout|dtype|architectures|problem_type"
)
SOFTCAP = "final_logit_softcapping"
OTHER = "not the value that this table was drafted from"
# layers -> the word for them, where no field says which they are
ONLY = {(LAYERS - 1,): "last", tuple(range(1, LAYERS)): "not_first", (0,): "first"}


def table_of(draft: Draft) -> dict[str, Any]:
    """The whole table, as TOML values."""
    config, fields, kinds = draft.config, draft.config.to_dict(), dict[str, list[str]]()
    # classes may write lists into the config
    lists = draft.model.config.to_dict().items()
    special = {k: v for k, v in fields.items() if not re.search(GENERAL, k)}
    refuse: Row = {k: {"value": not v} for k, v in special.items() if type(v) is bool}
    sizes = " ".join(map(str, draft.sizes.values()))
    unset = [k for k, v in special.items() if v is None and not re.search(rf"\b{k}\b", sizes)]
    # any value but 0 where the draft had none
    refuse |= {field: {"differs": 0} for field in unset}
    refuse |= {field: {"differs": draft.sizes["stream"]} for field in draft.equal}
    depth = _add_carrying(draft)
    _add_scale(draft)
    # experts name the kinds of layers
    order = sorted(draft.rows, key=lambda own: "expert" not in own)
    merged = {own: _merged(draft, own, kinds) for own in order}
    trunk = {own: merged[own] for own in draft.rows if own not in draft.lm}
    parts = {"trunk": trunk, "lm": {own: merged[own] for own in draft.rows if own in draft.lm}}
    table = {
        "model_type": config.model_type,
        "activation": next((k for k in ACTIVATIONS if isinstance(fields.get(k), str)), None),
        "softcap": SOFTCAP if fields.get(SOFTCAP) else None,
        "per_layer": [k for k, v in lists if isinstance(v, list) and len(v) == LAYERS],
        "norm": draft.norm,
        "attention": _attention(draft),
        "config": draft.sizes,
        "refuse": {field: {**value, "why": OTHER} for field, value in refuse.items()},
        "kinds": kinds,
        "spaces": draft.spaces,
        "classes": _classes(draft),
        "depth": depth,
        "tensors": {part: rows for part, rows in parts.items() if rows},
    }
    return {key: value for key, value in table.items() if value not in (None, {}, [])}


def _add_carrying(draft: Draft) -> dict[str, Any]:
    """[depth], and what norms behind blocks and embeddings need: `into`, and a last output."""
    rows = [(own, row) for own, rows in draft.rows.items() for row in rows.values()]
    carrying = [own for own, row in rows if row.get("extra") == "carry"]
    outer = next((own for own in carrying if "{l}" in own), None)
    first = next((own for own in carrying if own != outer), None)
    units = {key for key, space in draft.spaces.items() if space["kind"] == "units"}
    for own, row in rows:
        weights = draft.rows.get(re.sub("bias$", "weight", own), {}).values()
        beside = {axis.partition(":")[2] for weight in weights for axis in weight.get("axes", ())}
        if outer and "axes" in row and "{l}" in own and units & beside:
            row["into"] = outer
        elif first and "{l}" not in own and row.get("axes", ())[1:] == ["write:stream"]:
            row["into"] = first
    uses = [(own, {*row.get("axes", ()), row.get("norm")}) for own, row in rows]
    heads = [row for own, row in rows if row.get("axes") == ["vocab", "read:stream"]]
    if outer and heads and "head" not in draft.spaces:
        first_row = draft.rows[outer][0]
        # what was carried must not enter the head
        draft.rows[outer][LAYERS - 1] = {**first_row, "norm": "stream>final", "extra": "zero"}
        for row in heads:
            row["axes"] = ["vocab", "read:final"]
    elif not any({"stream>final", "read:final"} & used for _, used in uses):
        draft.spaces.pop("final")
    front = {name for names in draft.behind.values() for name in names}
    last = (n for n, used in uses if "{l}" in n and "write:stream" in used)
    zero = (name for name in last if not {name, name.rpartition(".")[0]} & front)
    inner = dict.fromkeys(own for own, row in rows if row.get("extra") == "zero")
    return {
        "zero": [*dict.fromkeys((*draft.behind, *zero))],
        **({"inner_norms": [*inner], "outer_norm": outer} if outer else {}),
    }


def _add_scale(draft: Draft) -> None:
    """The model's factor on its embeddings, if it is a root of the hidden size."""

    def scaled(model: Any) -> Any:
        return model.get_input_embeddings().weight[draft.ids] * draft.width**0.5

    near = scaled(draft.model)
    values = [y for name, _, _, y in draft.calls if f"{name}.weight" == draft.embedding]
    values = [v for v in (*values, draft.layers[0].x) if v.shape == near.shape]
    if "final" in draft.spaces and any(torch.allclose(v, near, rtol=5e-3) for v in values):
        # some models round it to their dtype; bfloat16 shows it
        model, _, calls = watch(draft.cls, draft.config, torch.bfloat16)
        is_plain = any(torch.equal(v, scaled(model)) for call in calls for v in (call.x, call.y))
        scale = "sqrt(stream)" if is_plain else "rounded(sqrt(stream))"
        draft.rows[draft.place(draft.embedding)[0]][None]["scale"] = f"1/{scale}"
        draft.spaces["final"]["scale"] = scale


def _merged(draft: Draft, own: str, kinds: dict[str, list[str]]) -> Row | list[Row]:
    """The row of a tensor, or one for each kind of layers, the rarest first."""
    groups: dict[str, set[Any]] = {}
    for layer, row in draft.rows[own].items():
        groups.setdefault(json.dumps(row), set()).add(layer)
    texts = sorted(groups, key=lambda text: len(groups[text]))
    is_whole = len(draft.rows[own]) == LAYERS or None in draft.rows[own]
    some = {text: _only(draft, own, groups[text], kinds) for text in texts[: -is_whole or None]}
    rows = [json.loads(t) | ({"only": some[t]} if t in some else {}) for t in texts]
    return rows[0] if len(rows) == 1 else rows


def _only(draft: Draft, own: str, layers: set[int], kinds: dict[str, list[str]]) -> str:
    """The word for some layers: of a kind that a field says, or of their place."""
    # mixtures have a name that growth knows
    kind, every = "sparse" if "experts" in draft.spaces else "special", {*range(LAYERS)}
    for text in kinds.get(kind) or _conditions(draft.config.to_dict()):
        met = {layer for layer in every if is_met(text, layer, draft.config)}
        if met == layers or (kind in kinds and met == every - layers):
            kinds[kind] = [text]
            return kind if met == layers else f"not_{kind}"
    if tuple(sorted(layers)) not in ONLY:
        draft.now = (draft.prefix + own).replace("{l}", str(min(layers)))
        raise GrowthError(f"it is in layers {sorted(layers)}, which no field says")
    return ONLY[tuple(sorted(layers))]


def _conditions(fields: Mapping[str, Any]) -> Iterator[str]:
    """Conditions that a config may have on its layers."""
    for key, value in fields.items():
        if isinstance(value, list) and len(value) == LAYERS:
            yield from (f"is:{key}={word}" for word in sorted({*map(str, value)}))
        elif isinstance(value, list) or re.search("dense|moe|start", key):
            text = f"{'in' if isinstance(value, list) else 'from'}:{key}"
            yield from (text, f"not {text}")


def _attention(draft: Draft) -> dict[str, Any]:
    """[attention]: positions. The scale, and which entries turn, are guesses for the check."""
    config, rope = draft.config, getattr(draft.config, "rope_parameters", None)
    is_rotary = bool(rope) or "rotary" in f"{[*draft.modules, *config.to_dict()]}".lower()
    other = "relative" if "relative" in f"{[*draft.base]}" else "learned"
    found = {"positions": "rotary" if is_rotary else other, "scale": "head_dim"}
    found |= {"divisor": "query_key"} if "query_key" in draft.sizes else {}
    if "partial_rotary_factor" in f"{rope}":
        return {**found, "partial": True}
    has_field = not rope and hasattr(config, "rotary_dim")
    return {**found, "turning": "rotary_dim"} if has_field else found


def _classes(draft: Draft) -> dict[str, Any]:
    """[classes]: the class with a head, and the body's if it has the same tensors."""
    prefix, heads = draft.prefix, ["lm"] if draft.lm else []
    repeats = {"repeats": draft.repeats} if draft.repeats else {}
    own = {draft.cls.__name__: {"prefix": prefix, "body": ["trunk"], "heads": heads, **repeats}}
    body = type(getattr(draft.model, draft.cls.base_model_prefix, draft.model))
    try:
        names = {*shapes(body, draft.config)[0]}
    except Exception:
        # a body that its config alone does not build
        return own
    mine = {name.removeprefix(prefix) for name in draft.base if name.startswith(prefix)}
    return {body.__name__: {"body": ["trunk"], **repeats}, **own} if names == mine else own
