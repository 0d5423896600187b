"""Where the norms of a draft lie: before a block, behind it, or inside, by their inputs."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from growkern.growth.draft.matrices import NAMED
from growkern.growth.draft.probe import NoRule, template, with_field
from growkern.growth.draft.sizes import Draft, units_of
from growkern.growth.draft.watch import Call, NormFacts, norm_facts, same

# role of a norm -> the spaces that it reads and writes
SPACES = {
    "pre": "stream>normed",
    "output": "stream>stream",
    "post": "stream>stream",
    "embedding": "stream>stream",
    "final": "stream>final",
    "head": "head_pre>head",
}
QUERY, KEY = "^q|query", "^k|key"


def _roles(
    draft: Draft, layers: dict[int, tuple[Tensor, Tensor]]
) -> Iterator[tuple[Call, NormFacts, str]]:
    """The calls of norms of the stream, with what they compute and their role.

    Norms of anything else, of queries, keys or units, get their rows here.
    """
    calls = draft.watch.calls
    for number, call in enumerate(calls):
        x, y = call.x, call.y
        if x is None or y is None or x.shape != y.shape:
            continue
        facts = norm_facts(call.module, x.shape[-1])
        if facts is None:
            continue
        match = re.match(re.escape(draft.stack) + r"\.(\d+)\.", call.name)
        # what modules of the same layer, or of all, have returned so far
        own = match[0] if match else f"{draft.stack}."
        before = [c for c in calls[:number] if c.name.startswith(own)]
        if match is None:
            is_final = same(x, layers[len(layers) - 1][1])
            yield call, facts, "embedding" if not before else "final" if is_final else "head"
            continue
        is_inner = any(same(x, c.y) and re.search(NAMED, c.name) for c in before)
        if is_inner or x.shape[-1] != draft.width:
            inner_norm(draft, call.name, x.shape[-1])
            continue
        start, end = layers[int(match[1])]
        is_behind = any(same(x, c.y) for c in before) and not any(
            same(x - start, c.y) for c in before
        )
        yield call, facts, "post" if same(y, end) else "output" if is_behind else "pre"


def inner_norm(draft: Draft, name: str, width: int) -> None:
    """A norm of queries or keys, of every head alone or of all together, or of the FFN's units."""
    last, spaces = name.rsplit(".", 1)[-1], draft.spaces
    weight = draft.probe.base.get(f"{name}.weight")
    units = weight[0] if weight else 0
    if not re.search("att", name, re.I) and units not in (draft.width, draft.head_dim):
        key = units_of(draft, draft.probe.fields(f"{name}.weight", 0), units)
        spaces[key]["weighted"] = True
        spaces[f"{key}_normed"] = {"kind": "units", "size": spaces[key]["size"]}
        draft.normed_units[key] = f"{key}_normed"
        draft.rows[template(name)] = {"norm": f"{key}>{key}_normed"}
        return
    part = "query" if re.search(QUERY, last) else "key" if re.search(KEY, last) else None
    if part is None or weight is None or len(weight) > 1:
        raise NoRule(f"{template(name)} is a norm of {width} entries inside a block")
    short, heads = part[0], spaces[part[0]]["heads"]
    if units == draft.head_dim:
        spaces["head_pre"] = {"kind": "head", "part": "before_norm"}
        spaces[f"head_{short}"] = {"kind": "head", "part": part}
        spaces[short] = {"kind": "heads", "heads": heads, "part": "before_norm"}
        draft.rows[template(name)] = {"norm": f"head_pre>head_{short}"}
    elif units == width:
        pre = {"kind": "heads", "heads": heads, "part": "before_norm", "weighted": True}
        spaces[f"{short}_pre"] = pre
        draft.rows[template(name)] = {"norm": f"{short}_pre>{short}"}
    else:
        raise NoRule(f"{template(name)} has {units} entries, a head {draft.head_dim}")


def find_norms(draft: Draft, layers: dict[int, tuple[Tensor, Tensor]]) -> list[tuple[Tensor, str]]:
    """Write [norm] and the rows of norms. Returns what they write, and its space."""
    found = [*_roles(draft, layers)]
    kinds = {(facts.kind, facts.plus_one) for _, facts, _ in found}
    if len(kinds) != 1:
        raise NoRule(f"norms of {len(kinds)} kinds: {', '.join(sorted(kind for kind, _ in kinds))}")
    kind, plus_one = kinds.pop()
    inside = {role for _, _, role in found} & {"pre", "post", "output"}
    is_post = "post" in inside
    place = "post" if is_post else "sandwich" if len(inside) == 2 else min(inside, default="pre")
    draft.norm = {
        "kind": kind,
        "placement": place,
        "eps": _eps(draft, [facts for _, facts, _ in found]),
    }
    if plus_one:
        draft.norm["plus_one"] = True
    written = []
    for call, _, seen in found:
        role = "post" if is_post and seen in ("pre", "output") else seen
        _norm_row(draft, call.name, role, call.module)
        if call.y is not None:
            written.append((call.y, SPACES[role].partition(">")[2]))
    names = [call.name for call, _, _ in found]
    first = [template(name) for name in names if name.startswith(f"{draft.stack}.0.")]
    if is_post:
        *draft.inner_norms, draft.outer_norm = first
        for name in draft.inner_norms:
            draft.rows[name]["extra"] = "zero"
        draft.rows[draft.outer_norm]["extra"] = "carry"
    return written


def _norm_row(draft: Draft, name: str, role: str, module: nn.Module) -> None:
    row = {"norm": SPACES[role]}
    if role == "embedding":
        row["extra"] = "carry"
    if role == "head":
        draft.spaces["head_pre"] = {"kind": "units", "size": "stream", "activated": True}
        draft.spaces["head"] = {"kind": "tied_output", "of": "stream", "untied": "head_pre"}
    if any(True for _ in module.parameters()):
        draft.rows[template(name)] = row
    elif role == "output":
        raise NoRule("a norm without weights behind a block")


def _eps(draft: Draft, facts: list[NormFacts]) -> str | float:
    """The field that holds eps, or the number."""
    value = next((f.eps for f in facts if f.eps), 1e-5)
    for key, given in draft.config.to_dict().items():
        if "eps" in key and isinstance(given, float) and given == value:
            with torch.device("meta"):
                model = draft.cls._from_config(with_field(draft.config, key, 0.0123))
            if any(0.0123 in vars(module).values() for module in model.modules()):
                return key
    draft.assumed.append(f"eps={value:g} of the norms follows no field")
    return float(value)
