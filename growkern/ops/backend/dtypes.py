"""The dtype of sums, and the check that arguments are tensors. It does not import Triton."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from growkern.arguments import check_kind


def acc_torch_dtype(x: Tensor) -> torch.dtype:
    """The dtype that products and sums of `x` are kept in: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def check_tensors(given: Mapping[str, Any]) -> None:
    """Refuse arguments that are no tensors, such as arrays of NumPy.

    Args:
        given: the arguments by their names.

    Raises:
        GrowthError: one is no tensor.
    """
    for name, x in given.items():
        check_kind(name, x, Tensor, "a tensor")
