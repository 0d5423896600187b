"""Runs two modules on the same inputs in float64, and finds where their outputs begin to differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from growkern.errors import GrowthError, reason
from growkern.growth.models import class_of
from growkern.growth.own_modules.layers import IN_TRAINING
from growkern.growth.space import cyclic

# relative to the largest output
TOLERANCE = 1e-9
# of a forward that casts to fewer digits than float64 has, which costs 1e-6 with float32
CAST_TOLERANCE = 1e-5


class _Casts(TorchDispatchMode):
    """Notes whether anything is computed with fewer digits than float64 has."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        reals = (x for x in _leaves(out) if x.is_floating_point() or x.is_complex())
        self.seen |= any(torch.finfo(x.dtype).eps > torch.finfo(torch.float64).eps for x in reals)
        return out


class Comparison(NamedTuple):
    """What outputs are: the same as those of a smaller module, or copies of them, or different."""

    sentence: str = ""  # where they differ, and by how much; "" if they do not
    before: tuple[str, ...] = ()  # the modules that had run, the last one first
    wider: tuple[str, ...] = ()  # the sizes of which some are copies, as in "5 -> 7"
    new: str = ""  # the first module that ran between there and `before` and only `large` has


def compare(small: nn.Module, large: nn.Module, inputs: Any, parts: set[int]) -> Comparison:
    """Compare the outputs of two modules. Those that are wider are compared with copies.

    Args:
        small, large: both in float64, in evaluation mode and on one device.
        inputs: arguments of `forward`, in a tuple, or in a dict by their names.
        parts: how many axes of copies may lie side by side in an output.
    """
    with _Casts() as casts:
        ours, theirs = _run(small, "small", inputs), _run(large, "large", inputs)
    tolerance = CAST_TOLERANCE if casts.seen else TOLERANCE
    error = _error(ours, theirs, parts)
    if error <= tolerance:
        if not any(bool(x.count_nonzero()) for x in ours):
            raise GrowthError(
                "all outputs of `small` are 0 or empty, so they compare nothing: give other inputs"
            )
        shapes = [(a.shape, b.shape) for a, b in zip(ours, theirs, strict=True)]
        sizes = [pair for both in shapes for pair in zip(*both, strict=True)]
        return Comparison(wider=tuple({f"{n} -> {m}": 0 for n, m in sizes if n < m}))
    first = _first_difference(small, large, inputs, parts, tolerance)
    amount = f"the outputs of `large` would differ by {error:.1e} of the largest"
    return first._replace(sentence=f"{amount}. {first.sentence}")


def _run(module: nn.Module, role: str, inputs: Any) -> list[Tensor]:
    """The tensors that a module returns."""
    try:
        result = _leaves(_call(module, inputs))
    except Exception as error:
        raise GrowthError(
            f"`{role}` cannot be run on copies of `inputs` in float64: {reason(error)}"
        ) from error
    if not result:
        raise GrowthError(f"`{role}` returns no tensor for `inputs`, so nothing can be compared")
    return result


@torch.no_grad()
def _call(module: nn.Module, inputs: Any) -> Any:
    """The outputs of a module for copies of inputs, in float64. All draw the same numbers."""
    held = (*module.parameters(), *module.buffers())
    device = held[0].device if held else torch.device("cpu")
    inputs = pytree.tree_map_only(
        Tensor, lambda x: (x.double() if x.is_floating_point() else x).to(device, copy=True), inputs
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            return module(**inputs) if isinstance(inputs, dict) else module(*inputs)
    finally:
        torch.set_default_dtype(default)


def _leaves(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists, dicts and dataclasses."""
    found = list[Tensor]()
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf):
            found += _leaves(list(vars(leaf).values()))
    return found


def _error(ours: list[Tensor], theirs: list[Tensor], parts: Iterable[int]) -> float:
    """The largest difference, relative to the largest number of its tensor."""
    if len(ours) != len(theirs):
        return float("inf")
    pairs = zip(ours, theirs, strict=True)
    return max((min(_error_of(a, b, n) for n in parts) for a, b in pairs), default=0.0)


def _error_of(a: Tensor, b: Tensor, parts: int) -> float:
    """The difference of one tensor from a wider one, whose axes may be copies in parts."""
    if a.ndim != b.ndim or any(n > m for n, m in zip(a.shape, b.shape, strict=True)):
        return float("inf")
    for axis, (n, m) in enumerate(zip(a.shape, b.shape, strict=True)):
        if n < m:
            if n == 0 or n % parts or m % parts:
                return float("inf")
            a = a.index_select(axis, cyclic(n, m, parts).to(a.device))
    if a.numel() == 0:
        return 0.0
    a, b = (x if x.is_complex() else x.double() for x in (a, b))
    if bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all()):
        return 0.0
    finite = a[a.isfinite()].abs()
    scale = finite.max().item() if finite.numel() else 0.0
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0, (a - b).abs())
    largest = apart.nan_to_num(float("inf")).max().item()
    return largest / scale if scale else largest


def _first_difference(
    small: nn.Module, large: nn.Module, inputs: Any, parts: set[int], tolerance: float
) -> Comparison:
    """Where two runs begin to differ."""
    known, theirs = (dict(module.named_modules()) for module in (small, large))
    events = (x for x in _events(small, inputs) if x[0] in theirs)
    before, new = tuple[str, ...](), ""
    for other, what, wide in _events(large, inputs):
        if other not in known:
            new = new or ("" if isinstance(theirs[other], IN_TRAINING) else other)
            continue
        path, _, narrow = next(events, ("", "", []))
        if path != other:
            break
        if _error(narrow, wide, parts) > tolerance:
            kind = class_of(known[path]).__name__
            name = f"{path} ({kind})" if path else f"the {kind} itself"
            where = f"{name}: already its input mixes what grows"
            where = where if what == "input" and not new else f"the {what} of {name}"
            return Comparison(f"The first to differ is {where}", before, new=new)
        before, new = (path, *before) if what == "output" else before, ""
    return Comparison("Their modules are called in another order", before)


def _events(module: nn.Module, inputs: Any) -> list[tuple[str, str, list[Tensor]]]:
    """Inputs and outputs of all modules inside, in the order of a run: path, which, tensors."""
    events = list[tuple[str, str, list[Tensor]]]()

    def note(path: str, what: str, value: Any) -> None:
        # what follows may change it in place
        events.append((path, what, [x.clone() for x in _leaves(value)]))

    for path, inner in module.named_modules():
        if path:
            inner.register_forward_pre_hook(
                lambda _, args, kwargs, path=path: note(path, "input", (args, kwargs)),
                with_kwargs=True,
            )
        inner.register_forward_hook(lambda _, __, out, path=path: note(path, "output", out))
    _call(module, inputs)
    return events
