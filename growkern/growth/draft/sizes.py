"""The sizes and spaces of a draft: which field of the config counts what."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from growkern.growth.draft.probe import NoRule, Probe, template
from growkern.growth.draft.watch import Watch

CHOSEN = r"experts_per_tok|topk|moe_top_?k|moe_k"


@dataclass
class Draft:
    """A table that is being drafted, and what it is drafted from.

    Attributes:
        rows: template of a tensor (of a norm: without .weight) -> its row, or rows.
        stack: name of the list of layers.
        prefix: how names of the body begin.
        assumed: what no measurement shows, one line each.
    """

    cls: Any
    config: Any
    probe: Probe
    watch: Watch
    rows: dict[str, Any] = field(default_factory=dict)
    spaces: dict[str, dict[str, Any]] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    refuse: dict[str, dict[str, Any]] = field(default_factory=dict)
    norm: dict[str, Any] = field(default_factory=dict)
    inner_norms: list[str] = field(default_factory=list)
    outer_norm: str = ""
    stack: str = ""
    prefix: str = ""
    assumed: list[str] = field(default_factory=list)
    # the space that a norm inside the FFN writes, by the one that it reads
    normed_units: dict[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Where norms lie: "pre", "post", "sandwich" or "output"."""
        return str(self.norm["placement"])

    @property
    def source(self) -> str:
        """The space that a block reads."""
        return "normed" if self.place in ("pre", "sandwich") else "stream"

    @property
    def width(self) -> int:
        """Entries of the stream."""
        return self.probe.base[self.embedding][1]

    @property
    def layers(self) -> int:
        return int(getattr(self.config, self.sizes["layers"]))

    @property
    def heads(self) -> int:
        return int(getattr(self.config, self.sizes["q_heads"]))

    @property
    def key_heads(self) -> int:
        field_ = self.sizes.get("kv_heads", self.sizes["q_heads"])
        return field_ if isinstance(field_, int) else int(getattr(self.config, field_))

    @property
    def head_dim(self) -> int:
        own = self.sizes.get("head_dim")
        value = getattr(self.config, own["field"], None) if own else None
        return value or self.width // self.heads

    @property
    def embedding(self) -> str:
        """The weight of the token embedding."""
        inner = self.watch.model.get_input_embeddings()
        modules = self.watch.model.named_modules()
        return next(name for name, module in modules if module is inner) + ".weight"

    def unit(self, key: str) -> str:
        """A space of units, named like the size that counts them."""
        self.spaces.setdefault(key, {"kind": "units", "size": key})
        return key


def find_sizes(draft: Draft) -> None:
    """The sizes of [config] that every model has: stream, vocabulary, heads and layers."""
    probe, config, sizes = draft.probe, draft.config, draft.sizes
    names = getattr(config, "attribute_map", {})
    fields = config.to_dict()
    vocab, stream = (probe.fields(draft.embedding, axis) for axis in (0, 1))
    heads = [k for k, v in fields.items() if re.search(r"heads?$", k) and type(v) is int]
    for key, usual, counting in (
        ("vocab", "vocab_size", vocab),
        ("stream", "hidden_size", stream),
        ("q_heads", "num_attention_heads", heads),
        ("layers", "num_hidden_layers", probe.counts),
    ):
        if not counting:
            raise NoRule(f"no field of the config gives {key}")
        usual = names.get(usual, usual)
        # several fields may have to be equal to that of the stream
        is_width = key == "stream" and getattr(config, usual, None) == draft.width
        sizes[key] = usual if is_width or usual in counting else min(counting, key=len)
    if getattr(config, sizes["stream"]) != draft.width:
        raise NoRule(f"embeddings have {draft.width} entries, and {sizes['stream']} is another")
    moved = {f for axes in probe.moves.values() for fields in axes.values() for f in fields}
    dims = [f for f in moved if re.search("head_dim$|d_kv|kv_channels|head_size", f)]
    dims = [f for f in dims if not re.search("nope|rope|^v_|linear|global|index", f)]
    if dims:
        default = f"{sizes['stream']} / {sizes['q_heads']}"
        sizes["head_dim"] = {"field": min(dims), "default": default}
    keys = [f for f in moved if re.search("key_value_heads|kv_heads|head_kv|group_num", f)]
    if keys:
        sizes["kv_heads"] = min(keys)


