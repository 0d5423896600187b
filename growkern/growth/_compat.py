"""Stands in for parts until `apply.build_tensor` takes them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from growkern.growth import apply


def build_tensor(
    plan: Any,
    task: Any,
    *,
    read: Any = None,
    backend: Any = None,
    part: Any = None,
    out: Any = None,
) -> Tensor:
    whole = apply.build_tensor(plan, task, read=read, backend=backend)
    out.copy_(whole if part is None else whole[part])
    return out
