"""Shows a dense model as a mixture, from which growth then makes more experts.

The FFN of I units becomes c experts of I / c units each. A router that takes all of them, with
weights 1/c, computes the same as the dense model if their outputs count c times. In whole copies c
is 1. The mixture is never built: `upcycled` gives a source that has its config, names and shapes,
and reads its tensors from the dense model's. All target experts are copies of these c.

The weights of the chosen experts add up to 1 for every router, so its rows are free. Those of the c
parts of one copy are equal: the router then takes all of them or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import transformers

from growkern.errors import GrowthError
from growkern.families import (
    Dense,
    Family,
    ModelSpec,
    Row,
    TensorSpec,
    dense_families,
    load_family,
    refuse_other_mixture,
    unfollowed,
)
from growkern.growth.history import GROWN_KEY
from growkern.growth.options import GrowthOptions
from growkern.growth.source import Assembled, Parts, Source
from growkern.growth.space.ways import layers_of

# fields that say what a config is of
NAMES = ("model_type", "architectures", "transformers_version")


def mixture_of(small: ModelSpec, target: Any) -> str:
    """The family of mixtures that a model becomes in a growth to this config; "": it stays one."""
    kind, known = str(target.model_type), small.family.model_type
    if known not in dense_families(kind):
        return ""
    if kind != known:
        return kind
    models = (small, small.with_config(target))
    before, after = (any(t.row.dense for t in model.tensors) for model in models)
    return known if after and not before else ""


def mixture_config(
    small: ModelSpec, options: GrowthOptions, dims: dict[str, Any], target: Any = None
) -> Any:
    """The config of a dense model as a mixture of one copy of its FFN.

    Args:
        options: `to` is the `model_type` of the mixture.
        dims: the target's sizes, by the mixture's own names. The lists and numbers that decide
            which layers are sparse are taken out of it.
        target: a whole target config instead of `dims`.
    """
    kind = options.to
    family = _sibling(small, options)
    cls = transformers.CONFIG_MAPPING[kind]
    # a config keeps keys that its class does not know, which its model ignores
    known, declared = cls().to_dict(), type(small.config)().to_dict()
    given = small.config.to_dict()
    values = {n: x for n, x in given.items() if n in known.keys() & declared and n not in NAMES}
    fixed = {**family.dense.set} if family.dense else {}
    if family.dense and (free := family.dense.renormalised):
        if target is None:
            fixed[free] = dims.pop(free, fixed[free])
        elif getattr(target, GROWN_KEY, False):
            fixed[free] = getattr(target, free)
        if type(fixed[free]) is not bool:
            raise GrowthError(f"{free}={fixed[free]!r}: give True or False")
    config = cls(**{**values, **fixed})
    for key, size in small.family.config.items():
        own = family.config[key].field if key in family.config else None
        # some configs take sizes that they have no default for
        if size.field and own == size.field and own not in known:
            setattr(config, own, small.size(key) - size.plus)
    kinds, layers = family.sparse_fields, small.size(next(iter(family.stacks.values())))
    asked = kinds.keys() & dims.keys()
    of_dense = (transformers.CONFIG_MAPPING[other]().to_dict() for other in dense_families(kind))
    own = kinds.keys() | known.keys() - {*fixed}.union(*of_dense)
    for name in asked if target is None else own:
        value = dims.pop(name) if target is None else getattr(target, name)
        if name in asked:
            value = list(value) if isinstance(value, tuple) else value
            _check_layers(name, kinds[name], value, layers)
        setattr(config, name, value)
    config._name_or_path = getattr(small.config, "_name_or_path", "")
    _set_sizes(config, small, family, options, dims if target is None else vars(target))
    view = ModelSpec(family, config, "")
    if target is not None:
        _of_source_layers(view, target, options)
    if kinds and not any(view.kinds_of(layer, layers)["sparse"] for layer in range(layers)):
        given = " and ".join(f"{name}={getattr(config, name)}" for name in sorted(kinds))
        raise GrowthError(f"{given}: no layer of the {layers} becomes a mixture: give other values")
    return config


def upcycled(source: Source, config: Any, options: GrowthOptions) -> Source:
    """A dense source as the mixture of `mixture_config`, if that has all that the source has."""
    small = source.spec
    family = _with_start(_sibling(small, options), options)
    name = _class_like(family, small)
    if name is None:
        raise GrowthError(f"{small.class_name}: a {family.model_type} has no class with its head")
    view = replace(ModelSpec.of(config, name, family), of_one_ffn=True, untied=small.untied)
    upcycling = Upcycling(source, view, options)
    parts = upcycling.parts
    used = {name for part in parts.values() for name in part.names} | view.shapes.keys()
    for tensor in (t for t in small.own_tensors if t.name not in used):
        when = f"config.{tensor.row.when}: " if tensor.row.when else ""
        raise GrowthError(f"{when}a {view.class_name} has no place for {tensor.name}")
    dtypes = {
        t.name: source.dtypes[parts[t.name].names[0] if t.name in parts else t.name]
        for t in view.own_tensors
    }
    read = Assembled(source.read, parts)
    return replace(source, spec=view, dtypes=dtypes, read=read, keys={}, upcycling=upcycling)


@dataclass(frozen=True)
class Upcycling:
    """How the experts of a mixture come about, which a dense model becomes.

    Attributes:
        dense: the dense model.
        spec: the mixture of one copy of its FFN, of which all target experts are copies.
        options: those of the growth.
    """

    dense: Source
    spec: ModelSpec
    options: GrowthOptions

    def of(self, dense: Source) -> Source:
        """Another opened source with the sizes of `dense`, as the same mixture."""
        return upcycled(dense, self.spec.config, self.options)

    @property
    def _splits(self) -> int:
        """How many experts one copy of the FFN is split into."""
        return self.spec.size(str(self.spec.family.mixtures[0].size))

    @cached_property
    def parts(self) -> dict[str, Parts]:
        """The mixture's tensors that are made of the dense FFN's."""
        small, view = self.dense.spec, self.spec
        prefix, result = small.family.classes[small.class_name].prefix, {}
        for tensor in (t for t in view.own_tensors if t.row.dense):
            names = tuple(prefix + x.replace("{l}", str(tensor.layer)) for x in tensor.row.dense)
            count, axis = self._splits if len(tensor.axes) > 2 else 0, int(is_output(tensor.row))
            result[tensor.name] = Parts(names, count, axis, view.shapes[tensor.name][axis])
        return result

    @property
    def together(self) -> int:
        """How many experts have equal rows in the router, so that it takes all of them or none.

        They are the parts of one copy of the FFN; with noise those of two, between which it
        cancels.
        """
        return self._splits * (1 + self.options.has_pairs)

    @property
    def free_weights(self) -> str:
        """The config field that says that chosen experts keep their weights of a softmax, or "".

        Their weights then do not add up to 1.
        """
        name = self._table.renormalised or ""
        return "" if not name or getattr(self.spec.fields, name) else name

    @property
    def _table(self) -> Dense:
        return self.spec.family.dense or Dense(())

    def is_router(self, tensor: TensorSpec) -> bool:
        """True for the matrix that chooses experts, which the dense model lacks."""
        mixtures = [f"write:{space.name}" for space in self.spec.family.mixtures]
        return len(tensor.axes) == 2 and tensor.axes[0] in mixtures

    def is_copied(self, row: Row) -> bool:
        """True for the matrices of experts that are copies of the FFN's."""
        return bool(row.dense) and len(row.axes) == 3

    def has_noise(self, row: Row) -> bool:
        """True for the matrices that noise makes differ between two copies of an FFN."""
        return self.options.symmetry == "noise" and is_output(row) and self.is_copied(row)

    def adds_nothing(self, row: Row) -> bool:
        """True for the matrices of experts that are beside those which compute the FFN."""
        return _adds_nothing(row, self.options)

    def output_scale(self, large: ModelSpec, row: Row) -> float:
        """The factor of an `is_output` matrix.

        Each of c experts that the FFN was split into has a weight of 1/c, and the model may
        multiply their outputs with a factor. In a softmax over E experts, the k chosen ones have
        k/E together on average.
        """
        if len(row.axes) == 2:
            return 1 / self._table.shared
        routed = self._table.routed
        factor = 1.0 if routed is None else getattr(self.spec.fields, routed)
        if self.free_weights:
            (space,) = self.spec.family.mixtures
            factor *= large.size(str(space.chosen)) / large.size(str(space.size))
        return float(self._splits / factor)

    def check_sizes(self, large: ModelSpec) -> None:
        """Refuse a router that would take a part of the experts that belong together."""
        together = self.together
        if together == 1:
            return
        (space,) = self.spec.family.mixtures
        why = _why_together(together, self.options)
        for key in (str(space.size), str(space.chosen)):
            if (size := large.size(key)) % together:
                field = self.spec.family.config_field(key)
                raise GrowthError(f"{field}={size}: {why}: give a multiple of {together}")
        if self.options.router == "zero":
            # rows of 0 would tie all experts
            raise GrowthError(
                f"router='zero' does not keep experts together: {why}. Leave it out, or give "
                "experts of the FFN's width, without noise"
            )


