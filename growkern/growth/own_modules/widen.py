"""Widens a PyTorch module of any class: `expand` with arguments made from sizes.

Entry i of an axis that grows is a copy of entry i mod source. Linear layers and convolutions read
copies, so each of their weights is routed to one of them, and the copies add up to what the small
layer read. What the code of a module does between its layers is seen only by running it.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from growkern.arguments import check_kind, whole_number
from growkern.errors import FunctionChangedWarning, GrowthError, listed, nearest, warn
from growkern.growth.models import class_of
from growkern.growth.own_modules import layers
from growkern.growth.own_modules.trial import Comparison, compare
from growkern.growth.source import refuse_computed
from growkern.growth.space import copies as of_copies, cyclic
from growkern.ops.expand import Routing, expand
from growkern.package import DOCS

Shape = tuple[int, ...] | list[int]
BY_HAND = "growkern.expand(weight, **growkern.widening(...))"
# runs of a model that look for `fused`
MOST_GUESSES = 16


def widening(source: Shape, target: Shape, *, reads: bool = True, fused: int = 1) -> dict[str, Any]:
    """Arguments of `expand` that take a weight of one shape to a larger shape, exactly.

    Args:
        source, target: shapes of one weight, (rows, columns) or (entries,). That of a convolution
            is (rows, channels, kernel ...), and the arguments are those for `weight.flatten(1)`.
        reads: True for the matrix of a linear layer, whose columns read an input of copies. False
            for an embedding, whose columns are copies themselves. Of no effect on a vector.
        fused: how many matrices of equal size lie one below the other, such as 3 for queries, keys
            and values. Copies stay within each of them.

    Returns:
        The keywords `rows`, `cols` and `routing`, as far as the shapes need them.

    Raises:
        GrowthError: a shape that is no larger one, or rows that `fused` does not divide.
    """
    for name, shape in (("source", source), ("target", target)):
        check_kind(name, shape, (tuple, list), "the shape of a weight, such as (64, 32)")
        for size in shape:
            whole_number(f"{name} {tuple(shape)}", size, "whole sizes")
    source, target = tuple(source), tuple(target)
    _check_sizes(source, target, fused)
    kernel = source[2:]
    if kernel != target[2:]:
        raise GrowthError(f"{source} cannot become {target}: only the first two sizes may grow")
    result: dict[str, Any] = {}
    if source[0] < target[0]:
        result["rows"] = cyclic(source[0], target[0], fused)
    if len(source) > 1 and source[1] < target[1]:
        # the places of a kernel lie side by side in the columns of a channel
        places = prod(kernel)
        channels = cyclic(source[1], target[1])
        result["cols"] = (channels[:, None] * places + torch.arange(places)).flatten()
        if reads:
            result["routing"] = Routing(1, of_copies(result["cols"], source[1] * places).copies)
    return result


class Fill(NamedTuple):
    """How one tensor of the wider module follows from the small one's."""

    shape: tuple[int, ...]
    fused: int = 1
    reads: int | None = None  # the axis that reads copies; None: all axes are copies


def _check_sizes(source: tuple[int, ...], target: tuple[int, ...], fused: int) -> None:
    fused = whole_number("fused", fused, "how many matrices lie below each other, such as 3")
    if len(source) != len(target) or not source or fused < 1:
        raise GrowthError(
            "widening takes two shapes of equally many sizes, 1 or more, and fused >= 1: got "
            f"{source}, {target}, fused={fused}"
        )
    if any(a < 1 or a > b for a, b in zip(source, target, strict=True)):
        raise GrowthError(f"shape {source} cannot become {target}: no size may fall")
    if source[0] % fused or target[0] % fused:
        raise GrowthError(f"fused={fused} does not divide {source[0]} and {target[0]} rows")


