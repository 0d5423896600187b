"""A draft, and the walk through the calls of a tiny model that writes its rows."""

from __future__ import annotations

import math
import re
from typing import Any

from torch import Tensor, nn

from growkern.errors import GrowthError
from growkern.growth.draft.probe import CHOSEN, KEY_HEADS, LAYERS, Call, probed, same, watch
from growkern.growth.own_table import NormFacts, norm_facts

Row = dict[str, Any]
# in the name of a tensor, first that of its layer
NUMBER = r"\.\d+\."
# sizes that every model has, by the names that transformers maps to a config's own
USUAL = {"vocab": "vocab_size", "stream": "hidden_size", "layers": "num_hidden_layers"}
USUAL |= {"q_heads": "num_attention_heads"}
# parts of a head that have sizes of their own, where keys and values come from a latent vector
PARTS = {"nope": "qk_nope_head_dim", "head_dim": "qk_rope_head_dim", "value": "v_head_dim"}
LATENT: dict[str, Row] = {
    "nope_query": {"kind": "head", "size": "nope", "part": "query"},
    "turning_query": {"kind": "head", "size": "head_dim", "part": "query"},
    "nope_key": {"kind": "head", "size": "nope", "part": "key"},
    "turning_key": {"kind": "fixed", "size": "head_dim"},
    "value": {"kind": "head", "size": "value"},
    "q": {"kind": "heads", "heads": "q_heads", "entries": "nope_query|turning_query"},
    "kv": {"kind": "heads", "heads": "q_heads", "entries": "nope_key|value"},
    "attn": {"kind": "heads", "heads": "q_heads", "entries": "value"},
}
NAMED = r"(^|[._wW])(q|k|v|query|key|value)(_proj|_lin|_layer|_linear|_global)?\d?$"
# names of the matrices of experts that write the stream
LAST = "down|w2|output|wo"
# role of a norm -> the spaces that it reads and writes, if not those of the stream
SPACES = {"pre": "stream>normed", "final": "stream>final", "head": "head_pre>head"}


