"""One model family, as its table describes it: sizes, spaces and every tensor of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from growkern.errors import GrowthError
from growkern.families.spec import (
    Attention,
    ModelClass,
    Norm,
    Refusal,
    Row,
    Size,
    SpaceSpec,
    TensorSpec,
    holds,
)


@dataclass(frozen=True)
class Family:
    """Everything growkern knows about one model family; read by `load_family`."""

    model_type: str
    activation: str | None
    ignored: tuple[str, ...]
    per_layer: tuple[str, ...]
    norm: Norm
    attention: Attention
    config: Mapping[str, Size]
    stacks: Mapping[str, str]
    refuse: tuple[Refusal, ...]
    spaces: Mapping[str, SpaceSpec]
    classes: Mapping[str, ModelClass]
    zero_in_identity: tuple[str, ...]
    inner_norms: tuple[str, ...]
    outer_norm: str | None
    refuse_depth: tuple[Refusal, ...]
    parts: Mapping[str, tuple[Row, ...]] = field(repr=False)

    # ---- sizes

    def size(self, config: Any, key: str) -> int:
        """The size called `key` in [config], read from a Hugging Face config."""
        return self.config[key].of(config)

    def config_field(self, key: str) -> str:
        """Name of the config field that holds the size called `key`."""
        return str(self.config[key].field)

    @property
    def growable(self) -> tuple[str, ...]:
        """The sizes that may grow."""
        used = {"stream", "head_dim", "vocab", "kv_heads"}
        used |= {*self.query_heads, *self.unit_sizes, *self.stacks.values()}
        return tuple(key for key, size in self.config.items() if key in used and size.field)

    def largest(self, key: str) -> int:
        """Beyond any model: a larger number is a slip of the finger, or damage."""
        return 1 << (14 if key in self.stacks.values() else 24)

    @property
    def unit_sizes(self) -> tuple[str, ...]:
        """The sizes that count independent units and are not the stream's: FFNs."""
        used = {s.size for s in self.spaces.values() if s.kind == "units"}
        return tuple(key for key in self.config if key in used and key != "stream")

    @property
    def carries(self) -> bool:
        """True where the table says which norms carry the mean past themselves."""
        return any(row.extra == "carry" for rows in self.parts.values() for row in rows)

    @property
    def forces_head_dim(self) -> bool:
        """True where the model computes head_dim as stream / heads."""
        return "head_dim" not in self.config

    @property
    def query_heads(self) -> tuple[str, ...]:
        """The sizes that count query heads: one, or one per stack."""
        used = {s.heads for s in self.spaces.values() if s.heads}
        return tuple(key for key in self.config if key in used and key != "kv_heads")

    def head_dim(self, config: Any, heads: str = "q_heads") -> int:
        if not self.forces_head_dim:
            return self.size(config, "head_dim")
        if heads == "kv_heads":
            heads = "q_heads"
        return self.size(config, "stream") // self.size(config, heads)

    def width(self, config: Any, spec: SpaceSpec) -> int:
        """Entries of one head of a space of heads."""
        if spec.width is not None:
            return spec.width
        return len(spec.parts) * self.head_dim(config, spec.heads or self.query_heads[0])

    def turning(self, config: Any) -> int:
        """R of `Attention`; 0 where positions are not rotary."""
        if self.attention.positions != "rotary":
            return 0
        head_dim = self.head_dim(config, self.query_heads[0])
        if not self.attention.partial:
            return head_dim
        return int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))

    def space_size(self, config: Any, name: str) -> int:
        spec = self.spaces[name]
        if spec.kind == "heads":
            return self.size(config, str(spec.heads)) * self.width(config, spec)
        if spec.kind == "head":
            return self.width(config, spec)
        return self.size(config, spec.size or "stream")

    def axis_size(self, config: Any, axis: str) -> int:
        _, _, spaces = axis.partition(":")
        if not spaces:
            return self.size(config, axis)
        return sum(self.space_size(config, name) for name in spaces.split("|"))

    def output_space(self, class_name: str) -> str:
        """The space a model's hidden states come out in."""
        return self.classes[class_name].output or next(
            name for name in ("final", "stream") if name in self.spaces
        )

    # ---- tensors

    def shares(self, config: Any) -> bool:
        """True when the tensors the table calls tied share their storage."""
        return bool(getattr(config, "tie_word_embeddings", False))

    def has_tied_head(self, config: Any, class_name: str) -> bool:
        """True when this class has an LM head that shares the token embedding."""
        rows = (row for part in self.classes[class_name].heads for row in self.parts[part])
        return self.shares(config) and any(row.tied for row in rows)

    def tensors(self, config: Any, class_name: str) -> Iterator[TensorSpec]:
        """Every tensor of the class's state dict, tied ones included, row by row."""
        model_class = self.classes[class_name]
        seen: set[str] = set()
        for part, row, stack in self._rows(class_name):
            if not holds(row.when, config):
                continue
            in_body = part in model_class.body
            prefix = model_class.prefix if in_body else ""
            for layer in self._layers(row, stack, config):
                for tensor in self._bind(row, prefix, config, stack, layer, in_body):
                    # of alternative rows the first that holds wins
                    if tensor.name not in seen:
                        seen.add(tensor.name)
                        yield tensor

    def _rows(self, class_name: str) -> Iterator[tuple[str, Row, str]]:
        """Part, row and stack, of all rows of a class."""
        model_class = self.classes[class_name]
        for part in (*model_class.body, *model_class.heads):
            for row in self.parts[part]:
                every = model_class.stacks or tuple(self.stacks)
                for stack in every if "{s}" in row.name else [row.stack or next(iter(self.stacks))]:
                    yield part, row, stack

    def _layers(self, row: Row, stack: str, config: Any) -> list[int | None]:
        if "{l}" not in row.name:
            return [None]
        count = self.size(config, self.stacks[stack])
        return [layer for layer in range(count) if row.is_in(layer, count)]

    def of_class(self, class_name: str) -> Family:
        """This family without the stacks, spaces and sizes of which the class has no tensor."""
        rows = [(row, stack) for _, row, stack in self._rows(class_name)]
        stacks = {stack for row, stack in rows if "{l}" in row.name}
        spaces, sizes = (
            set().union(*names) for names in zip(*(row.uses(s) for row, s in rows), strict=True)
        )
        for spec in [self.spaces[name] for name in spaces]:
            spaces |= {spec.of, spec.untied}
        specs = {name: spec for name, spec in self.spaces.items() if name in {*spaces, "stream"}}
        sizes |= {size for spec in specs.values() for size in (spec.heads, spec.size)}
        sizes |= {"stream", "head_dim", *(self.stacks[stack] for stack in stacks)}
        return replace(
            self,
            config={key: size for key, size in self.config.items() if key in sizes},
            stacks={stack: size for stack, size in self.stacks.items() if stack in stacks},
            spaces=specs,
        )

    def _bind(
        self, row: Row, prefix: str, config: Any, stack: str, layer: int | None, in_body: bool
    ) -> Iterator[TensorSpec]:
        def fill(text: str) -> str:
            return text.replace("{l}", str(layer)).replace("{s}", stack)

        def named(text: str | None) -> str | None:
            return None if text is None else prefix + fill(text)

        own = row.name.replace("{s}", stack)
        tensor = TensorSpec(
            name=prefix + fill(own),
            template=own,
            row=row,
            stack=stack,
            layer=layer,
            axes=tuple(fill(axis) for axis in row.axes),
            norm=None,
            into=named(row.into),
            tied=named(row.tied),
            fallback=row.fallback,
            in_body=in_body,
        )
        if row.norm is None:
            yield tensor
            return
        source, _, target = fill(row.norm).partition(">")
        for kind in self.norm.tensors(config):
            yield replace(
                tensor,
                name=f"{tensor.name}.{kind}",
                template=f"{own}.{kind}",
                axes=(f"write:{target}",),
                norm=(source, target),
                fallback=None if row.fallback is None else f"{named(row.fallback)}.{kind}",
            )

    def shapes(self, config: Any, class_name: str) -> dict[str, tuple[int, ...]]:
        """Predicted name -> shape of the class's state dict."""
        return {
            t.name: tuple(self.axis_size(config, axis) for axis in t.axes)
            for t in self.tensors(config, class_name)
        }

    def stored_names(self, config: Any, class_name: str) -> dict[str, str]:
        """Name -> name in files, of the tensors for which these differ."""
        tensors = self.tensors(config, class_name)
        return {t.name: t.row.stored for t in tensors if t.row.stored is not None}

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
