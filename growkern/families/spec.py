"""Reads a family table: which activation space every axis of every tensor belongs to.

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

An unknown key anywhere is an error: a table is never half understood.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from growkern.errors import GrowthError, nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_KEYS = {
    "table": "model_type activation ignored norm config refuse spaces classes depth tensors",
    "norm": "kind placement eps",
    "space": "kind of untied heads size activated",
    "class": "prefix body heads",
    "depth": "zero inner_norm outer_norm refuse",
    "tensor": "axes norm extra into tied when",
    "refuse": "value why",
}


def _check_keys(kind: str, where: str, table: Mapping[str, Any]) -> None:
    allowed = _KEYS[kind].split()
    for key in table:
        if key not in allowed:
            raise GrowthError(f"{where}: unknown key {key!r}{nearest(key, allowed)}")


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
    """Everything growkern knows about one model family; built by `load_family`."""

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
        return entry if isinstance(entry, str) else entry["field"]

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


# ------------------------------------------------------------------ reading


def _refusals(where: str, table: Mapping[str, Any]) -> tuple[Refusal, ...]:
    for name, entry in table.items():
        _check_keys("refuse", f"{where}.{name}", entry)
    return tuple(Refusal(name, **entry) for name, entry in table.items())


def _row(where: str, name: str, entry: Mapping[str, Any]) -> Row:
    _check_keys("tensor", f"{where}.{name}", entry)
    values: dict[str, Any] = dict(entry)
    if "axes" in values:
        values["axes"] = tuple(values["axes"])
    if "norm" in values:
        source, _, target = values["norm"].partition(">")
        values["norm"] = (source, target)
    return Row(name=name, **values)


def parse_family(where: str, table: Mapping[str, Any]) -> Family:
    """A `Family` from a parsed TOML table.

    Raises:
        GrowthError: an unknown key, or a space, size or part that is used but not defined.
    """
    _check_keys("table", where, table)
    _check_keys("norm", f"{where}.norm", table["norm"])
    depth = table.get("depth", {})
    _check_keys("depth", f"{where}.depth", depth)
    for name, entry in table["spaces"].items():
        _check_keys("space", f"{where}.spaces.{name}", entry)
    for name, entry in table["classes"].items():
        _check_keys("class", f"{where}.classes.{name}", entry)
    family = Family(
        model_type=table["model_type"],
        activation=table.get("activation"),
        ignored=tuple(table.get("ignored", ())),
        norm_kind=table["norm"]["kind"],
        norm_placement=table["norm"]["placement"],
        norm_eps=table["norm"]["eps"],
        config=table["config"],
        refuse=_refusals(f"{where}.refuse", table.get("refuse", {})),
        spaces={name: SpaceSpec(name=name, **entry) for name, entry in table["spaces"].items()},
        classes={
            name: ModelClass(
                entry.get("prefix", ""), tuple(entry["body"]), tuple(entry.get("heads", ()))
            )
            for name, entry in table["classes"].items()
        },
        zero_in_identity=tuple(depth.get("zero", ())),
        inner_norm=depth.get("inner_norm"),
        outer_norm=depth.get("outer_norm"),
        refuse_depth=_refusals(f"{where}.depth.refuse", depth.get("refuse", {})),
        parts={
            part: tuple(
                _row(f"{where}.tensors.{part}", name, entry) for name, entry in rows.items()
            )
            for part, rows in table["tensors"].items()
        },
    )
    _check_references(where, family)
    return family


def _check_references(where: str, family: Family) -> None:
    for model_class in family.classes.values():
        for part in (*model_class.body, *model_class.heads):
            if part not in family.parts:
                raise GrowthError(f"{where}: part {part!r} has no [tensors.{part}]")
    for rows in family.parts.values():
        for row in rows:
            names = [axis.partition(":") for axis in row.axes]
            used = [s for _, colon, spaces in names if colon for s in spaces.split("|")]
            used += row.norm or ()
            sizes = [name for name, colon, _ in names if not colon]
            for name, known in [(s, family.spaces) for s in used] + [
                (s, family.config) for s in sizes
            ]:
                if name not in known:
                    raise GrowthError(f"{where}: {row.name} uses {name!r}{nearest(name, known)}")


@cache
def load_family(model_type: str) -> Family:
    """The table of one family, by its Hugging Face `model_type`.

    Raises:
        GrowthError: no table for this model type; the message lists the supported ones.
    """
    known = supported_families()
    if model_type not in known:
        raise GrowthError(
            f"model_type {model_type!r} has no family table; supported: {', '.join(known)}"
        )
    file = resources.files("growkern.families") / f"{model_type}.toml"
    return parse_family(f"{model_type}.toml", tomllib.loads(file.read_text(encoding="utf-8")))


@cache
def supported_families() -> tuple[str, ...]:
    """Model types that have a table."""
    files = resources.files("growkern.families").iterdir()
    return tuple(sorted(f.name[: -len(".toml")] for f in files if f.name.endswith(".toml")))
