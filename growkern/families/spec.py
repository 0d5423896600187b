"""A family table: which activation space every axis of every tensor belongs to.

A table holds no code. Its parts:

    [config]    what the sizes of the family are called in its Hugging Face config; a number is
                itself; `{ field, default }` when the field may be null
    [spaces]    the activation spaces. kind = stream   the residual stream
                                              normed   output of a norm that reads `of`
                                              heads    `heads` x head_dim
                                              units    `size` independent units; `activated` when
                                                       an activation sits before the next norm
                                              tied_output  what the norm under a tied LM head must
                                                       output; `untied` names the space otherwise
    [classes]   model class -> prefix of the body's names, table parts of the body and the heads
    [depth]     tensors that are zero in an identity block; the two norms of a post-norm block
    [tensors.*] name -> axes in the tensor's own layout: "write:S" is an output axis of space S,
                "read:S" an input axis, "write:q|k|v" blocks one after another, anything else a
                size of [config]. `norm = "A>B"` stands for the weight (and, for LayerNorm, bias)
                of a norm from space A to space B. `into`: the norm that a written vector enters.
                `extra`: what coordinates beyond whole copies leave that norm as.
                `tied`: same storage as that tensor while tie_word_embeddings. `when`: exists only
                with that config flag.
    [refuse]    config fields whose value makes the table wrong, and why

`growkern.families.load` reads the tables and checks every key and name in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from growkern.errors import GrowthError


@dataclass(frozen=True)
class SpaceSpec:
    """One activation space of a family; the module docstring lists the kinds."""

    name: str
    kind: str
    of: str | None = None
    untied: str | None = None
    heads: str | None = None
    size: str | None = None
    activated: bool = False


@dataclass(frozen=True)
class Refusal:
    """A config value the table does not cover."""

    field: str
    value: Any
    why: str


@dataclass(frozen=True)
class Row:
    """One line of a tensor table."""

    name: str
    axes: tuple[str, ...] = ()
    norm: tuple[str, str] | None = None
    extra: str = "zero"
    into: str | None = None
    tied: str | None = None
    when: str | None = None


@dataclass(frozen=True)
class TensorSpec:
    """A row bound to one tensor of one model: names resolved, layer filled in."""

    name: str
    row: Row
    layer: int | None
    axes: tuple[str, ...]
    into: str | None
    in_body: bool

    @property
    def is_bias(self) -> bool:
        return self.name.endswith(".bias")


@dataclass(frozen=True)
class ModelClass:
    """How one model class names and combines the parts of the table."""

    prefix: str = ""
    body: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """Everything growkern knows about one model family; read by `load_family`."""

    model_type: str
    activation: str | None
    ignored: tuple[str, ...]
    norm_kind: str
    norm_placement: str
    norm_eps: str
    config: Mapping[str, Any]
    refuse: tuple[Refusal, ...]
    spaces: Mapping[str, SpaceSpec]
    classes: Mapping[str, ModelClass]
    zero_in_identity: tuple[str, ...]
    inner_norm: str | None
    outer_norm: str | None
    refuse_depth: tuple[Refusal, ...]
    parts: Mapping[str, tuple[Row, ...]] = field(repr=False)

    # ---- sizes

    def size(self, config: Any, key: str) -> int:
        """The size called `key` in [config], read from a Hugging Face config."""
        entry = self.config[key]
        if isinstance(entry, int):
            return entry
        if isinstance(entry, str):
            return int(getattr(config, entry))
        value = getattr(config, entry["field"])
        if value is None:
            factor, of = entry["default"].split(" * ")
            value = int(factor) * getattr(config, of)
        return int(value)

    def config_field(self, key: str) -> str:
        """Name of the config field that holds the size called `key`."""
        entry = self.config[key]
        return entry["field"] if isinstance(entry, dict) else str(entry)

    @property
    def forces_head_dim(self) -> bool:
        """True where the model computes head_dim as stream / q_heads."""
        return "head_dim" not in self.config

    def head_dim(self, config: Any) -> int:
        if self.forces_head_dim:
            return self.size(config, "stream") // self.size(config, "q_heads")
        return self.size(config, "head_dim")

    def space_size(self, config: Any, name: str) -> int:
        spec = self.spaces[name]
        if spec.kind == "heads":
            return self.size(config, str(spec.heads)) * self.head_dim(config)
        return self.size(config, spec.size or "stream")

    def axis_size(self, config: Any, axis: str) -> int:
        _, _, spaces = axis.partition(":")
        if not spaces:
            return self.size(config, axis)
        return sum(self.space_size(config, name) for name in spaces.split("|"))

    # ---- tensors

    def is_tied(self, config: Any, class_name: str) -> bool:
        """True when this class has an LM head that shares the token embedding."""
        model_class = self.classes[class_name]
        rows = (row for part in model_class.heads for row in self.parts[part])
        has_tied_head = any(row.tied for row in rows)
        return has_tied_head and bool(getattr(config, "tie_word_embeddings", False))

    def tensors(self, config: Any, class_name: str) -> Iterator[TensorSpec]:
        """Every tensor of the class's state dict, tied ones included, layer by layer."""
        model_class = self.classes[class_name]
        layers = range(self.size(config, "layers"))
        for part in (*model_class.body, *model_class.heads):
            in_body = part in model_class.body
            prefix = model_class.prefix if in_body else ""
            for row in self.parts[part]:
                if row.when is not None and not getattr(config, row.when, False):
                    continue
                for layer in layers if "{l}" in row.name else [None]:
                    yield from self._bind(row, prefix, layer, in_body)

    def _bind(
        self, row: Row, prefix: str, layer: int | None, in_body: bool
    ) -> Iterator[TensorSpec]:
        def resolve(name: str) -> str:
            return prefix + name.replace("{l}", str(layer))

        into = None if row.into is None else resolve(row.into)
        if row.norm is None:
            yield TensorSpec(resolve(row.name), row, layer, row.axes, into, in_body)
            return
        names = ("weight", "bias") if self.norm_kind == "layernorm" else ("weight",)
        for name in names:
            axes = (f"write:{row.norm[1]}",)
            yield TensorSpec(f"{resolve(row.name)}.{name}", row, layer, axes, into, in_body)

    def shapes(self, config: Any, class_name: str) -> dict[str, tuple[int, ...]]:
        """Predicted name -> shape of the class's state dict."""
        return {
            t.name: tuple(self.axis_size(config, axis) for axis in t.axes)
            for t in self.tensors(config, class_name)
        }

    def check_config(self, config: Any, class_name: str) -> None:
        """Refuse a model the table does not describe."""
        if class_name not in self.classes:
            raise GrowthError(
                f"{class_name}: no table for this {self.model_type} class; supported: "
                + ", ".join(self.classes)
            )
        for refusal in self.refuse:
            if getattr(config, refusal.field, None) == refusal.value:
                raise GrowthError(f"config.{refusal.field}={refusal.value}: {refusal.why}")
