"""Where the norms of a draft lie: before a block, behind it, or inside, by their inputs."""

from __future__ import annotations

import re

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


class Roles:
    """Finds the role of every norm in one run, call by call."""

    def __init__(self, draft: Draft, layers: dict[int, tuple[Tensor, Tensor]]) -> None:
        self.draft, self.layers = draft, layers
        self.modules = dict(draft.watch.model.named_modules())
        self.roles: dict[str, str] = {}
        self.written: dict[str, Tensor] = {}
        self.facts: list[NormFacts] = []
        # layer -> what its modules have returned so far
        self._returned: dict[int, list[tuple[str, Tensor]]] = {}

    def find(self) -> None:
        """Look at all calls, and keep roles, facts and what norms write."""
        for call in self.draft.watch.calls:
            match = re.match(re.escape(self.draft.stack) + r"\.(\d+)(\.|$)", call.name)
            layer = int(match[1]) if match else None
            self._look_at(call, layer)
            if call.y is not None and layer is not None and match and match[2]:
                self._returned.setdefault(layer, []).append((call.name, call.y))
        if not self.facts:
            raise NoRule("no norms")

    def _look_at(self, call: Call, layer: int | None) -> None:
        x, y, draft = call.x, call.y, self.draft
        if x is None or y is None or x.shape != y.shape:
            return
        facts = norm_facts(call.module, x.shape[-1])
        if facts is None:
            return
        if layer is not None and self._is_inner(x, layer):
            inner_norm(draft, call.name, x.shape[-1])
            return
        self.facts.append(facts)
        role = self._outer_role(x) if layer is None else self._role(x, y, layer)
        self.roles[call.name], self.written[call.name] = role, y

    def _is_inner(self, x: Tensor, layer: int) -> bool:
        """Queries, keys or units enter it, not the stream."""
        if x.shape[-1] != self.draft.width:
            return True
        before = self._returned.get(layer, [])
        return any(same(x, y) and not self._writes_stream(name) for name, y in before)

    def _writes_stream(self, name: str) -> bool:
        weight = getattr(self.modules[name], "weight", None)
        if weight is None or weight.ndim != 2:
            return True
        return self.draft.width in weight.shape and not re.search(NAMED, name)

    def _role(self, x: Tensor, y: Tensor, layer: int) -> str:
        start, end = self.layers[layer]
        if same(y, end):
            return "post"
        before = [out for _, out in self._returned.get(layer, [])]
        adds = any(out.shape == x.shape and same(x - start, out) for out in before)
        return "output" if not adds and any(same(x, out) for out in before) else "pre"

    def _outer_role(self, x: Tensor) -> str:
        if not self._returned:
            return "embedding"
        return "final" if same(x, self.layers[len(self.layers) - 1][1]) else "head"


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
    roles = Roles(draft, layers)
    roles.find()
    kinds = {(facts.kind, facts.plus_one) for facts in roles.facts}
    if len(kinds) > 1:
        raise NoRule(f"norms of several kinds: {', '.join(sorted(kind for kind, _ in kinds))}")
    kind, plus_one = kinds.pop()
    inside = [role for role in roles.roles.values() if role in ("pre", "post", "output")]
    is_post = "post" in inside
    place = "post" if is_post else "output" if {*inside} == {"output"} else "pre"
    place = "sandwich" if not is_post and {*inside} == {"pre", "output"} else place
    draft.norm = {"kind": kind, "placement": place, "eps": _eps(draft, roles.facts)}
    if plus_one:
        draft.norm["plus_one"] = True
    written = []
    for name, found in roles.roles.items():
        role = "post" if is_post and found in ("pre", "output") else found
        _norm_row(draft, name, role, roles.modules[name])
        written.append((roles.written[name], SPACES[role].partition(">")[2]))
    first = [template(n) for n in roles.roles if n.startswith(f"{draft.stack}.0.")]
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
