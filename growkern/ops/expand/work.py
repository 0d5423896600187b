"""How the expansions of a growth are carried out: one by one, or many in few launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from growkern.ops.backend.choose import choose_backend
from growkern.ops.expand.call import ExpandJob
from growkern.ops.expand.many import expand_many
from growkern.ops.expand.op import expand


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


# weights and results that wait for a launch; they stay in memory that long
BYTES_AT_ONCE = 1 << 30


class WorkList:
    """Collects calls of `expand` with `out`, and carries them out in few launches.

    Results are there after `run`, or sooner: what waits never holds more than `bytes_at_once`, but
    for a single tensor that does.
    """

    def __init__(self, bytes_at_once: int = BYTES_AT_ONCE) -> None:
        self.bytes_at_once, self.launches = bytes_at_once, 0
        self._jobs, self._after, self._bytes = list[ExpandJob](), list[Callable[[], Any]](), 0

    def expand(self, weight: Tensor, *, out: Tensor, **arguments: Any) -> None:
        """`expand`, later. Arguments are right: this is below its door."""
        if weight.ndim == 1:
            # a matrix of one row, as there
            upper, rows = arguments.pop("upper"), arguments.pop("rows")
            weight, out = weight[None], out[None]
            arguments |= {"upper": None if upper is None else upper[None], "cols": rows}
            arguments |= {"col_scale": arguments.pop("row_scale")}
        job = ExpandJob(out, weight, **arguments)
        size = sum(x.nbytes for x in (out, weight, job.upper) if x is not None)
        if self._jobs and self._bytes + size > self.bytes_at_once:
            self.run()
        self._jobs.append(job)
        self._bytes += size

    def then(self, call: Callable[[], Any]) -> None:
        """What needs the results asked for so far."""
        self._after.append(call)

    def run(self) -> None:
        """Carries out what waits."""
        self.launches += expand_many(self._jobs)
        self._jobs, self._bytes = [], 0
        waiting, self._after = self._after, []
        for call in waiting:
            call()


Work = WorkList | OneByOne


def work_on(device: torch.device, backend: str | None) -> Work:
    """A work list where calls of `expand` are launches of Triton."""
    if choose_backend(backend, device) == "triton":
        return WorkList()
    return OneByOne(backend)