def is_output(row: Row) -> bool:
    """True for the matrices made of a dense FFN's that write its output."""
    return bool(row.dense) and "write:stream" in row.axes


def _adds_nothing(row: Row, options: GrowthOptions) -> bool:
    return bool(row.dense) and (len(row.axes) > 2) == (options.shared_expert == "dense")


def _why_together(together: int, options: GrowthOptions) -> str:
    why = f"{together} experts belong together, the parts of an FFN"
    if options.has_pairs:
        why += ", in pairs of copies whose noise cancels (symmetry='noise')"
    return why


def _with_start(family: Family, options: GrowthOptions) -> Family:
    """The table of a mixture of which some experts add nothing at first: their outputs are zero.

    Either those that a router chooses or the one that all tokens share computes the dense FFN.
    """

    def started(row: Row) -> Row:
        is_zero = is_output(row) and _adds_nothing(row, options)
        return replace(row, dense=(), fallback="zero") if is_zero else row

    return replace(
        family, tensors={n: (*map(started, rows),) for n, rows in family.tensors.items()}
    )


def class_that_became(config: Any, mixture: ModelSpec) -> str:
    """The class of the dense model with this config that became a mixture."""
    family = load_family(config.model_type)
    name = _class_like(family, mixture)
    if name is None or family.model_type not in dense_families(mixture.family.model_type):
        raise GrowthError(f"no {family.model_type} becomes a {mixture.class_name}")
    return name


