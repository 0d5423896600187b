"""What is refused of a source, its names, shapes, ties, sizes and values, and of grown values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from growkern.errors import GrowthError, nearest
from growkern.families.family import Family


def _is_finite(tensor: Tensor) -> bool:
    # aminmax hands NaN on, and reads 16-bit types 30 times as fast as isfinite
    return not tensor.numel() or bool(torch.isfinite(torch.stack(tensor.aminmax())).all())


def refuse_nonfinite(name: str, tensor: Tensor) -> None:
    """GrowthError if there is a NaN or an Inf in this tensor, or in this part of it."""
    if _is_finite(tensor):
        return
    bad = int((~torch.isfinite(tensor)).sum())
    raise GrowthError(
        f"{name}: {bad} of {tensor.numel()} values are NaN or Inf; mend the checkpoint, or "
        "grow it as it is with allow_nonfinite=True (--allow-nonfinite)"
    )


def refuse_overflow(name: str, tensor: Tensor) -> None:
    """GrowthError if a finite weight has become Inf in a narrower dtype."""
    if _is_finite(tensor):
        return
    dtype = str(tensor.dtype).removeprefix("torch.")
    raise GrowthError(
        f"{name}: weights are beyond {torch.finfo(tensor.dtype).max:g}, the largest number of "
        f"{dtype}; choose another dtype"
    )


def check_names_and_shapes(
    expected: Mapping[str, tuple[int, ...]],
    tied: set[str],
    found: Mapping[str, tuple[int, ...]],
    where: str,
) -> None:
    """Refuse missing tensors, unknown ones, and shapes that contradict the config."""
    missing = [name for name in expected if name not in found and name not in tied]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise GrowthError(f"{where}: tensor {missing[0]} is missing{more}")
    for name, shape in found.items():
        if name not in expected:
            raise GrowthError(f"{where}: no rule for tensor {name} {list(shape)}")
        if shape != expected[name]:
            raise GrowthError(
                f"{where}: {name} is {list(shape)}, config.json says {list(expected[name])}"
            )


def check_ties(
    family: Family,
    config: Any,
    class_name: str,
    found: Set[str],
    read: Callable[[str], Tensor],
) -> None:
    """Refuse tensors that are one by the config and two by their values."""
    for tensor in family.tensors(config, class_name) if family.shares(config) else ():
        if tensor.tied is None or not {tensor.name, tensor.tied} <= found:
            continue
        one, other = read(tensor.name), read(tensor.tied)
        if one.data_ptr() != other.data_ptr() and not torch.equal(one, other):
            raise GrowthError(
                f"{tensor.name} and {tensor.tied} differ, which config.tie_word_embeddings=True "
                "makes one; set it to False where both are wanted"
            )


def check_values(file: Path, family: Family, config: Any) -> None:
    """Refuse sizes that no model has, and activations that transformers lacks."""
    for key in family.config:
        size, most = family.size(config, key), family.largest(key)
        if not 1 <= size <= most:
            raise GrowthError(f"{file}: {family.config_field(key)}={size} must lie in 1 .. {most}")
    if family.activation is not None:
        activation = getattr(config, family.activation)
        if activation not in ACT2FN:
            raise GrowthError(
                f"{file}: {family.activation}={activation!r}{nearest(str(activation), ACT2FN)}"
            )
