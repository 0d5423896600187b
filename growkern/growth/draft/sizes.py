"""The sizes and spaces of a draft: which field of the config counts what."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from growkern.errors import GrowthError
from growkern.growth.draft.probe import CHOSEN, KEY_HEADS, LAYERS, probed, template, watch

Row = dict[str, Any]
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
        layers: what enters and leaves every layer.
        width, heads, key_heads, head_dim: entries of the stream, heads, and entries of one.
        repeats: that of its classes, but for fields that equal the stream's.
    """

    def __init__(self, cls: Any, config: Any) -> None:
        self.cls, self.config = cls, config
        self.model, self.ids, self.calls = watch(cls, config)
        self.base, self.ties, self.changed = probed(cls, config)
        base, self.modules = cls.base_model_prefix, dict(self.model.named_modules())
        self.prefix = f"{base}." if hasattr(self.model, base) else ""
        lists = {n: m for n, m in self.modules.items() if isinstance(m, nn.ModuleList)}
        stacks = [n for n, m in lists.items() if len(m) == LAYERS and not re.search(r"\.\d+\.", n)]
        self.now = next((name for name in self.base if template(name) != name), "")
        if len(stacks) != 1:
            raise self.error(f"{len(stacks)} lists of layers; a draft has one")
        self.stack, calls = f"{stacks[0]}.", {call.name: call for call in self.calls}
        blocks = [calls[f"{self.stack}{layer}"] for layer in range(LAYERS)]
        self.layers = [(block.x, block.y) for block in blocks]
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
        mapped = getattr(config, "attribute_map", {})
        self.sizes: dict[str, Any] = {key: mapped.get(name, name) for key, name in USUAL.items()}
        stream, heads = self.sizes["stream"], self.sizes["q_heads"]
        self.width, self.heads = getattr(config, stream), getattr(config, heads)
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
        self.value_dim = config.v_head_dim if self.parts else self.head_dim

    def fields(self, name: str, axis: int) -> list[str]:
        """The fields that move an axis of a tensor."""
        ends = (self.base[name][axis],), ()
        found = {field: new.get(name, ())[axis:][:1] for field, new in self.changed.items()}
        return [field for field, end in found.items() if end not in ends]

    def error(self, why: str) -> GrowthError:
        """An error about the tensor at hand, with its name and shape."""
        shape = self.base.get(f"{self.now}.weight", self.base.get(self.now, ()))
        return GrowthError(f"{template(self.now)} {list(shape)}: {why}")

    def place(self, name: str) -> tuple[str, int | None]:
        """The name of a tensor in a table, and the number of its layer."""
        layer = re.match(re.escape(self.stack) + r"(\d+)\.", name)
        return template(name).removeprefix(self.prefix), int(layer[1]) if layer else None

    def set_row(self, name: str, row: Row) -> None:
        """Give a tensor, or the norm of that name, its row."""
        own, layer = self.place(name)
        self.rows.setdefault(own, {})[layer] = row
        self.lm |= set() if name.startswith(self.prefix) else {own}

    def size_key(self, fields: Sequence[str], length: int) -> str:
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

    def units(self, fields: Sequence[str], length: int) -> str:
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

    def experts(self, fields: Sequence[str]) -> str | None:
        """The space of experts, if an axis has an entry for each of them; not for their units."""
        names = [f for f in fields if "expert" in f]
        if not names or any(re.search("size|dim", f) for f in fields):
            return None
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
        return "experts"
