"""Widens a PyTorch module of any class exactly: `expand` with arguments made from sizes.

Entry i of an axis that grows is a copy of entry i mod source. Linear layers read copies, so each of
their weights is routed to one of them, and the copies add up to what the small layer read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from growkern.arguments import check_kind, whole_number
from growkern.errors import GrowthError, nearest
from growkern.growth.source.live import FUNCTIONS, QUANTISED, class_of
from growkern.growth.space import maps
from growkern.growth.space.spaces import copies
from growkern.ops.expand.call import Routing
from growkern.ops.expand.op import expand

Shape = tuple[int, ...] | list[int]
# layers that do nothing in evaluation mode
IN_TRAINING = (nn.Identity, nn.Dropout, nn.modules.dropout._DropoutNd)
# attributes of a layer that say how it computes, and not what
OF_SPEED = ("training", "enable_nested_tensor", "use_nested_tensor", "mask_check", "sparse")
BY_HAND = "growkern.expand(weight, **growkern.widening(...))"


def widening(source: Shape, target: Shape, *, reads: bool = True, fused: int = 1) -> dict[str, Any]:
    """Arguments of `expand` that take a weight of one shape to a larger shape, exactly.

    Args:
        source, target: shapes of one weight, (rows, columns) or (entries,).
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
    fused = whole_number("fused", fused, "how many matrices lie below each other, such as 3")
    if len(source) != len(target) or len(source) not in (1, 2) or fused < 1:
        raise GrowthError(
            f"widening takes two shapes of 1 or 2 sizes, and fused >= 1: got {tuple(source)}, "
            f"{tuple(target)}, fused={fused}"
        )
    if any(a < 1 or a > b for a, b in zip(source, target, strict=True)):
        raise GrowthError(f"shape {tuple(source)} cannot become {tuple(target)}: no size may fall")
    if source[0] % fused or target[0] % fused:
        raise GrowthError(f"fused={fused} does not divide {source[0]} and {target[0]} rows")
    result: dict[str, Any] = {}
    if source[0] < target[0]:
        part = maps.cyclic(source[0] // fused, target[0] // fused)
        result["rows"] = torch.cat([part + i * (source[0] // fused) for i in range(fused)])
    if len(source) == 2 and source[1] < target[1]:
        result["cols"] = maps.cyclic(source[1], target[1])
        if reads:
            result["routing"] = Routing(1, copies(result["cols"], source[1]).copies)
    return result


@torch.no_grad()
def widen(small: nn.Module, large: nn.Module, *, fused: dict[str, int] | None = None) -> nn.Module:
    """Fill a wider module with the weights of a trained one, so that both compute the same.

    Both are of one class, and may be a whole model or a single layer. Known layers are `nn.Linear`,
    `nn.Embedding`, `nn.MultiheadAttention`, and norms (any module whose parameters are vectors).

    A norm grows to a multiple of its size, because all entries then have equally many copies. An
    attention gets more heads of the same size, and as many query heads for each key head as before.
    All other widths may be any.

    Args:
        small: the trained module.
        large: the module to fill; it has the names of `small`, and no smaller size.
        fused: `fused` of `widening` for layers of a name, such as {"qkv": 3}. The name is the last
            part of the layer's path.

    Returns:
        `large`.

    Raises:
        GrowthError: names or layers that differ, a tied weight, or a parameter that cannot be
            widened exactly. Nothing is written then.
    """
    fused = {} if fused is None else fused
    check_kind("fused", fused, dict, 'numbers by the names of layers, such as {"qkv": 3}')
    _check_names(small, large, fused)
    _check_layers(small, large)
    jobs = []
    # a module that `small` has in two places may be two modules in `large`
    for path, layer in small.named_modules(remove_duplicate=False):
        for name, weight in layer.named_parameters(recurse=False):
            full, out = f"{path}.{name}".lstrip("."), large.get_submodule(path).get_parameter(name)
            parts = fused.get(path.rpartition(".")[2], 1)
            try:
                jobs.append((weight, out, _arguments(full, layer, weight, out, parts)))
            except GrowthError as error:
                raise GrowthError(f"{full} of {type(layer).__name__}: {error}") from None
    for i, (weight, out, arguments) in enumerate(jobs):
        if not arguments:
            out.copy_(weight)
            continue
        # a seed of its own: each layer routes to other copies
        out.copy_(expand(weight.cpu(), **arguments, seed=i, out_dtype=out.dtype))
    held = dict(large.named_buffers())
    for name, buffer in small.named_buffers():
        held[name].copy_(buffer)
    return large


def _check_names(small: nn.Module, large: nn.Module, fused: dict[str, int]) -> None:
    """Refuse modules that differ in more than widths."""
    check_kind("small", small, nn.Module, "the trained module")
    check_kind("large", large, nn.Module, "the module to fill, of the class of small")
    ours = dict(small.named_parameters(remove_duplicate=False))
    theirs = dict(large.named_parameters(remove_duplicate=False))
    if ours.keys() != theirs.keys():
        raise GrowthError(
            f"only one of small and large has {sorted(ours.keys() ^ theirs.keys())[:5]}: build "
            "both with the same class and the same number of layers"
        )
    names = {path.rpartition(".")[2] for path, _ in small.named_modules() if path}
    for name in fused.keys() - names:
        allowed = nearest(name, names) if names else f": fill a single layer with {BY_HAND}"
        raise GrowthError(f"fused names {name!r}, which is no layer{allowed}")
    first: dict[int, str] = {}
    for name, x in theirs.items():
        other = first.setdefault(id(x), name)
        if ours[other] is not ours[name]:
            raise GrowthError(
                f"{other} and {name} are one parameter in `large`, but two in `small`: build both "
                "with the same class"
            )
        if other != name and x.shape != ours[name].shape:
            raise GrowthError(
                f"{other} and {name} are one parameter, but one writes copies and the other reads "
                "them: build `large` with two parameters, and give `small` two as well"
            )
    held = dict(large.named_buffers())
    for name, buffer in small.named_buffers():
        if name not in held or held[name].shape != buffer.shape:
            raise GrowthError(
                f"buffer {name} differs in shape, and how it grows is not known: build "
                "`large` without it, or fill that layer with growkern.expand"
            )


def _check_layers(small: nn.Module, large: nn.Module) -> None:
    """Refuse layers that compute something else in `large`, whatever weights they get."""
    wide = dict(large.named_modules(remove_duplicate=False))
    for path, layer in small.named_modules(remove_duplicate=False):
        if path in wide and (why := _other_function(layer, wide[path])):
            raise GrowthError(f"{path or 'the layer'} ({class_of(layer).__name__}): {why}")


def _other_function(layer: nn.Module, wide: Any) -> str:
    """Why a layer and a wider one compute different things; empty if nothing shows that."""
    kind, other_kind = class_of(layer), class_of(wide)
    if kind.__module__.startswith(QUANTISED):
        return "a quantised layer has no weights to fill: widen the module that it was made from"
    if isinstance(layer, IN_TRAINING) and isinstance(wide, IN_TRAINING):
        return ""
    # by name: a notebook may have made the class twice
    if (kind.__module__, kind.__qualname__) != (other_kind.__module__, other_kind.__qualname__):
        return f"`large` has a {other_kind.__name__} here: build both with the same class"
    if not kind.__module__.startswith("torch.nn."):
        return ""
    for key, value in vars(layer).items():
        other = getattr(wide, key, value)
        # whole numbers are sizes
        is_setting = isinstance(value, (float, str, bool, type(None), *FUNCTIONS))
        if is_setting and other != value and key not in OF_SPEED and "drop" not in key:
            ours, theirs = (getattr(x, "__name__", x) for x in (value, other))
            return f"{key} is {ours}, but {theirs} in `large`: give both the same"
    if isinstance(layer, nn.MultiheadAttention) and layer.head_dim != wide.head_dim:
        return (
            f"heads of {layer.head_dim} entries cannot become heads of {wide.head_dim}: give "
            f"`large` num_heads=embed_dim / {layer.head_dim}"
        )
    if isinstance(layer, nn.GroupNorm):
        each = layer.num_channels // layer.num_groups
        if layer.num_groups > 1 and wide.num_channels != wide.num_groups * each:
            return f"a group must keep its size: give `large` num_groups=num_channels / {each}"
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm) and layer.weight is None:
        # with a weight, that is refused by its name
        pairs = zip(layer.normalized_shape, wide.normalized_shape, strict=True)
        if any(b % a for a, b in pairs):
            return (
                f"{wide.normalized_shape} is no multiple of {layer.normalized_shape}: a norm needs "
                "equally many copies of each entry"
            )
    grows = isinstance(layer, nn.Embedding) and layer.embedding_dim != wide.embedding_dim
    if grows and layer.max_norm is not None:
        return "max_norm also counts the copies: cut the rows once, and build both without it"
    return ""


def _arguments(name: str, layer: nn.Module, weight: Tensor, out: Tensor, fused: int) -> Any:
    """`widening` for one parameter of a layer."""
    for where, x in (("small", weight), ("large", out)):
        if is_lazy(x) or x.is_meta:
            raise GrowthError(f"`{where}` has no values here: build it with its sizes on a device")
    source, target = tuple(weight.shape), tuple(out.shape)
    if source == target:
        return {}
    is_attention = isinstance(layer, nn.MultiheadAttention)
    is_matrix = isinstance(layer, nn.Linear) or (is_attention and name.endswith("proj_weight"))
    if is_attention and ".in_proj" in f".{name}":
        fused = 3
    if isinstance(layer, nn.Embedding) and source[0] != target[0]:
        raise GrowthError(
            f"{source[0]} rows cannot become {target[0]}, as `widen` adds no tokens: give `large` "
            "the same number"
        )
    if isinstance(layer, nn.Linear | nn.Embedding | nn.MultiheadAttention):
        return widening(source, target, reads=is_matrix, fused=fused)
    if len(source) != 1:
        raise GrowthError(
            f"whether a weight of shape {source} reads copies is not known here: fill it with "
            f"{BY_HAND}"
            + (", a matrix (rows, columns) for each place of the rest" if len(source) > 2 else "")
        )
    if target[0] % source[0]:
        raise GrowthError(
            f"{target[0]} entries are no multiple of {source[0]}. A norm needs equally many copies "
            f"of each entry, as with {source[0] * max(2, round(target[0] / source[0]))}"
        )
    return widening(source, target)