def _class_like(family: Family, model: ModelSpec) -> str | None:
    """The class of a family with the same heads and prefix as a model's, if it has one."""
    own, classes = model.family.classes[model.class_name], family.classes.items()
    return next((n for n, c in classes if (c.heads, c.prefix) == (own.heads, own.prefix)), None)


def _sibling(small: ModelSpec, options: GrowthOptions) -> Family:
    kind, known = options.to, small.family.model_type
    refuse_other_mixture(known, kind)
    if small.family.table is not None:
        raise GrowthError(f"to={kind!r}: a {known} with a table of your own cannot become one")
    family = load_family(kind)
    if options.shared_expert == "dense" and len(_widths(family)) < 2:
        raise GrowthError(
            f"shared_expert='dense': a {kind} has no expert that all tokens share: leave it out"
        )
    for refusal in family.dense.refuse if family.dense else ():
        refusal.check(small.fields)
    for tensor in (t for t in small.tensors if t.row.dense):
        raise GrowthError(
            f"to={kind!r}: layer {tensor.layer} has experts already: only a model whose layers are "
            "all dense becomes a mixture. Leave `to` out to grow the experts"
        )
    return family


def _check_layers(name: str, word: str, value: Any, layers: int) -> None:
    """Refuse layers that the source does not have; arguments as in `Family.sparse_fields`."""
    if word != "in":
        is_fit, wanted = type(value) is int and value >= 0, "a whole number of 0 or more"
    else:
        is_fit = isinstance(value, list) and all(
            type(x) is int and x in range(layers) for x in value
        )
        wanted = f"a list of numbers of layers, 0 to {layers - 1}"
    if not is_fit:
        raise GrowthError(f"{name}={value!r}: give {wanted}")


def _of_source_layers(view: ModelSpec, target: Any, options: GrowthOptions) -> None:
    """Count a target's own layers by the source's, in the fields that say which are sparse."""
    large, key = view.with_config(target), next(iter(view.family.stacks.values()))
    if not 0 < view.size(key) < large.size(key):
        return
    layers = layers_of(view, large, key, options)
    for name, word in view.family.sparse_fields.items():
        setattr(view.config, name, unfollowed(word, getattr(target, name), layers))


