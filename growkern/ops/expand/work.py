"""Carries out the `expand` calls of a growth: one by one, or collected into few launches.

`work_on` picks the way for a device. Both ways are used alike: ask for results by `expand`,
register a callback with `then`, and call `run` at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from growkern.ops.backend.choose import BACKENDS, choose_backend
from growkern.ops.expand.call import ExpandCall, Inputs
from growkern.ops.expand.many import expand_many
from growkern.ops.expand.op import expand_call

# most bytes of weights and results that may wait for a launch
BYTES_AT_ONCE = 1 << 30


class Work:
    """Collects calls of `expand`, and carries them out when enough memory waits for them.

    Args:
        bytes_at_once: the most bytes of weights and results that may wait. 0: nothing waits.
    """

    def __init__(self, bytes_at_once: int) -> None:
        self.bytes_at_once = bytes_at_once
        self._calls, self._after, self._bytes = list[ExpandCall](), list[Callable[[], Any]](), 0

    def expand(self, weight: Tensor, *, out: Tensor, **arguments: Any) -> None:
        """Ask for `expand` with these arguments; `out` is filled after `run` or sooner."""
        call = ExpandCall(out, weight, **arguments)
        size = sum(x.nbytes for x in (out, weight, call.upper) if x is not None)
        if self._calls and self._bytes + size > self.bytes_at_once:
            self.run()
        self._calls.append(call)
        self._bytes += size
        if self._bytes >= self.bytes_at_once:
            self.run()

    def then(self, action: Callable[[], Any]) -> None:
        """Call `action` as soon as the results asked for so far are there."""
        if self._calls:
            self._after.append(action)
        else:
            action()

    def run(self) -> None:
        """Carry out every call that waits, then what needs the results."""
        self._carry_out(self._calls)
        self._calls, self._bytes = [], 0
        waiting, self._after = self._after, []
        for action in waiting:
            action()

    def _carry_out(self, calls: list[ExpandCall]) -> None:
        raise NotImplementedError


class OneByOne(Work):
    """Carries out each call at once: for backends where a call costs next to nothing."""

    def __init__(self, backend: str | None) -> None:
        super().__init__(bytes_at_once=0)
        self.backend = backend

    def _carry_out(self, calls: list[ExpandCall]) -> None:
        for call in calls:
            # the weight stays: a backend may read it from the host
            given, device = call.inputs._replace(weight=None), call.out.device
            moved = Inputs._make(x.to(device) if isinstance(x, Tensor) else x for x in given)
            here = ExpandCall.of_inputs(call.out, moved._replace(weight=call.weight))
            expand_call(here, None, self.backend)


class WorkList(Work):
    """Carries out the calls that wait in few launches, without the checks of `expand`.

    `launches` counts them. No more than `bytes_at_once` wait, except for a single larger tensor.
    """

    def __init__(self, bytes_at_once: int = BYTES_AT_ONCE) -> None:
        super().__init__(bytes_at_once)
        self.launches = 0

    def _carry_out(self, calls: list[ExpandCall]) -> None:
        self.launches += expand_many([call.as_matrices() for call in calls])


def work_on(device: torch.device, backend: str | None) -> Work:
    """A work list where `expand` would launch Triton kernels; else one call after another."""
    if choose_backend(backend, device, BACKENDS) == "triton":
        return WorkList()
    return OneByOne(backend)
