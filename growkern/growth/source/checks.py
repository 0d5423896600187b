"""Checks of a source before and during growth: names, shapes, ties, sizes and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from growkern.errors import GrowthError, nearest
from growkern.families.model import ModelSpec

# of models of today; transformers is asked for others, as its table takes 2 s to import
USUAL_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")

# the end of a message about weights that another config describes
OTHER_CHECKPOINT = "check that config.json and the weights are of one checkpoint"


def _is_finite(tensor: Tensor) -> bool:
    # a tensor on the meta device has no values; aminmax propagates NaN, and reads 16-bit types 30
    # times as fast as isfinite
    return (
        tensor.is_meta
        or not tensor.numel()
        or bool(torch.isfinite(torch.stack(tensor.aminmax())).all())
    )


def refuse_nonfinite(name: str, tensor: Tensor) -> None:
    """Refuse NaN and Inf in a tensor, or in this part of it."""
    if _is_finite(tensor):
        return
    bad = int((~torch.isfinite(tensor)).sum())
    raise GrowthError(
        f"{name}: {bad} of {tensor.numel()} values are NaN or Inf: fix the checkpoint, or "
        "grow it as it is with allow_nonfinite=True (--allow-nonfinite)"
    )


def refuse_overflow(name: str, tensor: Tensor) -> None:
    """Refuse grown weights that are beyond the largest number of their dtype, or NaN.

    They overflow if they are converted to a narrower dtype, or if a copy gets more than the whole
    weight, as with `routing` above 1.
    """
    if _is_finite(tensor):
        return
    if bool(torch.isnan(tensor).any()):
        refuse_nonfinite(name, tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    raise GrowthError(
        f"{name}: weights are beyond {torch.finfo(tensor.dtype).max:g}, the largest number of "
        f"{dtype}: choose another dtype, or copies that are no larger than the weight (routing=1)"
    )


def check_number_of_tensors(model: ModelSpec, found: int, where: str) -> None:
    """Refuse a checkpoint with far more tensors than its model: names are compared one by one."""
    # old files name buffers in every layer, and tensors of other heads
    most = 4 * len(model.shapes) + 1000
    if found > most:
        raise GrowthError(
            f"{where}: {found} tensors, but {model.class_name} has {len(model.shapes)}; is "
            "config.json that of another model?"
        )


def check_names_and_shapes(
    model: ModelSpec, found: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Refuse missing tensors, unknown ones, and shapes that contradict the config.

    Args:
        found: name -> shape of the source's tensors; tied ones may be missing.
    """
    expected = model.shapes
    missing = [name for name in expected if name not in found and name not in model.ties]
    if missing:
        stored = model.stored_names.get(missing[0])
        named = missing[0] if stored is None else f"{missing[0]}, {stored} in files,"
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise GrowthError(
            f"{where}: tensor {named} is missing{more}: {OTHER_CHECKPOINT}, and that "
            '"architectures" names the class that was saved'
        )
    for name, shape in found.items():
        if name not in expected:
            raise GrowthError(
                f"{where}: no rule for tensor {name} {list(shape)}, which the class of the config "
                "does not have: load the model with transformers and save it again to leave it out"
            )
        if shape != expected[name]:
            raise GrowthError(
                f"{where}: {name} has shape {list(shape)}, but its config says "
                f"{list(expected[name])}: {OTHER_CHECKPOINT}"
            )


def check_ties(model: ModelSpec, found: Set[str], read: Callable[[str], Tensor]) -> ModelSpec:
    """Refuse tensors with different values that the config calls tied.

    Returns:
        The model, with heads of its own where its table lets values decide.
    """
    differ = {}
    for name, owner in model.ties.items():
        if not {name, owner} <= found:
            continue
        one, other = read(name), read(owner)
        if one.data_ptr() != other.data_ptr() and not torch.equal(one, other):
            differ[name] = owner
    model = model.with_own_heads(differ)
    for name in differ.keys() - model.untied:
        raise GrowthError(
            f"{name} and {differ[name]} differ, which config.tie_word_embeddings=True "
            "makes one: set it to False where both are wanted"
        )
    return model


def check_values(file: Path, model: ModelSpec) -> None:
    """Refuse sizes that no model has, and activations that transformers does not know."""
    check_sizes(str(file), model)
    activation = model.family.activation
    if activation is not None:
        _check_activation(f"{file}: {activation}", getattr(model.text, activation))


def check_sizes(where: str, model: ModelSpec) -> None:
    """Refuse sizes that no model has. One without layers may grow new ones."""
    family = model.family
    for key in family.config:
        size, most = model.size(key), family.largest(key)
        # a null field may mean a model without these units
        is_optional = key in family.stacks.values() or family.config[key].default == "0"
        if not (0 if is_optional else 1) <= size <= most:
            field = family.config_field(key)
            raise GrowthError(f"{where}: {field}={size} must lie in 1 .. {most}")


def _check_activation(where: str, activation: Any) -> None:
    if activation in USUAL_ACTIVATIONS:
        return
    from transformers.activations import ACT2FN

    if activation not in ACT2FN:
        raise GrowthError(f"{where}={activation!r}{nearest(str(activation), ACT2FN)}")
