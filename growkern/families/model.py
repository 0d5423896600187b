"""One model, described: the sizes, tensors and shapes of a model class with a given config.

A growth has two of them: `small`, the source, and `large`, the target.
"""

from __future__ import annotations

import copy
import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any

from growkern.errors import GrowthError, TableError, UnfitError, reason
from growkern.families.family import Family, field_faults
from growkern.families.spec import ANY, Row, Size, SpaceSpec, TensorSpec, holds
from growkern.families.table_files import load_family, shipped_table, supported_families
from growkern.package import WIDEN

# of a tensor that files hold in parts: of every part of its second axis, the name for each expert
Names = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class ModelSpec:
    """A family's table, applied to one config and one model class. No weights are needed.

    The config must not change afterwards: tensors and shapes are computed once and kept. For
    other sizes, change a copy of the config and call `with_config`.

    Attributes:
        family: the table, without the parts that this class does not use (`Family.of_class`).
        class_name: the model class in transformers, such as "BertForMaskedLM".
        untied: tensors with values of their own that the config calls tied (`ties_by_value`).
        of_one_ffn: the experts are those of a dense FFN, among which no router chooses yet.
        stored: name -> shape of the tensors of rows `as_stored`, where files name them otherwise
            than the class.
        second: how many layers in files predict a second token; 0 of what transformers builds.
        lacking: the rows of parts `behind` that files lack.
    """

    family: Family
    config: Any
    class_name: str
    untied: frozenset[str] = frozenset()
    of_one_ffn: bool = False
    stored: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    second: int = 0
    lacking: frozenset[str] = frozenset()

    @classmethod
    def of(cls, config: Any, class_name: str, family: Family | None = None) -> ModelSpec:
        """Load the table of the config's family, unless there is one, and check that it fits."""
        family = family or load_family(config.model_type)
        if family.table and (faults := [*class_faults(class_name), *field_faults(family, config)]):
            raise TableError(faults)
        model = cls(family.of_class(class_name), config, class_name)
        family = model.family
        try:
            model.check_text()
            for refusal in family.refuse:
                refusal.check(model.fields)
        except GrowthError as error:
            raise GrowthError(
                f"{error}; nearest: {family.model_type}, without it; growkern family draft SRC "
                "may write a table for this config"
            ) from error
        model.check_groups()
        model.check_transposed()
        return model

    def check_text(self) -> None:
        """Refuse a text model within the model that its table does not cover."""
        kind, texts = getattr(self.text, "model_type", ""), self.family.texts
        if texts and kind not in texts:
            raise GrowthError(
                f"{self.family.under}.model_type={kind!r}: the table of "
                f"{self.family.model_type!r} covers a text of {' or '.join(texts)}"
            )

    def with_own_heads(self, named: Iterable[str]) -> ModelSpec:
        """The same model, in which heads of these names are not tied, if its table allows that."""
        heads = {t.name for t in self.tensors if t.tied and not t.in_body}
        return replace(
            self, untied=frozenset(heads & {*named} if self.family.ties_by_value else ())
        )

    def with_config(self, config: Any) -> ModelSpec:
        """The same class with another config of the same family."""
        other = replace(self, config=config, of_one_ffn=False)
        if "tower" in vars(self) and not self.family.computes:
            # it never grows
            vars(other)["tower"] = self.tower
        return other

    @property
    def text(self) -> Any:
        """The config that has the table's fields, `config` or one within it."""
        return self.family.text(self.config)

    @property
    def fields(self) -> Any:
        """What the table's fields are read from."""
        return self.family.fields(self.config)

    @cached_property
    def tower(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape of all tensors, for the names and sizes that the table leaves open.

        Towers for images are built from configs of many kinds, so transformers is asked.
        """
        # imported here: `growkern --help` reads tables, and needs neither
        import torch
        import transformers

        try:
            with torch.device("meta"):
                config = copy.deepcopy(self.config)
                model = getattr(transformers, self.class_name)._from_config(config)
        except Exception as error:
            # values in a config make classes raise all kinds of errors
            raise GrowthError(
                f"transformers cannot build {self.class_name} with this config: {reason(error)}"
            ) from error
        state = model.state_dict().items()
        return self.as_stored({name: tuple(tensor.shape) for name, tensor in state})

    def as_stored(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, tuple[int, ...]]:
        """The tensors of the class, with those that `stored` has in the place of the same tower."""
        if not self.stored:
            return shapes
        return {n: s for n, s in shapes.items() if not self.is_as_stored(n)} | {**self.stored}

    def is_as_stored(self, name: str) -> bool:
        """Whether a tensor of this name is of a row `as_stored`."""
        prefix_of = self.family.classes[self.class_name].prefix_of
        rows = self.family.rows_of(self.class_name)
        names = (prefix_of(part) + row.name for part, row, _ in rows if row.as_stored)
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in names)

    def size(self, key: str) -> int:
        """The size called `key` in [config]."""
        return self.family.config[key].of(self.fields)

    @cached_property
    def second_layers(self) -> range:
        """The numbers of the layers that predict a second token, behind the last layer."""
        first = self.size(next(iter(self.family.stacks.values())))
        return range(first, first + self.second)

    @cached_property
    def in_memory(self) -> ModelSpec:
        """The same without layers that predict a second token, which only files have."""
        return replace(self, second=0) if self.second else self

    @property
    def mixtures(self) -> tuple[SpaceSpec, ...]:
        """The spaces of experts that the model has: a config may say that it has none."""
        return tuple(space for space in self.family.mixtures if self.size(str(space.size)))

    def check_groups(self) -> None:
        """Refuse query heads that do not share the key-value heads equally."""
        for key in sorted(self.family.key_heads):
            self.family.refuse_groups(key, self.size("q_heads"), self.size(key))

    def check_transposed(self) -> None:
        """Refuse square matrices that files may hold transposed: nothing tells which way round."""
        for name in self.transposed:
            if len({*self.shapes[name][-2:]}) == 1:
                raise UnfitError(
                    f"{name} would be {list(self.shapes[name])}: files of this family hold it "
                    "either way round, and equal axes do not tell which: give another size"
                )

    def check_sizes(self, where: str) -> None:
        """Refuse sizes that no model has. One without layers may grow new ones."""
        stacks, sizes = self.family.stacks.values(), self.family.config
        # a null field may mean a model without these units
        absent = {e.field for key, e in sizes.items() if key in stacks or e.default == "0"}
        for key, entry in sizes.items():
            size, most = self.size(key), self.family.largest(key)
            is_optional = absent & {entry.field, *entry.factors}
            if not (0 if is_optional else 1) <= size <= most:
                field = self.family.config_field(key)
                raise GrowthError(f"{where}: {field}={size} must lie in 1 .. {most}")

    def head_dim(self, heads: str = "q_heads") -> int:
        """Entries of one attention head, of those that a size counts.

        It matters which where head_dim is not in the config but follows from the number of heads.
        """
        if not self.family.forces_head_dim:
            return self.size("head_dim")
        return self.size("stream") // self.size("q_heads" if heads == "kv_heads" else heads)

    def width(self, space: SpaceSpec) -> int:
        """Entries of one head, or of one unit, of a space."""
        if space.blocks:
            return sum(map(self.space_size, space.blocks))
        if space.width is not None:
            return space.width
        if space.kind == "head" and space.size:
            return self.size(space.size)
        return len(space.parts) * self.head_dim(space.heads or self.family.query_heads[0])

    @property
    def turning(self) -> int:
        """Entries of a head that rotary positions turn; 0 where positions are not rotary."""
        heads = self.family.query_heads
        return self.turning_of(self.head_dim(heads[0])) if heads else 0

    def turning_of(self, head_dim: int) -> int:
        """What `turning` would be if heads had this many entries."""
        if self.family.attention.positions != "rotary":
            return 0
        if self.family.attention.turning is not None:
            return int(getattr(self.text, self.family.attention.turning))
        if not self.family.attention.partial:
            return head_dim
        rope = self.text.rope_parameters
        # one set of parameters, or one per kind of layer
        kinds = [part for part in rope.values() if isinstance(part, dict)] or [rope]
        shares = {kind.get("partial_rotary_factor", 1.0) for kind in kinds}
        if len(shares) > 1:
            raise GrowthError(
                f"rope_parameters: partial_rotary_factor is {sorted(shares)} in different kinds of "
                "layers, and growth needs one for all"
            )
        return int(head_dim * shares.pop())

    def check_turning(self) -> None:
        """Refuse heads that do not fit their rotary pairs: transformers cannot run such a model."""
        if not self.family.query_heads:
            return
        head_dim = self.head_dim(self.family.query_heads[0])
        turning = self.turning_of(head_dim)
        # others have room to complete the last pair
        most = turning if self.family.attention.whole_pairs else head_dim
        if turning + turning % 2 > most:
            raise UnfitError(
                f"head_dim={head_dim}: rotary positions turn {turning} entries of a head, in "
                "pairs, so that number must be even"
            )

    def space_size(self, name: str) -> int:
        """Entries of an activation space."""
        space = self.family.spaces[name]
        if space.kind == "heads":
            return self.size(str(space.heads)) * self.width(space)
        if space.kind == "head":
            return self.width(space)
        count = self.size(space.size or "stream")
        return count * self.width(space) if space.width or space.blocks else count

    def axis_size(self, axis: str) -> int:
        """Length of a tensor's axis, as a table names it: "write:q|k|v", "read:stream", "vocab"."""
        _, _, spaces = axis.partition(":")
        if not spaces:
            return int(axis) if axis.isdigit() else self.size(axis)
        return sum(self.space_size(name) for name in spaces.split("|"))

    def repeat(self, config: Any) -> None:
        """Set the fields of a config that must equal a size of this model, or another field."""
        text = self.family.text(config)
        for name, key in self.family.classes[self.class_name].repeats.items():
            above, _, field = name.rpartition(".")
            part = attrgetter(above)(config) if above else config
            is_size = key in self.family.config
            setattr(part, field, self.size(key) if is_size else copy.deepcopy(getattr(text, key)))

    @property
    def input(self) -> str:
        """What the model reads: "tokens", "images" or "spectrograms"."""
        if self.family.classes[self.class_name].reads:
            return "spectrograms"
        return "tokens" if "vocab" in self.family.config else "images"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The axes of one image, (channels, height, width), or of one spectrogram."""
        if axes := self.family.classes[self.class_name].reads:
            return tuple(Size(default=axis).of(self.fields) for axis in axes)
        config = getattr(self.config, "vision_config", self.config)
        size = config.image_size
        return config.num_channels, *((size, size) if isinstance(size, int) else size)

    @property
    def short_cache(self) -> tuple[str, int] | None:
        """The config field that gives transformers' cache of keys and values its layers, and them.

        None if the cache has room for all layers.
        """
        key = self.family.classes[self.class_name].cache
        if key is None or self.size(key) >= max(map(self.size, self.family.stacks.values())):
            return None
        return self.family.config_field(key), self.size(key)

    @property
    def norm_epsilon(self) -> float:
        """The number that norms add to the variance."""
        return self.family.norm.epsilon(self.fields)

    @property
    def output_space(self) -> str:
        """The space of the model's hidden states."""
        return self.family.classes[self.class_name].output or next(
            name for name in ("final", "stream") if name in self.family.spaces
        )

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every tensor of the state dict, in the table's order, tied ones included."""
        tensors: dict[str, TensorSpec] = {}
        for tensor in self._bound_rows():
            # of alternative rows the first that holds wins
            if not self.of_one_ffn or tensor.fallback is None:
                tensors.setdefault(tensor.name, tensor)
        return tuple(tensors.values())

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape of every tensor of the state dict, tied ones included."""
        return {t.name: tuple(self.axis_size(axis) for axis in t.axes) for t in self.tensors}

    def is_of_experts(self, tensor: TensorSpec) -> bool:
        """True for the tensors that hold something for each expert."""
        first = tensor.axes[0].partition(":")[2] if tensor.axes else ""
        return first in {space.name for space in self.family.mixtures}

    def used_entries(self, tensor: TensorSpec) -> int:
        """How many entries of a tensor a token uses: of one matrix per expert, only some."""
        count = math.prod(self.shapes[tensor.name])
        # a router reads its input for all experts
        is_router = len(tensor.axes) == 2 and tensor.axes[1].startswith("read:")
        if not self.is_of_experts(tensor) or len(tensor.axes) == 1 or is_router:
            return count
        space = self.family.spaces[tensor.axes[0].partition(":")[2]]
        return count * self.size(str(space.chosen)) // self.size(str(space.size))

    @property
    def shares(self) -> bool:
        """True when the tensors that the table calls tied share their storage."""
        return bool(getattr(self.config, "tie_word_embeddings", False))

    @cached_property
    def ties(self) -> Mapping[str, str]:
        """Name of a tied tensor -> name of the tensor whose storage it shares."""
        tied = [t for t in self.tensors if t.tied and t.name not in self.untied]
        return {t.name: str(t.tied) for t in tied} if self.shares else {}

    @cached_property
    def arranged_once(self) -> frozenset[str]:
        """The sizes that count units which every layer must arrange alike.

        A tensor that some layers lack serves them too, such as the relative position bias in T5's
        first block. Its heads must then lie in the same order in every layer. So must those of
        layers that take the keys of another: queries lie in the order of the keys that they meet.
        """
        keys = self.family.key_heads
        layers: dict[tuple[str, str], dict[str, set[int | None]]] = {}
        for tensor in self.tensors:
            for name in (n for axis in tensor.axes for n in axis.partition(":")[2].split("|") if n):
                space = self.family.spaces[name]
                size = space.heads or space.size
                met = {"q_heads"} if size in keys else {space.keys or "kv_heads"} & keys
                for one in {size, *(met if size in {"q_heads", *keys} else ())} - {None}:
                    # a tensor outside the layers serves those of every stack
                    stacks = self.family.stacks if tensor.layer is None else [tensor.stack]
                    for stack in stacks:
                        having = layers.setdefault((str(one), stack), {})
                        having.setdefault(tensor.template, set()).add(tensor.layer)
        return frozenset(
            size
            for (size, _), having in layers.items()
            if any(own != set().union(*having.values()) for own in having.values())
        )

    @property
    def own_tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors that have storage of their own: all but the tied ones."""
        return tuple(t for t in self.tensors if t.name not in self.ties)

    @property
    def has_tied_head(self) -> bool:
        """True when an LM head shares the token embedding."""
        return any(t.name in self.ties for t in self.tensors if not t.in_body)

    @property
    def stored_names(self) -> dict[str, str | Names]:
        """Name -> name or names in files, of the tensors for which these differ.

        Several with one name are parts of its first axis, in this order.
        """
        begins = self.family.classes[self.class_name].files

        def in_files(name: str) -> str:
            begin = next((f for f in begins.items() if name.startswith(f[1])), ("", ""))
            return begin[0] + name.removeprefix(begin[1])

        result: dict[str, str | Names] = {}
        for t in self.tensors:
            if t.stored is not None:
                result[t.name] = t.stored
            elif t.is_split:
                experts, files = range(self.axis_size(t.axes[0])), map(in_files, t.files)
                parts = ([text.replace("{e}", str(e)) for e in experts] for text in files)
                result[t.name] = tuple(map(tuple, parts))
            elif (name := in_files((t.files or (t.name,))[0])) != t.name:
                result[t.name] = name
        return result

    @property
    def transposed(self) -> tuple[str, ...]:
        """The tensors whose last two axes are swapped in files."""
        return tuple(t.name for t in self.tensors if t.row.transposed)

    def _open_size(self, name: str, layer: int | None, axis: int) -> int:
        """A size that the table leaves open: of a layer that `tower` lacks, that of another."""
        shape = self.tower.get(name.replace("{l}", str(layer)))
        if shape is None:
            pattern = name.replace("{l}", ANY)
            shape = next(s for own, s in self.tower.items() if fnmatch.fnmatch(own, pattern))
        return shape[axis]

    def _bound_rows(self) -> Iterator[TensorSpec]:
        """The tensors of every row whose condition holds; a name may come twice."""
        model_class = self.family.classes[self.class_name]
        for part, row, stack in self.family.rows_of(self.class_name):
            is_behind = part in model_class.behind
            if holds(row.when, self.fields) and (self.second or not is_behind):
                prefix, in_body = model_class.prefix_of(part), part not in model_class.heads
                for layer in self._layers(row, stack, is_behind):
                    bound = self._bind(row, prefix, stack, layer, in_body)
                    yield from (t for t in bound if t.template not in self.lacking)

    def second_files(self, names: tuple[str, ...], layer: int | None) -> tuple[str, ...]:
        """The whole names in files, if a layer that predicts a second token begins otherwise."""
        begins = self.family.second.files if self.family.second else {}
        if layer is None or layer not in self.second_layers or not begins:
            return ()
        number, found = str(layer - self.second_layers.start), []
        for name in (name.removeprefix("layers.{l}.") for name in names):
            begin = next(filter(name.startswith, begins))
            found.append(begins[begin].replace("{k}", number) + name.removeprefix(begin))
        return tuple(found)

    def _layers(self, row: Row, stack: str, is_behind: bool) -> list[int | None]:
        if "{l}" not in row.name:
            return [None]
        count = 0 if is_behind else self.size(self.family.stacks[stack])
        layers = (*range(count), *self.second_layers)
        return [n for n in layers if row.only is None or row.is_in(self.kinds_of(n, count))]

    def kinds_of(self, layer: int, layers: int) -> dict[str, bool]:
        """Kind -> whether this layer, one of `layers` of its stack, is of it."""
        family, kinds = self.family, self.family.second.kinds if self.family.second else ()
        if layer in self.second_layers:
            # several layers may predict one token
            layer, layers = (layer - self.second_layers.start) % len(kinds), len(kinds)
            own = {kind: kind in kinds[layer].split("|") for kind in family.kinds}
        else:
            own = {kind: family.is_kind(kind, layer, self.config) for kind in family.kinds}
        return {"first": layer == 0, "last": layer == layers - 1, **own}

    def _bind(
        self, row: Row, prefix: str, stack: str, layer: int | None, in_body: bool
    ) -> Iterator[TensorSpec]:
        """The tensors of one row in one layer: one, or a norm's weight and bias."""

        def fill(text: str) -> str:
            return text.replace("{l}", str(layer)).replace("{s}", stack)

        def named(text: str | None) -> str | None:
            return None if text is None else prefix + fill(text)

        if ANY in row.name:
            for name in fnmatch.filter(self.tower, prefix + row.name):
                own = name.removeprefix(prefix)
                if row.axes:
                    yield from self._bind(replace(row, name=own), prefix, stack, layer, in_body)
                    continue
                axes = tuple(map(str, self.tower[name]))
                yield TensorSpec(name, own, row, stack, None, axes, in_body)
            return
        own = row.name.replace("{s}", stack)
        tensor = TensorSpec(
            name=prefix + fill(own),
            template=own,
            row=row,
            stack=stack,
            layer=layer,
            axes=tuple(
                str(self._open_size(prefix + own, layer, number)) if axis == ANY else fill(axis)
                for number, axis in enumerate(row.axes)
            ),
            in_body=in_body,
            into=named(row.into),
            tied=named(row.tied),
            fallback=row.fallback,
            stored=None if row.stored is None else fill(row.stored),
            files=self.second_files(row.files or (row.name,), layer)
            or tuple(prefix + fill(f) for f in row.files),
            factor=named(row.factor),
        )
        if row.norm is None:
            yield tensor
            return
        source, _, target = fill(row.norm).partition(">")
        for kind in self.family.norm.tensors(self.fields):
            end = "" if row.alone else f".{kind}"
            yield replace(
                tensor,
                name=tensor.name + end,
                template=own + end,
                axes=(f"write:{target}",),
                norm=(source, target),
                fallback=None if row.fallback is None else f"{named(row.fallback)}.{kind}",
                stored=None if tensor.stored is None else f"{tensor.stored}.{kind}",
                files=tuple(f"{file}.{kind}" for file in tensor.files),
            )


def class_faults(*names: str) -> Iterator[str]:
    """Classes of a table that transformers does not have, one line each."""
    import transformers

    for name in names:
        if not hasattr(transformers, name):
            yield f"classes.{name}: no class of transformers {transformers.__version__}; {WIDEN}"


def known_type(data: Mapping[str, Any]) -> Any:
    """The model_type of a config's JSON; of its class, where transformers knows that alone.

    Kimi K2 is such a model: a `DeepseekV3ForCausalLM` of the type "kimi_k2". MiMo-7B is another,
    whose class is one of a table by the key `also`.
    """
    import transformers

    kind, names = data.get("model_type"), data.get("architectures")
    if kind in transformers.CONFIG_MAPPING or not (names and isinstance(names, list)):
        return kind
    cls = getattr(transformers, str(known_class(names[0])), None)
    is_model = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
    own = getattr(cls, "config_class", None) if is_model else None
    return getattr(own, "model_type", kind)


def known_class(name: Any) -> Any:
    """The name that transformers has for a class of `architectures`; the name itself if none.

    Either they differ by underscores and case alone, as KimiK25ForConditionalGeneration of Kimi
    K2.5's own code and Kimi_K25ForConditionalGeneration, or a table has the name in `also`.
    """
    import transformers

    def bare(name: str) -> str:
        return name.replace("_", "").lower()

    # `hasattr` would import the class and its modelling code, and `dir` takes 0.3 s
    known = [*vars(transformers), *transformers.__all__]
    if not isinstance(name, str) or name in known:
        return name
    also = (shipped_table(kind).get("also", {}).get(name) for kind in supported_families())
    return next(chain((own for own in known if bare(own) == bare(name)), filter(None, also)), name)