def size_key(draft: Draft, fields: Iterable[str], length: int) -> str:
    """The key in [config] of a size that is none of attention."""
    config, sizes = draft.config, draft.sizes
    own = [f for f in fields if getattr(config, f, None) == length] or list(fields)
    if not own:
        sizes[f"n{length}"] = length
        return f"n{length}"
    name = min(own, key=lambda f: (f == sizes["stream"], "max_length" in f))
    for key, size in sizes.items():
        if name == (size.get("field") if isinstance(size, dict) else size):
            return key
    plus = length - getattr(config, name)
    is_ffn = re.search("inner|ffn|^intermediate|d_ff|^hidden_dim", name) and "ffn" not in sizes
    key = "ffn" if is_ffn else "positions" if "position" in name else name
    key = name if key in sizes else key
    sizes[key] = {"field": name, "plus": plus, "reserved": plus} if plus else name
    return key


def units_of(draft: Draft, fields: dict[str, tuple[int, int]], length: int) -> str:
    """The space of the units on an axis, or several: "ffn|ffn"."""
    config, stream = draft.config, draft.sizes["stream"]
    own = [f for f in fields if f != stream]
    if not own and fields and length % draft.width == 0 and length != draft.width:
        draft.sizes["ffn"] = {"default": f"{length // draft.width} * {stream}"}
        return draft.unit("ffn")
    if not own:
        raise NoRule(f"{length} units follow {', '.join(fields) or 'no field'}")
    is_width = "intermediate|ffn|inner|d_ff|dim"
    name = max(own, key=lambda f: (bool(re.search(is_width, f)), getattr(config, f) or 0))
    moved, grown = fields[name]
    # a field without a value was not moved, but set
    value = getattr(config, name) or length
    times = grown / moved if moved else length / value
    count = next((f for f in own if "expert" in f and f != name), None)
    if count is not None:
        draft.sizes["shared_ffn"] = {"default": f"{count} * {name}"}
        draft.sizes[count] = count
        size_key(draft, [name], value)
        draft.unit("shared_ffn")
        return "|".join(["shared_ffn"] * (length // (value * getattr(config, count))))
    if times != int(times) or times * value != length:
        raise NoRule(f"{length} units are not a multiple of {name}={value}")
    return "|".join([draft.unit(size_key(draft, [name], value))] * int(times))


def is_of_experts(fields: Iterable[str]) -> bool:
    """True if an axis has an entry for each expert, and not their units."""
    names = [*fields]
    return any("expert" in f for f in names) and not any(re.search("size|dim", f) for f in names)


def experts_of(draft: Draft, fields: Iterable[str]) -> str:
    """The space of experts that such an axis counts."""
    config = draft.config
    name = next(f for f in fields if "expert" in f)
    draft.sizes["experts"] = {"field": name, "follows": "nothing"}
    if "experts" in draft.spaces:
        return "experts"
    numbers = {k: v for k, v in config.to_dict().items() if type(v) is int}
    chosen = [k for k in numbers if re.search(CHOSEN, k) and "group" not in k]
    if not chosen:
        raise NoRule("no field says how many experts are chosen")
    draft.sizes["chosen"] = chosen[0]
    draft.spaces["experts"] = {"kind": "experts", "size": "experts", "chosen": "chosen"}
    for key in config.to_dict():
        if "aux_loss_coef" in key:
            draft.spaces["experts"]["averaged"] = key
    if {"n_group", "topk_group"} <= numbers.keys():
        draft.sizes |= {"groups": "n_group", "chosen_groups": "topk_group"}
        draft.spaces["experts"]["groups"] = ["groups", "chosen_groups"]
    return "experts"


def row_of(draft: Draft, name: str) -> Any:
    """The row of a tensor, or of the norm that it belongs to; None if there is none."""
    own = template(name)
    norm = draft.rows.get(own.rpartition(".")[0])
    return draft.rows.get(own, norm if isinstance(norm, dict) and "norm" in norm else None)
