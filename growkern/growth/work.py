"""How the expansions of a growth are carried out: one by one, or many in few launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from growkern.ops._backend import choose_backend
from growkern.ops._expand_many import WorkList
from growkern.ops.expand import expand


class OneByOne:
    """What `WorkList` does, at once: for backends where a call costs next to nothing."""

    def __init__(self, backend: str | None) -> None:
        self.backend = backend

    def expand(self, weight: Tensor, *, out: Tensor, **arguments: Any) -> None:
        for name, x in arguments.items():
            if isinstance(x, Tensor):
                arguments[name] = x.to(out.device)
        expand(weight, out=out, backend=self.backend, **arguments)

    def then(self, call: Callable[[], Any]) -> None:
        call()

    def run(self) -> None:
        pass


Work = WorkList | OneByOne


def work_on(device: torch.device, backend: str | None) -> Work:
    """A work list where calls of `expand` are launches of Triton."""
    if choose_backend(backend, device) == "triton":
        return WorkList()
    return OneByOne(backend)
