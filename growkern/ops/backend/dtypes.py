"""The dtype of sums. It does not import Triton."""

import torch


def acc_torch_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype that products and sums of `x` are kept in: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
