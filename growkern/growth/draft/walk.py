"""One walk through the calls of a tiny model: where norms lie, and what matrices read and write."""

from __future__ import annotations

import re

from torch import Tensor, nn

from growkern.errors import GrowthError
from growkern.growth.draft.probe import LAYERS, Call, same
from growkern.growth.draft.sizes import Draft, Row
from growkern.growth.own_table import NormFacts, norm_facts

NAMED = r"(^|[._wW])(q|k|v|query|key|value)(_proj|_lin|_layer|_linear|_global)?\d?$"
GATE = "gate|^g"
# names of the matrices of experts that write the stream
LAST = "down|w2|output|wo"
# role of a norm -> the spaces that it reads and writes, if not those of the stream
SPACES = {"pre": "stream>normed", "final": "stream>final", "head": "head_pre>head"}


class Walk:
    """Writes the rows of a draft: of norms and matrices by their calls, then of all others."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        # what is known to have been written, and its space
        self.written = [(value, "stream") for pair in draft.layers for value in pair]
        # the role of each norm of the stream, and what it computes
        self.norms: list[tuple[str, NormFacts]] = []
        # the modules called since the last of them
        self.front: set[str] = set()
        found = list[tuple[Call, NormFacts | None]]()
        for call in draft.calls:
            draft.now = call.name
            found.append((call, norm_facts(call.module, call.x.shape[-1])))
        norms, ends = [call.y for call, facts in found if facts], [end for _, end in draft.layers]
        # where a norm returns what its layer returns
        self.is_post = any(same(y, end) for y in norms for end in ends)
        for number, (call, facts) in enumerate(found):
            draft.now = call.name
            self.front.add(draft.place(call.name)[0])
            is_matrix = len(draft.base.get(f"{call.name}.weight", ())) == 2
            if facts and call.x.shape == call.y.shape and "index" not in call.name:
                # the sizes of an indexer stay
                self._norm(draft.calls[number:], facts)
            elif is_matrix and not isinstance(call.module, nn.Embedding):
                self._matrix(call)
        self._describe()
        for name, shape in draft.base.items():
            draft.now = name
            places = map(draft.place, (name, name.rpartition(".")[0]))
            if not any(layer in draft.rows.get(own, ()) for own, layer in places):
                draft.set_row(name, self._other_row(name, shape))
        for name, owner in draft.ties.items():
            for row in draft.rows.get(draft.place(name)[0], {}).values():
                row["tied"] = owner

    def _describe(self) -> None:
        """[norm]: what the first norm of the stream computes, and where all lie."""
        draft = self.draft
        inside = {role for role, _ in self.norms} & {"pre", "post", "output"}
        place = "sandwich" if len(inside) == 2 else min(inside, default="pre")
        # what a block reads
        self.source = "normed" if place in ("pre", "sandwich") else "stream"
        kind, plus_one, eps = self.norms[0][1]
        field = next((k for k, v in draft.config.to_dict().items() if "eps" in k and v == eps), eps)
        draft.norm = {"kind": kind, "placement": place, "eps": field, "plus_one": plus_one}

    def _source(self, x: Tensor) -> str | None:
        """The space of a value that enters a module; None: nothing known wrote it."""
        return next((space for value, space in self.written if same(value, x)), None)

    def _norm(self, calls: list[Call], facts: NormFacts) -> None:
        """The row of the first of these calls, a norm."""
        draft, call, space = self.draft, calls[0], self._source(calls[0].x)
        own, layer = draft.place(call.name)
        is_inner = draft.spaces.get(space or "", {}).get("kind") in ("heads", "units")
        if layer is not None and (is_inner or call.x.shape[-1] != draft.width):
            self._inner_norm(call, space)
            return
        if layer is None:
            is_final = same(call.x, draft.layers[-1][1])
            is_first = any(c.name.startswith(draft.stack) for c in calls)
            role = "embedding" if is_first else "final" if is_final else "head"
        else:
            later = (c.x for c in calls if draft.place(c.name)[1] == layer)
            is_read = any(same(call.y, x) for x in later)
            role = "post" if self.is_post else "pre" if is_read else "output"
        row = {"norm": SPACES.get(role, "stream>stream")}
        if role in ("post", "embedding"):
            # extra coordinates carry the mean through the FFN, to the norm behind it
            is_end = layer is None or same(call.y, draft.layers[layer][1])
            row["extra"] = "carry" if is_end else "zero"
        if any(True for _ in call.module.parameters()):
            draft.set_row(call.name, row)
        if role == "output":
            draft.behind.setdefault(own, set()).update(self.front)
        self.front = set()
        self.norms.append((role, facts))
        self.written.append((call.y, row["norm"].partition(">")[2]))

    def _inner_norm(self, call: Call, space: str | None) -> None:
        """A norm of queries or keys, of each head or of all together, or of the FFN's units."""
        draft, name, spaces = self.draft, call.name, self.draft.spaces
        units, last = draft.base.get(f"{name}.weight", (0,))[-1], name.rpartition(".")[2]
        fields = draft.fields(f"{name}.weight", 0) if units else []
        if fields and not any(re.search("head|hidden_size|dim", field) for field in fields):
            space = space or draft.units(fields, units)
        elif last[0] in "qk":
            space = last[0]
        if space not in ("q", "k", *draft.sizes) or units not in (draft.head_dim, call.x.shape[-1]):
            raise GrowthError(f"a norm of {units or call.x.shape[-1]} entries inside a block")
        written, after = f"{space}_normed", {**spaces[space]}
        if space in draft.sizes:
            spaces[space]["weighted"] = True
        elif units == draft.head_dim:
            spaces[space]["part"] = "before_norm"
            after = {"kind": "head", "part": "query" if space == "q" else "key"}
            spaces["head_pre"], space = {"kind": "head", "part": "before_norm"}, "head_pre"
        else:
            spaces[space] |= {"part": "before_norm", "weighted": True}
        spaces.setdefault(written, after)
        draft.set_row(name, {"norm": f"{space}>{written}"})
        self.written.append((call.y, written))

    def _matrix(self, call: Call) -> None:
        """The row of a matrix that a module multiplies with, and of the bias beside it."""
        draft, name, spaces = self.draft, call.name, self.draft.spaces
        weight, known = f"{name}.weight", self._source(call.x)
        # weights of GPT-2's kind of module have inputs first
        turn = -1 if type(call.module).__name__ == "Conv1D" else 1
        shape, ends = draft.base[weight][::turn], (0, 1)[::turn]
        in_attention = re.search("att", name.rpartition(".")[0], re.I)
        is_output = in_attention and shape[1] == draft.heads * draft.value_dim
        read = known or ("attn" if is_output else self._axis(weight, ends[1]).split(":")[-1])
        if not name.startswith(draft.stack) and shape == (draft.width, draft.width):
            spaces["head_pre"] = {"kind": "units", "size": "stream", "activated": True}
            spaces["head"] = {"kind": "tied_output", "of": "stream", "untied": "head_pre"}
            own = "write:head_pre"
        else:
            own = "write:stream" if read == "attn" else self._axis(weight, ends[0])
        if own == "vocab" and known is None and "final" in dict(self.norms):
            # something lies between the last norm and the head, such as a factor
            read = "final"
        draft.set_row(weight, {"axes": [own, f"read:{read}"][::turn]})
        if f"{name}.bias" in draft.base:
            draft.set_row(f"{name}.bias", {"axes": [own]})
        space = own.removeprefix("write:")
        if spaces.get(space, {}).get("kind") in ("heads", "units"):
            self.written.append((call.y, space))

    def _axis(self, name: str, index: int) -> str:
        """An axis of a tensor, as one that is written, by its length and the fields it follows."""
        draft, sizes, fields = self.draft, self.draft.sizes, self.draft.fields(name, index)
        length, module = draft.base[name][index], re.sub(r"\.(weight|bias)$", "", name)
        attended, keys = (n * draft.head_dim for n in (draft.heads, draft.key_heads))
        if draft.experts(fields):
            return "write:experts"
        if any(field.startswith("index_") for field in fields):
            # an indexer chooses tokens: other sizes of it may choose others
            key = draft.size_key(fields, length)
            sizes.update({field: {"field": field, "fixed": True} for field in fields})
            return key
        if sizes["vocab"] in fields:
            return "vocab"
        parts = {part for part, field in draft.parts.items() if field in fields}
        if parts == {"head_dim"}:
            # the part of a key that turns is one for all heads
            own = [field for field in fields if "head_dim" not in field]
            return f"write:{draft.units(own, length - draft.config.qk_rope_head_dim)}|turning_key"
        if "nope" in parts:
            return "write:q" if "head_dim" in parts else "write:kv"
        if (named := re.search(NAMED, module)) and length in (attended, keys):
            return f"write:{named[2][0]}"
        in_attention, pair = re.search("att", module.rpartition(".")[0], re.I), 2 * draft.head_dim
        if in_attention and length in (attended + 2 * keys, attended + pair):
            if length != attended + 2 * keys:
                # one key and one value for all heads, which no field says
                sizes["kv_heads"] = 1
                draft.spaces["k"]["heads"] = draft.spaces["v"]["heads"] = "kv_heads"
            # the order is assumed; the check confirms it
            return "write:q|k|v"
        if in_attention and length == attended and re.search(GATE, module.rpartition(".")[2]):
            return "write:attn"
        # embeddings may have a field of their own that must equal the stream's
        widths = {sizes["stream"], *draft.fields(draft.embedding, 1)}
        if length == draft.width and widths.intersection(fields):
            return "write:stream"
        if sizes["q_heads"] in fields and length in (draft.heads, draft.heads * LAYERS):
            # a number for each head, or for those of all layers
            draft.spaces["each"] = {"kind": "heads", "heads": "q_heads", "width": 1}
            draft.spaces["all"] = {"kind": "layers", "size": "layers", "entries": "each"}
            return "write:each" if length == draft.heads else "read:all"
        if length == 1 or isinstance(draft.modules.get(module), nn.Embedding):
            return draft.size_key(fields, length)
        return f"write:{draft.units(fields, length)}"

    def _other_row(self, name: str, shape: tuple[int, ...]) -> Row:
        """The row of a tensor that no watched module multiplies with."""
        leaf = name.rpartition(".")[2]
        axes = ["*"] if leaf == "inv_freq" else [self._axis(name, i) for i in range(len(shape))]
        if "write:experts" not in axes:
            weight = dict(self.draft.model.named_parameters()).get(name)
            if axes == ["*"] or (weight is not None and not weight.requires_grad):
                # the class computes it, such as a table of sines
                return {"axes": ["*"] * len(shape), "computed": True}
            module = self.draft.modules.get(name.rpartition(".")[0])
            if isinstance(module, nn.Linear) and shape[1:] == (self.draft.width,):
                # no token of this input enters it
                axes[1] = f"read:{self.source}"
            return {"axes": axes}
        if len(axes) == 1 and re.search("correction|score", name):
            self.draft.spaces["experts"]["asleep"] = self.draft.place(name)[0]
            return {"axes": axes, "keep": "float32", "fallback": "zero"}
        # a matrix of each expert, the router, or biases
        is_matrix = len(axes) == 3
        for i, axis in enumerate(axes[1:], 1):
            is_stream = axis == "write:stream"
            if (is_stream != bool(re.search(LAST, leaf))) if is_matrix else "bias" not in leaf:
                axes[i] = f"read:{self.source}" if is_stream else axis.replace("write", "read")
        return {"axes": axes}
