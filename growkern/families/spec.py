"""A family table: which activation space every axis of every tensor belongs to.

A table holds no code. Its parts:

    extends     another family's table; this one adds to it and replaces what it names again
    [config]    what the sizes of the family are called in its Hugging Face config; a number is
                itself. `{ field, default, plus, reserved }`: `default` when the field is null,
                `plus` rows more than the field says, `reserved` of them for no position
    [stacks]    stack of layers -> the size that counts them; one stack of `layers` when left out.
                `{s}` in a row stands for every stack in turn, `stack` names a single one
    [norm]      kind, placement (pre, post, sandwich: on both sides, output: of the block), the
                config field of eps or eps itself, `plus_one` where the norm multiplies by
                1 + weight, `bias` the config flag of its bias
    [attention] how scores and positions depend on head_dim
    [spaces]    the activation spaces. kind = stream   the residual stream
                                              normed   output of a norm that reads `of`
                                              heads    `heads` x head_dim (or x `width`), or
                                                       that for each `part` of "a|b|c"
                                              head     one head, where all heads share a norm
                                              units    `size` independent units; `activated` when
                                                       an activation sits before the next norm
                                              fixed    `size` entries that never grow
                                              tied_output  what the norm under a tied LM head must
                                                       output; `untied` names the space otherwise
                `part`: the part of attention the entries of a head play. `weighted`: heads that
                enter one norm together. `scale`: see tensors
    [classes]   model class -> prefix of the body's names, table parts of the body and the heads,
                the space its hidden states are `output` in, the `stacks` that `{s}` stands for
                where these are not all, config fields that have to repeat a size
    [depth]     tensors that are zero in an identity block; the norms of a post-norm block
    [tensors.*] name -> axes in the tensor's own layout: "write:S" is an output axis of space S,
                "read:S" an input axis, "write:q|k|v" blocks one after another, anything else a
                size of [config]. `norm = "A>B"` stands for the weight (and bias) of a norm from
                space A to space B. `into`: the norm that a written vector enters. `extra`: what
                coordinates beyond whole copies leave that norm as. `tied`: same storage as that
                tensor while tie_word_embeddings. `when`: exists only under that condition
                ("flag", "!flag", "field != field"). `only`: in these layers. `scale`: what the
                model multiplies by, to be undone (`scale_when`: under that flag). `fallback`:
                what to grow where the source has none. `stored`: its whole name in files, where
                transformers renames it. A list: the first row that holds
    [refuse]    config fields whose value makes the table wrong, and why
    per_layer   config lists with one entry per layer
    ignored     tensors of older files that models no longer read

`growkern.families.load` reads the tables and checks every key and name in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Size:
    """One entry of [config]."""

    field: str | None = None
    number: int = 0
    default: str | None = None
    plus: int = 0
    reserved: int = 0

    def of(self, config: Any) -> int:
        if self.field is None:
            return self.number
        value = getattr(config, self.field, None)
        if value is None and self.default is not None:
            left, sign, right = self.default.split()
            a, b = (int(x) if x.isdigit() else getattr(config, x) for x in (left, right))
            value = a * b if sign == "*" else a // b
        return int(getattr(config, self.field) if value is None else value) + self.plus


@dataclass(frozen=True)
class SpaceSpec:
    """One activation space of a family; the module docstring lists the kinds."""

    name: str
    kind: str
    of: str | None = None
    untied: str | None = None
    heads: str | None = None
    width: int | None = None
    part: str = "value"
    weighted: bool = False
    size: str | None = None
    activated: bool = False
    scale: str | None = None
    scale_when: str | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of attention whose entries follow one another in every head."""
        return tuple(self.part.split("|"))


@dataclass(frozen=True)
class Refusal:
    """A config value the table does not cover."""

    field: str
    value: Any
    why: str


@dataclass(frozen=True)
class Norm:
    """[norm]: what the norms of a family compute."""

    kind: str
    placement: str
    eps: str | float
    plus_one: bool = False
    bias: str | None = None

    def epsilon(self, config: Any) -> float:
        return self.eps if isinstance(self.eps, float) else float(getattr(config, self.eps))

    def tensors(self, config: Any) -> tuple[str, ...]:
        """Names of a norm's own tensors."""
        has_bias = self.kind == "layernorm" and holds(self.bias, config)
        return ("weight", "bias") if has_bias else ("weight",)


@dataclass(frozen=True)
class Attention:
    """[attention]: what a larger head_dim changes.

    Attributes:
        positions: `rotary` (of R entries, pair i, i + R / 2 turns by theta ** (-2 i / R)),
            `learned` or `relative`.
        scale: scores are divided by the root of `head_dim`, or by a `constant`.
        when: config flag without which they are not divided.
        partial: R is the `partial_rotary_factor` of head_dim; elsewhere R is head_dim.
    """

    positions: str
    scale: str
    when: str | None = None
    partial: bool = False


@dataclass(frozen=True)
class Row:
    """One line of a tensor table."""

    name: str
    axes: tuple[str, ...] = ()
    norm: str | None = None
    extra: str | None = None
    into: str | None = None
    tied: str | None = None
    when: str | None = None
    only: str | None = None
    stack: str | None = None
    scale: str | None = None
    scale_when: str | None = None
    fallback: str | None = None
    stored: str | None = None

    def uses(self, stack: str) -> tuple[set[str], set[str]]:
        """The spaces and the sizes of [config] that its axes and its norm name."""
        spaces, sizes = set(self.norm.split(">") if self.norm else ()), set()
        for axis in self.axes:
            _, colon, names = axis.partition(":")
            if colon:
                spaces |= set(names.split("|"))
            else:
                sizes.add(axis)
        return {name.replace("{s}", stack) for name in spaces}, sizes

    def is_in(self, layer: int, layers: int) -> bool:
        """True where `only` admits this layer."""
        at = {"first": layer == 0, "last": layer == layers - 1}
        negated, name = (self.only or "").startswith("not_"), (self.only or "").removeprefix("not_")
        return self.only is None or at[name] != negated


@dataclass(frozen=True)
class TensorSpec:
    """A row bound to one tensor of one model.

    Attributes:
        name: in the state dict.
        template: the same without the class's prefix and with `{l}` for the layer: what this
            tensor has in common with that of other layers.
    """

    name: str
    template: str
    row: Row
    stack: str
    layer: int | None
    axes: tuple[str, ...]
    norm: tuple[str, str] | None
    into: str | None
    tied: str | None
    fallback: str | None
    in_body: bool

    @property
    def is_bias(self) -> bool:
        return self.name.endswith(".bias")

    def is_one_of(self, rows: tuple[str, ...]) -> bool:
        """True when one of these names of rows, of a norm without its weight and bias, is this."""
        own = (self.template, self.template.rpartition(".")[0] if self.norm else "")
        return any(row.replace("{s}", self.stack) in own for row in rows)


@dataclass(frozen=True)
class ModelClass:
    """How one model class names and combines the parts of the table."""

    prefix: str = ""
    body: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    output: str | None = None
    stacks: tuple[str, ...] = ()
    repeats: Mapping[str, str] = field(default_factory=dict)


def holds(condition: str | None, config: Any) -> bool:
    """A condition of a table on a config: "flag", "!flag" or "field != field"."""
    if condition is None:
        return True
    left, unequal, right = condition.partition(" != ")
    if unequal:
        return bool(getattr(config, left) != getattr(config, right))
    value = bool(getattr(config, condition.removeprefix("!"), False))
    return value != condition.startswith("!")
