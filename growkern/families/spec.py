"""The parts of a family table: for every axis of every tensor, the activation space it belongs to.

A table is data without code. `growkern.families.load` reads it and checks every key and name.
Its sections:

    extends     name of another family's table. This table adds to it and overrides its entries
    under       config field with a config of its own, that of the text, where all fields of the
                table lie. A field that begins with a dot lies in the whole config:
                ".vision_config.hidden_size"
    [config]    size -> the field of the Hugging Face config that holds it, or a plain number.
                `{ field, default, plus, reserved }`: `default` is a formula, or a number, for a
                field that is null, or for a size without one, `plus` is added to the field,
                `reserved` counts rows without a position, `follows`: the size that it grows with,
                "nothing" if it stays unless it is given. Without it, units follow the stream. `[]`:
                a size of the extended table that this family does not have
    [stacks]    stack of layers -> the size that counts them. Default: one stack, of `layers`.
                `{s}` in a row stands for every stack in turn; `stack` in a row names a single one
    [kinds]     kind of layer -> the conditions under which a layer is of it, all of them: "in:F"
                if its number is in the config list F, "every:F" if it is the last of F layers,
                "from:F" from layer F on, "is:F=text" if that is its entry of the list F, and "not "
                before any of these
    [states]    kind of layer -> the sizes whose product is how many numbers such a layer keeps. A
                token meets these instead of all tokens before it
    [norm]      kind (of `growkern.families.family`), placement (pre, post, sandwich: before and
                after a block, output: after a block), the config field of eps or eps itself,
                `plus_one` if the norm multiplies by 1 + weight, `bias`: the config flag that
                gives it a bias
    [attention] how scores and positions depend on head_dim
    [spaces]    the activation spaces. kind = stream   the residual stream
                                              normed   output of a norm that reads `of`
                                              heads    `heads` x head_dim (or x `width`, or x the
                                                       spaces "a|b" of `entries`), once for each
                                                       `part` of "a|b|c"
                                              head     one head, where all heads share a norm, or
                                                       `size` entries of one
                                              units    `size` independent units, `activated` if
                                                       an activation comes before the next norm.
                                                       With `width` or `entries` each they follow
                                                       the space named after the size
                                              experts  `size` experts, of which a router takes
                                                       `chosen` per token. Whole copies of all of
                                                       them, and `chosen` grows alike. So do
                                                       `groups`, the number of groups that a router
                                                       chooses first and how many it takes, if it
                                                       has several. `averaged`: the config's
                                                       coefficient of a loss that counts every copy.
                                                       `asleep`: the bias that only chooses experts
                                                       and can keep any number of copies from it
                                              fixed    `size` entries that never grow
                                              tied_output  output of the norm under a tied LM
                                                       head; if it is not tied, the space `untied`
                `part`: the role of a head's entries in attention. `weighted`: all heads, or units,
                enter one norm together. `scale`: see [tensors.*]
    [classes]   model class -> prefix of the body's names, parts of the table for body and heads,
                `output`: the space of its hidden states, `stacks`: the stacks that `{s}` stands
                for if not all, `repeats`: config fields that must equal a size, `cache`: the
                size that transformers makes a cache of keys and values for, if a stack of
                more layers cannot use it, `beside`: parts beside the body, named like it without
                the last name of its prefix, `files`: how names begin in files -> how they begin in
                the model. Files are written with the first that fits, and read with any
    [depth]     tensors that are zero in an identity block; the norms of a post-norm block, `[]` if
                only the extended table has them. `in_place`: a config list with an entry for each
                of the first layers, whose numbers must stay
    [tensors.*] name -> the tensor's axes, in order:
                "write:S"       an output axis of space S
                "read:S"        an input axis of space S
                "factor:S"      one number for each entry of S, which multiplies what is written
                "write:q|k|v"   several spaces one after another
                "*"             a size that transformers computes, and that never grows
                anything else   a size of [config]
                A first axis of experts before two others: a matrix for each of them. Where the
                weights of an expert's copies add up to its weight, the last matrix writes the
                experts; where every copy has that weight, it reads them.
                "*" in a name stands for any text. All tensors of the class with such a name are
                meant. Without axes they are copied as they are
                Keys beside the axes:
                `norm`      "A>B": the weight (and bias) of a norm from space A to space B
                `into`      the norm that a written vector enters
                `extra`     the output of that norm at coordinates beyond whole copies
                `factor`    the tensor that a written vector is multiplied with, entry by entry
                `tied`      the tensor whose storage this one shares under tie_word_embeddings
                `when`      the condition under which it exists: "flag", "!flag", "field != field"
                            or several of them, with " and " between
                `only`      the layers that have it: first, last or one of [kinds], or "not_" and
                            one of these
                `scale`     a factor of the model that growth must undo
                `scale_when`  the flag under which it must
                `fallback`  the tensor to grow if the source has no such tensor, or a word of
                            `growkern.growth.plan.blueprint.MADE`
                `dense`     the tensors of a dense model's FFN that make it, one after another.
                            Experts and shared experts have it: one of both starts with outputs 0
                `stored`    its full name in files if that is another; a norm's without `.weight`
                `files`     its names in files where these have one tensor per expert, `{e}`, or
                            another name. Several: parts of its second axis, one after another
                `keep`      "float32": its dtype beside weights of 16 bits
                More than two axes without experts: only one may be of a space, the first or the
                last that is longer than 1
                Several rows may have one name: the first whose condition holds counts. A row
                without axes keeps those of the extended table. No rows, `[]`: a tensor of the
                extended table that this family never has
    [refuse]    config fields with a `value` that the table does not cover, or with one that
                `differs` from another field, and why
    [dense]     the families `of` dense models that can become such mixtures. `set`: config fields
                without which the mixture would not compute the same. `refuse`: as [refuse], for
                the dense model's config. `renormalised`: the config field that divides the weights
                of chosen experts by their sum, if a growth may leave that out. `routed`: the config
                field with the factor that the outputs of the chosen experts are multiplied with.
                `shared`: that factor for an expert that all tokens share, where its gate is zero
    softcap     config field of the soft cap c of the logits, c tanh(z / c)
    per_layer   config lists with one entry per layer
    ties_by_value  true: whatever the file says, the config says tie_word_embeddings=True. A head
                with values of its own is not tied
    [older]     key of config.json that older software reads -> where the new form holds the same
                (`of`), in which `form`, and `when`: the flag without which software ignores it
                (`growkern.families.fields`)
    [runtimes]  software that does not read a value, but computes it. `head_dim`: as stream / heads,
                `layers`: the kind of a layer from its number, `scale`: the scale of the scores from
                head_dim, not from the `field` of [attention]
    ignored     tensors in files that models do not read, with `*` for any names, and `{layers}` for
                the number of a layer behind the last
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from growkern.errors import GrowthError, UnfitError

# a size that transformers computes; in a name: any text
ANY = "*"


@dataclass(frozen=True)
class Nested:
    """The fields of a config within another: those of the inner one, and `.field` of the whole."""

    inner: Any
    whole: Any

    def __getattr__(self, name: str) -> Any:
        return attrgetter(name[1:])(self.whole) if name[0] == "." else getattr(self.inner, name)


# of `Size.follows`
NOTHING = "nothing"


@dataclass(frozen=True)
class Size:
    """One entry of [config]: where a config holds one size."""

    field: str | None = None
    number: int = 0
    default: str | None = None
    plus: int = 0
    reserved: int = 0
    follows: str | None = None

    def of(self, config: Any) -> int:
        """The size, read from a Hugging Face config; it needs a value, or the family a default."""
        value = getattr(config, self.field, None) if self.field else self.number or None
        if value is None and self.default is not None:
            names = self.default.split()[::2]
            values = [int(x) if x.isdigit() else getattr(config, x) for x in names]
            value = values[0] // values[1] if "/" in self.default else math.prod(values)
            value = sum(values) if "+" in self.default else value
            if not self.field and "/" in self.default and values[0] % values[1]:
                pairs = [f"{x}={y}" for x, y in zip(names, values, strict=True)]
                raise UnfitError(f"{pairs[0]} is not a multiple of {pairs[1]}")
        if value is None and self.field is not None:
            raise GrowthError(f"{self.field} of the config has no value: give it a whole number")
        return int(value or 0) + self.plus

    @property
    def factors(self) -> tuple[str, ...]:
        """The config fields that a size without a field of its own is made of."""
        return () if self.field or not self.default else tuple(self.default.split())


@dataclass(frozen=True)
class SpaceSpec:
    """One activation space of a family; the module docstring lists the kinds."""

    name: str
    kind: str
    of: str | None = None
    untied: str | None = None
    heads: str | None = None
    width: int | None = None
    entries: str | None = None
    part: str = "value"
    weighted: bool = False
    size: str | None = None
    activated: bool = False
    scale: str | None = None
    scale_when: str | None = None
    chosen: str | None = None
    averaged: str | None = None
    asleep: str | None = None
    groups: tuple[str, ...] = ()

    @property
    def blocks(self) -> tuple[str, ...]:
        """The spaces that one head or unit consists of."""
        return tuple(self.entries.split("|")) if self.entries else ()

    @property
    def parts(self) -> tuple[str, ...]:
        """The roles of the entries of one head, in the order in which they lie there."""
        return tuple(self.part.split("|"))


@dataclass(frozen=True)
class Refusal:
    """A config value that the table does not cover: this one, also as an entry of a list, or any
    that differs from a field."""

    field: str
    why: str
    value: Any = None
    differs: str | None = None

    def check(self, config: Any) -> None:
        """Refuse a config that has such a value."""
        value = getattr(config, self.field, None)
        if self.differs is not None:
            refused = value not in (None, getattr(config, self.differs))
        else:
            refused = value == self.value or (isinstance(value, list) and self.value in value)
        if refused:
            raise GrowthError(f"config.{self.field}={value}: {self.why}")


@dataclass(frozen=True)
class Attention:
    """[attention]: how scores and positions depend on head_dim.

    Attributes:
        positions: `rotary`, `learned` or `relative`. Rotary positions turn R entries of a head:
            pair i turns by theta ** (-2 i / R).
        pairs: where pair i lies. `halves`: entries i and i + R / 2. `adjacent`: 2 i and 2 i + 1.
        whole_pairs: True if the model cannot run with an odd R. Others then turn R + 1 entries.
        scale: scores are divided by the root of `head_dim`, or by a `constant`.
        divisor: that head_dim, if it is a size of another name.
        field: config field that holds the square of that constant.
        when: config flag; without it scores are not divided.
        partial: True if R is head_dim times the config's `partial_rotary_factor`, False if R is
            head_dim.
        turning: config field that holds R, where it does not depend on head_dim.
        sections: how many pairs of a head turn with the time, height and width of a patch of an
            image, unless `rope_parameters.mrope_section` says so; None: all turn with the position.
        clip: config field with the limit that queries, keys and values are clipped to.
    """

    positions: str
    scale: str
    when: str | None = None
    partial: bool = False
    field: str | None = None
    pairs: str = "halves"
    whole_pairs: bool = False
    turning: str | None = None
    clip: str | None = None
    sections: tuple[int, ...] | None = None
    divisor: str | None = None


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
    files: tuple[str, ...] = ()
    factor: str | None = None
    keep: str | None = None
    dense: tuple[str, ...] = ()

    def uses(self, stack: str) -> tuple[set[str], set[str]]:
        """The spaces, and the sizes of [config], that its axes and its norm refer to."""
        spaces, sizes = set(self.norm.split(">") if self.norm else ()), set()
        for axis in self.axes:
            _, colon, names = axis.partition(":")
            if colon:
                spaces |= set(names.split("|"))
            elif axis != ANY:
                sizes.add(axis)
        return {name.replace("{s}", stack) for name in spaces}, sizes

    def is_in(self, kinds: Mapping[str, bool]) -> bool:
        """True if `only` allows a layer that is, or is not, of these kinds."""
        name = str(self.only).removeprefix("not_")
        return kinds[name] == (name == self.only)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of one model, and the row of the table that describes it.

    Attributes:
        name: in the state dict.
        template: the name without the class's prefix and with `{l}` for the layer. The same
            tensor of all layers has the same template.
        layer: number of its layer within `stack`; None outside the layers.
        axes: one entry per axis, as in the row, with stack and layer filled in.
        norm: the spaces that a norm reads and writes; None for other tensors.
        into, tied, fallback, stored, factor: as in the row, but full names of tensors.
        files: as in the row, but full names, with `{e}` left in them.
        in_body: True if it belongs to the body of the model, False if to a head.
    """

    name: str
    template: str
    row: Row
    stack: str
    layer: int | None
    axes: tuple[str, ...]
    in_body: bool
    norm: tuple[str, str] | None = None
    into: str | None = None
    tied: str | None = None
    fallback: str | None = None
    stored: str | None = None
    files: tuple[str, ...] = ()
    factor: str | None = None

    @property
    def is_split(self) -> bool:
        """True if files have a tensor for every expert."""
        return any("{e}" in file for file in self.files)

    @property
    def is_bias(self) -> bool:
        return self.name.endswith(".bias")

    @property
    def is_copied(self) -> bool:
        """True if it never grows and is copied as it is."""
        return ANY in self.row.name

    def is_one_of(self, rows: tuple[str, ...]) -> bool:
        """True if one of these rows describes this tensor; a norm's row covers weight and bias."""
        own = (self.template, self.template.rpartition(".")[0] if self.norm else "")
        return any(row.replace("{s}", self.stack) in own for row in rows)


@dataclass(frozen=True)
class ModelClass:
    """[classes]: which parts of the table a model class consists of, and how it names them."""

    prefix: str = ""
    body: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    output: str | None = None
    stacks: tuple[str, ...] = ()
    repeats: Mapping[str, str] = field(default_factory=dict)
    cache: str | None = None
    beside: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[str, ...]:
        """All parts of the table that it consists of."""
        return (*self.body, *self.beside, *self.heads)

    def prefix_of(self, part: str) -> str:
        """How the names of a part begin in the model."""
        if part in self.beside:
            return self.prefix[: self.prefix.rstrip(".").rfind(".") + 1]
        return self.prefix if part in self.body else ""