def widen(
    small: nn.Module,
    large: nn.Module,
    *,
    inputs: Any = None,
    fused: dict[str, int] | None = None,
    copies: Iterable[str] = (),
    skip: Iterable[str] = (),
) -> nn.Module:
    """Fill a wider module with the weights of a trained one, and check that both compute the same.

    Both are of one class, and may be a whole model or a single layer. With `inputs`, copies of both
    are run in float64 and evaluation mode before anything is written. Without `inputs` nothing is
    run: layers of torch.nn that may mix entries are refused. A warning says that the outputs were
    not compared, unless the module is a single layer of torch.nn.

    Known layers are linear ones, embeddings, convolutions, `nn.MultiheadAttention` and norms. A
    norm over entries that grow needs a multiple of its size, because all entries then have equally
    many copies. An attention gets more heads of the same size, and as many query heads for each key
    head as before. Groups keep their size. All other widths may be any.

    Args:
        small: the trained module.
        large: the module to fill; it has the names of `small`, and no smaller size.
        inputs: the arguments of `forward` for the comparison, such as (x,), or a dict of them by
            name. Outputs that are wider are compared with copies, and warned of.
        fused: `fused` of `widening` for layers of a name, such as {"qkv": 3}. A name is the end of
            a layer's path, such as "qkv" or "attn.qkv"; of two, the longer one counts.
        copies: names of parameters and buffers of your own whose entries are copies along each axis
            that grows, such as position tables. A name is one or more parts of a path, such as
            "pos" or "encoder.pos".
        skip: names of modules, parameters and buffers that you have filled in `large`. They are
            neither written nor looked at, but they take part in the comparison.

    Returns:
        `large`.

    Raises:
        GrowthError: names or layers that differ, a tied weight, a tensor that is not known to read
            copies or to be one, or outputs that differ. Nothing is written then.
    """
    fused = {} if fused is None else fused
    check_kind("fused", fused, dict, 'numbers by the names of layers, such as {"qkv": 3}')
    if inputs is not None:
        check_kind("inputs", inputs, (tuple, list, dict), "arguments of forward, such as (x,)")
    copies, skip = ((x,) if isinstance(x, str) else tuple(x) for x in (copies, skip))
    names = _names_to_fill(small, large, skip)
    _check_keys(small, large, fused, (*copies, *skip))
    for module in (small, large):
        refuse_computed(module)
    _check_layers(small, large, skip, has_inputs=inputs is not None)
    fills = _fills(names, small, large, fused, copies)
    _check_tied(large, fills)
    if inputs is not None:
        _check_outputs(small, large, inputs, names, fused, copies)
    elif not layers.is_whole(small):
        warn("widen has compared no outputs: pass inputs=(x,), or compare them yourself")
    _write(small, large, fills)
    return large


def _check_outputs(
    small: nn.Module,
    large: nn.Module,
    inputs: Any,
    names: list[str],
    fused: dict[str, int],
    copies: tuple[str, ...],
) -> None:
    """Refuse outputs that would differ, and name the `fused` with which they would not."""
    device = next((x.device for x in small.parameters()), torch.device("cpu"))
    trial, wide = (copy.deepcopy(x).to(device).double().eval() for x in (small, large))

    def compared(told: dict[str, int]) -> Comparison:
        _write(trial, wide, _fills(names, small, large, told, copies))
        return compare(trial, wide, inputs, {1, *told.values()})

    why = compared(fused)
    if why.wider:
        warn(
            f"outputs are wider ({', '.join(why.wider)}): they hold copies, and a softmax over "
            "them changes. Give `large` as many as `small`, unless widened layers read them",
            FunctionChangedWarning,
        )
    if not why.sentence:
        return
    fills, left = _fills(names, small, large, fused, copies), iter(range(MOST_GUESSES))
    if told := _fused_by_trial(compared, why, fused, _layers_of(small, fills), left):
        raise GrowthError(
            f"{why.sentence}. There are several matrices in "
            f"{', '.join(x for x in told if x not in fused)}: pass fused={json.dumps(told)}"
        )
    if why.new:
        raise GrowthError(f"{why.sentence}. {why.new}, which is new, runs before it: it must add 0")
    attends = any("att" in type(layer).__name__.lower() for layer in small.modules())
    heads = "Attention grows by heads of the same size: change their number. Or " * attends
    raise GrowthError(
        f"{why.sentence}. {heads}`fused`, `copies` and `skip` of growkern.widen say what it cannot "
        f"see, such as two tensors that a layer reads side by side: {DOCS}/own_models.md"
    )


def _layers_of(small: nn.Module, fills: dict[str, Fill]) -> dict[str, bool]:
    """The layers whose rows grow, by their paths: whether they read copies."""
    layers = dict[str, bool]()
    for name, fill in fills.items():
        if _get(small, name).shape[:1] != fill.shape[:1]:
            path = name.rpartition(".")[0]
            layers[path] = layers.get(path, False) or fill.reads is not None
    return layers


def _fused_by_trial(
    compared: Callable[[dict[str, int]], Comparison],
    why: Comparison,
    told: dict[str, int],
    layers: dict[str, bool],
    left: Iterator[int],
) -> dict[str, int] | None:
    """The `fused` with which outputs do not differ, tried on what ran before they did.

    Args:
        left: one item for each run that may be tried.
    """
    for guess, _ in zip(_guesses(why.before, told, layers), left, strict=False):
        # one name may belong to layers that are not alike
        with contextlib.suppress(GrowthError):
            new = compared(guess)
            if not new.sentence:
                return guess
            if len(new.before) > len(why.before) and (
                found := _fused_by_trial(compared, new, guess, layers, left)
            ):
                return found
    return None