def _set_sizes(
    config: Any,
    small: ModelSpec,
    family: Family,
    options: GrowthOptions,
    asked: Mapping[str, Any],
) -> None:
    """Give the mixture as many experts as its FFN splits into, all of them chosen."""
    asked = {config.attribute_map.get(name, name): value for name, value in asked.items()}
    (space,) = family.mixtures
    fields = [family.config_field(str(key)) for key in (space.size, space.chosen)]
    for field in fields:
        if field not in asked:
            others = [name for name, own in config.attribute_map.items() if own == field]
            names = " or ".join([field, *others])
            raise GrowthError(f"to={family.model_type!r} needs {names}: give it as well")
    whole, (routed, *shared) = small.size("ffn"), _widths(family)
    width = family.config_field(routed)
    parts = _parts_of(whole, asked.get(width, whole), width)
    setattr(config, width, whole // parts)
    for key in shared:
        _set_shared(config, family, key, whole, options, asked)
    copies = 1 + options.has_pairs
    together = parts * copies
    count, chosen = (asked[field] for field in fields)
    # other values are refused with the other sizes
    if type(chosen) is int is type(count) and count > 0:
        if chosen > count:
            raise GrowthError(f"{fields[1]}={chosen}: give at most {fields[0]}={count}")
        if chosen % parts:
            fit = (
                f", or {width}={whole // n}"
                for n in range(parts, 0, -1)
                if not (whole % n or chosen % (n * copies) or count % (n * copies))
            )
            raise GrowthError(
                f"{fields[1]}={chosen}: one copy of the FFN has {parts} experts of "
                f"{width}={whole // parts}, and a router must choose all of them or none: give "
                f"{fields[1]}={-(-chosen // together) * together}{next(fit, '')}"
            )
    _check_groups(family, together, options, asked)
    for key in (*fields, *map(family.config_field, space.groups)):
        setattr(config, key, parts if key in fields else 1)


def _check_groups(
    family: Family, together: int, options: GrowthOptions, asked: Mapping[str, Any]
) -> None:
    """Refuse groups that part experts which belong together, or that have too few of them."""
    (space,) = family.mixtures
    names = [family.config_field(str(k)) for k in (space.size, space.chosen, *space.groups)]
    sizes = [asked.get(name, 1) for name in names]
    if not space.groups or any(type(size) is not int or size < 1 for size in sizes):
        return
    count, chosen, groups, taken = sizes
    each, rest = divmod(count, groups)
    # a group is as good as the sum of its best two
    if rest or each % together or each < 2 or groups < taken or chosen > taken * each:
        why, of, near = "", "", ""
        if together > 1:
            why, of = f"{_why_together(together, options)}: ", f", in multiples of {together}"
        if 0 < taken <= groups:
            step, least = groups * together, 2 if together == 1 else 1
            low = max(count // step, least, -(-chosen // (taken * together))) * step
            near = f"; nearest sizes that fit: {names[0]}={low} or {low + step}"
        raise GrowthError(
            f"{names[2]}={groups}, {names[3]}={taken}: {why}give groups of 2 or more experts each"
            f"{of}, of {names[0]}={count}, and take enough of the groups for "
            f"{names[1]}={chosen}{near}"
        )


def _set_shared(
    config: Any,
    family: Family,
    key: str,
    whole: int,
    options: GrowthOptions,
    asked: Mapping[str, Any],
) -> None:
    """Give the expert that all tokens share units of the dense FFN: all, unless it adds nothing."""
    size = family.config[key]
    # its width, or how many times it is as wide as the others
    field, _, other = str(size.field or size.default).partition(" * ")
    most = whole // getattr(config, other) if other else whole
    is_whole = options.shared_expert == "dense" or not other
    count = asked.get(field, most if is_whole else getattr(config, field))
    if options.shared_expert == "dense" and type(count) is int and count < most:
        raise GrowthError(
            f"{field}={count}: with shared_expert='dense' give at least {most}, for all {whole} "
            "units of the FFN"
        )
    setattr(config, field, min(count, most) if type(count) is int else most)


def _widths(family: Family) -> tuple[str, ...]:
    """The width of an expert, and that of the expert that all tokens share, if there is one."""
    rows = [row for rows in family.tensors.values() for row in rows if is_output(row)]
    spaces = (row.axes[-1].partition(":")[2] for row in sorted(rows, key=lambda r: -len(r.axes)))
    return tuple(dict.fromkeys(str(family.spaces[name].size) for name in spaces))


def _parts_of(whole: int, asked: Any, field: str) -> int:
    """How many experts of at most this size the FFN splits into evenly."""
    if type(asked) is not int or asked < 1:
        # refused with the other sizes
        return 1
    parts = -(-whole // asked)
    if whole % parts:
        fit = [n for n in range(1, whole + 1) if whole % n == 0]
        near = sorted(fit, key=lambda n: abs(whole // n - asked))[:2]
        raise GrowthError(
            f"{field}={asked}: the FFN of {whole} units does not split evenly into {parts} "
            f"experts; the nearest sizes that fit are "
            f"{' and '.join(str(whole // n) for n in sorted(near, reverse=True))}"
        )
    return parts
