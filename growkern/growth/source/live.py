"""Compares models in memory with their own config.

Growth builds the target from the config. Modules take values from the config when they are made. A
config that was edited later describes another function than the model computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrize

from growkern.errors import GrowthError, warn
from growkern.families import ModelSpec
from growkern.growth.models import (
    FUNCTIONS,
    QUANTISED,
    class_of,
    is_dtensor,
    restore_buffers,
    untrained_model,
)
from growkern.growth.source.refused import quantised_advice
from growkern.growth.stored import own_name

# attributes that change no output in evaluation mode, or that transformers itself changes
NO_FUNCTION = {
    *("training", "gradient_checkpointing", "name_or_path", "vocab_size", "padding_idx"),
    *("max_seq_len_cached", "original_max_seq_len", "rope_deltas"),
}
# rotary positions whose frequencies depend on the last input
CHANGING_ROTARY = ("dynamic", "longrope")
# dtypes that a model may have had before it was converted to a wider one
NARROW = (torch.bfloat16, torch.float16)
# how to undo a change by torch.nn.utils, by the class of the hook that it registers
UNDO_HOOK = {
    "WeightNorm": "torch.nn.utils.remove_weight_norm({module})",
    "SpectralNorm": "torch.nn.utils.remove_spectral_norm({module})",
    "BasePruningMethod": "torch.nn.utils.prune.remove({module}, {name!r})",
}


def refuse_computed(model: Any) -> None:
    """Refuse weights that PyTorch computes from other tensors: quantised, normed or pruned ones."""
    for name, module in model.named_modules():
        here, name = f"model.get_submodule({name!r})", name or "the module"
        if type(module).__module__.startswith(QUANTISED):
            kind = type(module).__name__
            raise GrowthError(f"{name} is a quantised {kind}: {quantised_advice()}")
        if parametrize.is_parametrized(module):
            key = next(iter(module.parametrizations))
            undo = f"torch.nn.utils.parametrize.remove_parametrizations({here}, {key!r})"
            raise GrowthError(f"{name}.{key} has a parametrization: call {undo} first")
        for hook in module._forward_pre_hooks.values():
            kinds = [c.__name__ for c in type(hook).__mro__ if c.__name__ in UNDO_HOOK]
            if kinds and type(hook).__module__.startswith("torch.nn.utils."):
                key = getattr(hook, "name", None) or getattr(hook, "_tensor_name", "weight")
                undo = UNDO_HOOK[kinds[0]].format(module=here, name=key)
                raise GrowthError(
                    f"{name}.{key} is computed by {type(hook).__name__}: call {undo} first"
                )


def check_live(model: Any, spec: ModelSpec) -> tuple[str, ...]:
    """Refuse a model that computes something else than its config says.

    It warns of what the grown model will not have: hooks, and rotary frequencies that
    `model.to(dtype)` has rounded. Returns these warnings, one line each.
    """
    with torch.device("meta"):
        fresh = untrained_model(spec)
    for module in fresh.modules():
        if module._non_persistent_buffers_set:
            module.to_empty(device="cpu", recurse=False)
    restore_buffers(fresh)
    # of a wrapper and the module inside, which come in this order, the module counts
    modules = {own_name(f"{name}.")[:-1]: module for name, module in model.named_modules()}
    for name, built in fresh.named_modules():
        for what, value, expected in _differences(modules.get(name, _value_of(model, name)), built):
            raise GrowthError(
                f"{name or spec.class_name}: {what} is {value}, but a model of this config has "
                f"{expected}: undo the change of the config or of the model, or save the model "
                "and grow its directory"
            )
    rounded = [
        f"{name}.{key}"
        for name, built in fresh.named_modules()
        for key in _rounded_frequencies(modules.get(name), built)
    ]
    lines = list[str]()
    if rounded:
        lines.append(
            f"{rounded[0]} was cast to 16 bits with the model; growth takes it in float32, so "
            "outputs of this model are off more the longer the text is; load it with "
            "from_pretrained(..., dtype=...) in place of casting it"
        )
    if hooked := [name or spec.class_name for name, x in modules.items() if _is_changed(x)]:
        more = f" (and {len(hooked) - 1} more)" if len(hooked) > 1 else ""
        lines.append(
            f"{hooked[0]} has a forward hook, or a method of its own{more}; growth leaves it out"
        )
    for line in lines:
        warn(line)
    return tuple(lines)


def _rounded_frequencies(live: nn.Module | None, built: nn.Module) -> Iterator[str]:
    """The rotary frequencies of a live module that lost digits when it was cast, by name."""
    for key in sorted(built._non_persistent_buffers_set):
        buffer = live._buffers.get(key) if live is not None else None
        # the originals only serve to restore the ones in use
        in_use = key.endswith("inv_freq") and not key.startswith("original")
        if not in_use or not isinstance(buffer, Tensor) or buffer.dtype not in NARROW:
            continue
        exact = built.get_buffer(key).double()
        is_here = not buffer.is_meta and not is_dtensor(buffer) and buffer.shape == exact.shape
        if is_here and bool((buffer.cpu().double() != exact).any()):
            yield key


def _value_of(model: Any, name: str) -> Any:
    """The value that a model has in place of a submodule; None if it has none."""
    above, _, key = name.rpartition(".")
    try:
        return getattr(model.get_submodule(above), key, None)
    except AttributeError:
        return None


def _differences(live: Any, built: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """What differs between a built module and the live one, or what the model has in its place.

    It yields its name and both values.
    """
    if not isinstance(live, nn.Module) or class_of(live) is not type(built):
        kind = type(live)
        # a subclass may have the name of its base
        is_namesake = kind.__name__ == type(built).__name__
        title = f"{kind.__module__}.{kind.__name__}" if is_namesake else _title(live)
        yield "the module", title, type(built).__name__
        return
    inside = len(live._modules), len(built._modules)
    if isinstance(built, nn.ModuleList | nn.ModuleDict | nn.Sequential) and inside[0] != inside[1]:
        yield "the number of modules", *inside
        return
    for key, expected in vars(built).items():
        if isinstance(expected, FUNCTIONS):
            if _written(own := getattr(live, key, expected)) != _written(expected):
                yield key, _title(own), _title(expected)
            continue
        is_value = isinstance(expected, int | float | str | tuple | None)
        if not is_value or key.startswith("_") or key in NO_FUNCTION or "drop" in key:
            continue
        value = getattr(live, key, expected)
        if value != expected and not isinstance(built, nn.Dropout):
            yield key, value, expected
    if any(kind in str(getattr(built, "rope_type", "")) for kind in CHANGING_ROTARY):
        return
    for key in sorted(built._non_persistent_buffers_set):
        expected, buffer = built.get_buffer(key), live._buffers.get(key)
        if isinstance(buffer, Tensor) and not _agree(buffer, expected):
            low = next((d for d in NARROW if _agree(buffer, expected.to(d))), None)
            what = "another buffer" if low is None else f"rounded to {str(low)[6:]}"
            yield key, what, "one that follows from it"


def _written(function: Any) -> Any:
    """What two functions that compute the same have in common."""
    if isinstance(function, partial):
        return _written(function.func), function.args, function.keywords
    return getattr(function, "__func__", function)


def _title(value: Any) -> str:
    """The name of a function, or that of a value's class."""
    return getattr(value, "__name__", None) or type(value).__name__


def _agree(buffer: Tensor, expected: Tensor) -> bool:
    if buffer.is_meta or is_dtensor(buffer) or buffer.shape != expected.shape:
        # of another shape: the model may have resized its own tables
        return True
    wide = torch.complex128 if buffer.is_complex() else torch.float64
    # `model.to(dtype)` also casts buffers
    return torch.allclose(buffer.cpu().to(wide), expected.to(buffer.dtype).to(wide), rtol=1e-6)


def _is_changed(module: nn.Module) -> bool:
    """True if something besides the module's class takes part in its forward."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    # transformers and torch hook modules themselves, to return hidden states or gather shards
    own = ("transformers.", "torch.", "accelerate.")
    if any(not str(getattr(hook, "__module__", "")).startswith(own) for hook in hooks):
        return True
    replaced = {
        key
        for key, value in vars(module).items()
        if isinstance(value, FUNCTIONS) and isinstance(getattr(type(module), key, None), FUNCTIONS)
    }
    if isinstance(module, transformers.PreTrainedModel):
        # other methods save or move the model
        replaced &= {"forward"}
    # accelerate replaces forwards to move inputs between devices
    return bool(replaced - ({"forward"} if hasattr(module, "_hf_hook") else set()))
