"""When is a kernel accurate enough? Every op's test asks here."""

import torch
from torch import Tensor


def assert_no_worse_than_eager(
    name: str, actual: Tensor, eager: Tensor, truth: Tensor, *, scale: float, factor: float = 2.0
) -> None:
    """At most `factor` times as far from float64 as eager PyTorch, plus one rounding step.

    `scale` is the largest term added up on the way: a result near zero may still carry one
    rounding step of that term.
    """
    assert actual.shape == truth.shape, f"{name}: {tuple(actual.shape)} != {tuple(truth.shape)}"
    if not truth.numel():
        return
    error = (actual.double() - truth).abs().max().item()
    budget = (eager.double() - truth).abs().max().item()
    floor = torch.finfo(actual.dtype).eps * scale
    allowed = factor * budget + floor
    # written so that NaN fails
    assert error <= allowed, f"{name}: {error:.3e} > {factor} x {budget:.3e} + {floor:.3e}"


def assert_within_one_rounding(
    name: str, actual: Tensor, expected: Tensor, *, steps: int = 1
) -> None:
    """Same dtype and shape, and every element at most `steps` units in the last place away."""
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype} != {expected.dtype}"
    assert actual.shape == expected.shape, f"{name}: {actual.shape} != {expected.shape}"
    a, b = actual.double(), expected.double()
    info = torch.finfo(actual.dtype)
    step = steps * info.eps * b.abs().clamp(min=info.tiny)
    close = (a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= step)
    assert close.all(), f"{name}: {(~close).sum().item()} of {close.numel()} elements differ"