class Draft:
    """A table that is being drafted, and what it is drafted from.

    Attributes:
        base: name -> shape of every tensor.
        ties: names that share the storage of another where tie_word_embeddings is true.
        rows: name of a tensor in a table (of a norm: without .weight) -> number of the layer, None
            outside the layers -> its row.
        now: the module or tensor at hand.
        lm: the names in `rows` that do not begin with the prefix of the body.
        stack: how names in the layers begin.
        behind: norm that the stream is added to -> the modules before it.
        layers: the calls of all layers.
        width, heads, key_heads, head_dim: entries of the stream, heads, and entries of one.
        equal: fields that have to equal the stream's.
        repeats: that of its classes.
    """

    def __init__(self, cls: Any, config: Any) -> None:
        self.cls, self.config = cls, config
        self.model, self.ids, self.calls = watch(cls, config)
        self.base, self.ties, self.changed = probed(cls, config)
        base, self.modules = cls.base_model_prefix, dict(self.model.named_modules())
        self.prefix = f"{base}." if hasattr(self.model, base) else ""
        lists = {n: m for n, m in self.modules.items() if isinstance(m, nn.ModuleList)}
        stacks = [n for n, m in lists.items() if len(m) == LAYERS and not re.search(NUMBER, n)]
        self.now = next((name for name in self.base if re.search(NUMBER, name)), "")
        if len(stacks) != 1:
            raise self.error(f"{len(stacks)} lists of layers; a draft has one")
        self.stack, calls = f"{stacks[0]}.", {call.name: call for call in self.calls}
        self.layers = [calls[f"{self.stack}{layer}"] for layer in range(LAYERS)]
        inner = self.model.get_input_embeddings()
        self.embedding = next(n for n, m in self.modules.items() if m is inner) + ".weight"
        self.rows: dict[str, dict[int | None, Row]] = {}
        self.now = self.embedding
        self.lm = set[str]()
        self.norm: dict[str, Any] = {}
        self.behind: dict[str, set[str]] = {}
        self._find_sizes()
        keys = "kv_heads" if "kv_heads" in self.sizes else "q_heads"
        self.spaces: dict[str, dict[str, Any]] = {
            "stream": {"kind": "stream"},
            "normed": {"kind": "normed", "of": "stream"},
            "q": {"kind": "heads", "heads": "q_heads", "part": "query"},
            "k": {"kind": "heads", "heads": keys, "part": "key"},
            "v": {"kind": "heads", "heads": keys},
            "attn": {"kind": "heads", "heads": "q_heads"},
            "final": {"kind": "tied_output", "of": "stream", "untied": "normed"},
        }
        self.spaces |= LATENT if self.parts else {}

    def _find_sizes(self) -> None:
        """The sizes of [config] that every model has."""
        base, config, fields = self.base, self.config, self.fields
        self.sizes: dict[str, Any] = {k: config.attribute_map.get(v, v) for k, v in USUAL.items()}
        stream, heads = self.sizes["stream"], self.sizes["q_heads"]
        self.width, self.heads = config.hidden_size, config.num_attention_heads
        if base[self.embedding][1] != self.width:
            raise self.error(f"its entries are not those of {stream}")
        self.key_heads, self.head_dim = self.heads, self.width // self.heads
        axes = [(name, i) for name, shape in base.items() for i in range(len(shape))]
        moved = {field for axis in axes for field in fields(*axis)}
        self.repeats: dict[str, str] = {}
        self.parts = PARTS if moved.issuperset(PARTS.values()) else {}
        self.sizes |= self.parts
        if self.parts:
            self.head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
            self.sizes["query_key"] = {"default": "qk_nope_head_dim + qk_rope_head_dim"}
            # every head has a key of its own, which no tensor shows
            for field in (f for f in config.to_dict() if re.fullmatch(KEY_HEADS, f)):
                setattr(config, field, self.heads)
                self.repeats[field] = "q_heads"
        elif "head_dim" in moved:
            self.head_dim = getattr(config, "head_dim", None) or self.head_dim
            computed = {"default": f"{stream} / {heads}"}
            if any("head_dim" in fields(name, i) for name, i in axes if i == 1):
                self.sizes["head_dim"] = {"field": "head_dim", **computed}
            else:
                # no matrix behind attention reads its heads: only stream / heads fits
                self.sizes["of_head"], self.repeats = computed, {"head_dim": "of_head"}
        for field in (f for f in moved if re.fullmatch(KEY_HEADS, f)):
            self.sizes["kv_heads"], self.key_heads = field, getattr(config, field)
        # embeddings may have a field of their own that must equal the stream's
        others = (f for f in fields(self.embedding, 1) if f != stream)
        self.equal = [field for field in others if getattr(config, field) == self.width]
        self.repeats |= dict.fromkeys(self.equal, "stream")
        self.value_dim = config.v_head_dim if self.parts else self.head_dim

    def fields(self, name: str, axis: int) -> list[str]:
        """The fields that move an axis of a tensor."""
        ends = (self.base[name][axis],), ()
        found = {field: new.get(name, ())[axis:][:1] for field, new in self.changed.items()}
        return [field for field, end in found.items() if end not in ends]

    def error(self, why: str) -> GrowthError:
        """An error about the tensor at hand, with its name and shape."""
        shape = self.base.get(f"{self.now}.weight", self.base.get(self.now, ()))
        return GrowthError(f"{re.sub(NUMBER, '.{l}.', self.now, count=1)} {list(shape)}: {why}")

    def place(self, name: str) -> tuple[str, int | None]:
        """The name of a tensor in a table, and the number of its layer."""
        layer = re.match(re.escape(self.stack) + r"(\d+)\.", name)
        own = re.sub(NUMBER, ".{l}.", name, count=1).removeprefix(self.prefix)
        return own, int(layer[1]) if layer else None

    def set_row(self, name: str, row: Row) -> None:
        """Give a tensor, or the norm of that name, its row."""
        own, layer = self.place(name)
        self.rows.setdefault(own, {})[layer] = row
        self.lm |= set() if name.startswith(self.prefix) else {own}

    def size_key(self, fields: list[str], length: int) -> str:
        """The key in [config] of a size that is none of attention: of a field, or of a product."""
        if len(fields) != 1:
            key = "_by_".join(fields) or f"n{length}"
            self.sizes[key] = {"default": " * ".join(fields)} if fields else length
            # each of them may grow
            for field in fields:
                self.size_key([field], getattr(self.config, field))
            return key
        name, value = fields[0], getattr(self.config, fields[0])
        for key, size in self.sizes.items():
            if name == (size.get("field") if isinstance(size, dict) else size):
                return key
        is_first = "position" in name and "positions" not in self.sizes
        key, plus = "positions" if is_first else name, value and length - value
        self.sizes[key] = {"field": name, "plus": plus, "reserved": plus} if plus else name
        if value is None:
            times = f"{length // self.width} * {self.sizes['stream']}"
            self.sizes[key] = {"field": name, "default": times}
        return key

    def units(self, fields: list[str], length: int) -> str:
        """The space of the units on an axis, or several: "ffn|ffn"."""
        own = [field for field in fields if field != self.sizes["stream"]]
        # a field without a value was set
        values = [getattr(self.config, field) or length for field in own] or [self.width]
        times, rest = divmod(length, size := math.prod(values))
        if rest or not fields or (times == 1 and not own):
            names = " * ".join(fields) or "a field"
            raise GrowthError(f"{length} units are no multiple of {names}")
        if own:
            key = self.size_key(own, size)
        else:
            self.sizes[key := "ffn"], times = {"default": f"{times} * {fields[0]}"}, 1
        self.spaces.setdefault(key, {"kind": "units", "size": key})
        return "|".join([key] * times)

    def experts(self, fields: list[str]) -> bool:
        """True if an axis has an entry for each expert, not for its units; experts are a space."""
        names = [f for f in fields if "expert" in f]
        if not names or any(re.search("size|dim", f) for f in fields):
            return False
        numbers = {k for k, v in self.config.to_dict().items() if type(v) is int}
        chosen = [k for k in numbers if re.fullmatch(CHOSEN, k)]
        if not chosen:
            raise GrowthError("no field says how many experts are chosen")
        if "experts" not in self.spaces:
            self.sizes["experts"] = {"field": names[0], "follows": "nothing"}
            self.sizes["chosen"] = chosen[0]
            self.spaces["experts"] = {"kind": "experts", "size": "experts", "chosen": "chosen"}
            if loss := next((k for k in self.config.to_dict() if "aux_loss_coef" in k), None):
                self.spaces["experts"]["averaged"] = loss
            if {"n_group", "topk_group"} <= numbers:
                self.sizes |= {"groups": "n_group", "chosen_groups": "topk_group"}
                self.spaces["experts"]["groups"] = ["groups", "chosen_groups"]
        return True