def _guesses(
    before: tuple[str, ...], told: dict[str, int], layers: dict[str, bool]
) -> Iterator[dict[str, int]]:
    """A layer may hold 2 or 3 matrices, and what follows keeps them apart, as norms do."""
    ran = dict[str, int]()
    for path in before:
        name = path.rpartition(".")[2]
        if path in layers and name not in {**told, **ran}:
            ran[name] = 0
            together = [[*ran][::-1]] if len(ran) > 1 else []
            for names in [[name], *together] if layers[path] else []:
                yield from ({**told, **dict.fromkeys(names, n)} for n in (2, 3))


def _fills(
    names: list[str],
    small: nn.Module,
    large: nn.Module,
    fused: dict[str, int],
    copies: tuple[str, ...],
) -> dict[str, Fill]:
    """How each tensor is widened."""
    fills = dict[str, Fill]()
    for name in names:
        try:
            fills[name] = _fill_of(name, small, large, fused, copies)
        except GrowthError as error:
            kind = class_of(small.get_submodule(name.rpartition(".")[0])).__name__
            raise GrowthError(f"{name} of {kind}: {error}") from None
    return fills


@torch.no_grad()
def _write(small: nn.Module, large: nn.Module, fills: dict[str, Fill]) -> None:
    """Fill tensors of the wider module."""
    for seed, (name, fill) in enumerate(fills.items()):
        out = _get(large, name)
        weight = _get(small, name).to("cpu" if fill.reads is not None else out.device)
        if fill.reads is None:
            weight = _copied(weight, fill)
        else:
            weight, wide = (x.movedim(fill.reads, 1) for x in (weight, out))
            how = widening(weight.shape, wide.shape, fused=fill.fused)
            # a seed of its own: each layer routes to other copies
            matrix = expand(weight.flatten(1), **how, seed=seed, out_dtype=out.dtype)
            weight = matrix.view(wide.shape).movedim(1, fill.reads)
        out.copy_(weight)


def _copied(weight: Tensor, fill: Fill) -> Tensor:
    """A tensor with copies of its entries along each axis that grows."""
    for axis, (a, b) in enumerate(zip(weight.shape, fill.shape, strict=True)):
        if a != b:
            index = cyclic(a, b, 1 if axis else fill.fused)
            weight = weight.index_select(axis, index.to(weight.device))
    return weight


def _get(module: nn.Module, name: str) -> Tensor:
    """A parameter or buffer by its path."""
    path, _, key = name.rpartition(".")
    return getattr(module.get_submodule(path), key)


def _is_named(path: str, keys: Iterable[str]) -> bool:
    """Whether a path has one of these names among its parts; "a.b" stands for two of them."""
    return any(f".{key}." in f".{path}." for key in keys)


def _is_end(key: str, path: str) -> bool:
    """Whether a path ends with this name of one or more parts."""
    return f".{path}".endswith(f".{key}")


def _names_to_fill(small: nn.Module, large: nn.Module, skip: tuple[str, ...]) -> list[str]:
    """The parameters and buffers of `small`, but those to skip; refuses modules of other names."""
    check_kind("small", small, nn.Module, "the trained module")
    check_kind("large", large, nn.Module, "the module to fill, of the class of small")
    ours, theirs = (dict(x.named_parameters(remove_duplicate=False)) for x in (small, large))
    held, wide = (dict(x.named_buffers(remove_duplicate=False)) for x in (small, large))
    alone = (ours.keys() ^ theirs.keys()) | (held.keys() - wide.keys())
    if alone := {name for name in alone if not _is_named(name, skip)}:
        layers = ({x for x, _ in y.named_modules(remove_duplicate=False)} for y in (small, large))
        new = sorted(set.__xor__(*layers)) or sorted(alone)
        tops = tuple(name for name in new if name.rpartition(".")[0] not in new)
        raise GrowthError(
            f"only one of small and large has {listed(sorted(alone), 5)}: build both with the same "
            f"class and number of layers, or fill what is new and give skip={tops}"
        )
    names = [name for name in (*ours, *held) if not _is_named(name, skip)]
    for name in names:
        for where, module in (("small", small), ("large", large)):
            if is_lazy(x := _get(module, name)) or x.is_meta:
                raise GrowthError(
                    f"{name} of `{where}` has no values: build it with its sizes on a device"
                )
    first: dict[int, str] = {}
    for name in names:
        if name in ours:
            other = first.setdefault(id(theirs[name]), name)
            if ours[other] is not ours[name]:
                raise GrowthError(
                    f"{other} and {name} are one parameter in `large`, but two in `small`: build "
                    "both with the same class"
                )
    return names