class Walk:
    """Writes the rows of a draft: of norms and matrices by their calls, then of all others."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        # what is known to have been written, and its space
        self.written = [(value, "stream") for c in draft.layers for value in (c.x, c.y)]
        # the role of each norm of the stream, and what it computes
        self.norms: list[tuple[str, NormFacts]] = []
        # the modules called since the last of them
        self.front: set[str] = set()
        found = list[tuple[Call, NormFacts | None]]()
        for call in draft.calls:
            draft.now = call.name
            found.append((call, norm_facts(call.module, call.x.shape[-1])))
        norms, ends = (
            [call.y for call, facts in found if facts],
            [layer.y for layer in draft.layers],
        )
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
        # what the first norm of the stream computes, and where all lie
        inside = {role for role, _ in self.norms} & {"pre", "post", "output"}
        place = "sandwich" if len(inside) == 2 else min(inside, default="pre")
        # what a block reads
        self.source = "normed" if place in ("pre", "sandwich") else "stream"
        kind, plus_one, eps = self.norms[0][1]
        field = next((k for k, v in draft.config.to_dict().items() if "eps" in k and v == eps), eps)
        draft.norm = {"kind": kind, "placement": place, "eps": field, "plus_one": plus_one}
        for name, shape in draft.base.items():
            draft.now = name
            places = map(draft.place, (name, name.rpartition(".")[0]))
            if not any(layer in draft.rows.get(own, ()) for own, layer in places):
                draft.set_row(name, self._other_row(name, shape))
        for name, owner in draft.ties.items():
            for row in draft.rows.get(draft.place(name)[0], {}).values():
                row["tied"] = owner

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
            is_final = same(call.x, draft.layers[-1].y)
            is_first = any(c.name.startswith(draft.stack) for c in calls)
            role = "embedding" if is_first else "final" if is_final else "head"
        else:
            later = (c.x for c in calls if draft.place(c.name)[1] == layer)
            is_read = any(same(call.y, x) for x in later)
            role = "post" if self.is_post else "pre" if is_read else "output"
        row = {"norm": SPACES.get(role, "stream>stream")}
        if role in ("post", "embedding"):
            # extra coordinates carry the mean through the FFN, to the norm behind it
            is_end = layer is None or same(call.y, draft.layers[layer].y)
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
        if in_attention and length == attended and re.search("gate|^g", module.rpartition(".")[2]):
            return "write:attn"
        if length == draft.width and {sizes["stream"], *draft.equal}.intersection(fields):
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