def _check_keys(small: nn.Module, large: nn.Module, fused: Any, keys: tuple[str, ...]) -> None:
    """Refuse names in arguments of `widen` that nothing has."""
    modules = [path for path, _ in large.named_modules(remove_duplicate=False) if path]
    last = {path.rpartition(".")[2] for path in modules}
    for name in (x for x in fused if not any(_is_end(x, path) for path in modules)):
        allowed = nearest(name, last) if last else f": fill a single layer with {BY_HAND}"
        raise GrowthError(f"fused names {name!r}, which is no layer{allowed}")
    for module in (small, large):
        modules += [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    for key in keys:
        if not any(_is_named(path, [key]) for path in modules):
            own = {name.rpartition(".")[2] for name in modules}
            raise GrowthError(f"{key!r} is no part of a name{nearest(str(key), own)}")


def _check_layers(
    small: nn.Module, large: nn.Module, skip: tuple[str, ...], *, has_inputs: bool
) -> None:
    """Refuse layers that compute something else in `large`, whatever weights they get."""
    ours, wide = (dict(x.named_modules(remove_duplicate=False)) for x in (small, large))
    first, second = ([x.shape for x in (*m.parameters(), *m.buffers())] for m in (small, large))
    is_seen = has_inputs or first == second
    for path, layer in ours.items():
        if _is_named(path, skip):
            continue
        why = "" if path not in wide else layers.other_function(layer, wide[path])
        if not why and not is_seen and layers.may_mix(layer):
            why = "it may mix entries that grow: pass inputs=(x,), which compares the outputs"
        if why:
            raise GrowthError(f"{path or 'the layer'} ({class_of(layer).__name__}): {why}")
    filled: tuple[str, ...] = ()
    for path in sorted(ours.keys() ^ wide.keys()):
        layer = (ours | wide)[path]
        is_told = _is_named(path, skip) or path.startswith(filled)
        held = [f"{path}.{name}" for name, _ in layer.named_parameters()]
        if held and all(_is_named(name, skip) for name in held):
            filled += (f"{path}.",)
        elif not (is_told or isinstance(layer, layers.IN_TRAINING)):
            raise GrowthError(
                f"only one of small and large has {path} ({class_of(layer).__name__}): build both "
                "with the same class"
            )


def _fill_of(
    name: str, small: nn.Module, large: nn.Module, fused: dict[str, int], copies: tuple[str, ...]
) -> Fill:
    """How one tensor is widened."""
    weight, out = _get(small, name), _get(large, name)
    path, _, key = name.rpartition(".")
    layer = small.get_submodule(path)
    source, target = tuple(weight.shape), tuple(out.shape)
    if source == target:
        return Fill(target)
    named = [x for x in fused if _is_end(x, path)]
    parts = fused[max(named, key=len)] if named else 1
    if isinstance(layer, nn.MultiheadAttention) and key in ("in_proj_weight", "in_proj_bias"):
        # of queries, keys and values
        parts = 3
    _check_sizes(source, target, parts)
    if isinstance(layer, layers.KNOWN) and key in layers.KEYS:
        return Fill(target, parts, layers.reading_axis(layer, key))
    fill = Fill(target, parts)
    if _is_named(name, copies):
        return fill
    if len(source) == 1 and isinstance(weight, nn.Parameter):
        if target[0] % source[0]:
            raise GrowthError(layers.no_multiple(source[0], target[0]))
        return fill
    # the caller may have filled it
    if torch.equal(_copied(weight.to(out.device), fill).to(out.dtype), out):
        return fill
    raise GrowthError(
        f"how {source} grows to {target} is not known. If each entry is copied, as in a table of "
        f"positions, pass copies=({key!r},). Else fill it, a matrix with {BY_HAND}, and pass "
        f"skip=({key!r},)"
    )


def _check_tied(large: nn.Module, fills: dict[str, Fill]) -> None:
    """Refuse one parameter in two places that must hold different things."""
    first: dict[int, str] = {}
    for name, fill in fills.items():
        other = first.setdefault(id(_get(large, name)), name)
        if fills[other] != fill:
            raise GrowthError(
                f"{other} and {name} are one parameter, but one writes copies and the other reads "
                "them: build `large` with two parameters, and give `small` two as well"
            )
