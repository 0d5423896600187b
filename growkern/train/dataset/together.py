"""Work that some processes do while the others wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from growkern.errors import GrowthError

# The processes speak to each other this often. A group gives up after some minutes of silence
SECONDS = 30.0
WORKING, DONE = "working", "done"


def wait_together(work: Iterator[Any] | None) -> None:
    """Do work in some processes; all return when all of it is done. All processes call this.

    Args:
        work: it is done in small steps, one per `next`; None in a process that only waits.

    Raises:
        GrowthError: it failed in a process. All processes get the message.
    """
    state = DONE if work is None else WORKING
    while True:
        error: GrowthError | None = None
        if work is not None and state == WORKING:
            try:
                state = _work(work)
            except GrowthError as failed:
                error, state = failed, str(failed)
        states: list[Any] = [state]
        if dist.is_initialized() and dist.get_world_size() > 1:
            states *= dist.get_world_size()
            dist.all_gather_object(states, state)
        if error is not None:
            raise error
        for one in states:
            if one not in (WORKING, DONE):
                raise GrowthError(one)
        if WORKING not in states:
            return


def from_first(function: Callable[[], Any]) -> Any:
    """The result of a function that the first process calls. All processes call this.

    Raises:
        GrowthError: the function did. All processes get the message.
    """
    values: list[Any] = [None]

    def work() -> Iterator[None]:
        values[0] = function()
        yield

    several = dist.is_initialized() and dist.get_world_size() > 1
    wait_together(work() if not several or dist.get_rank() == 0 else None)
    if several:
        dist.broadcast_object_list(values, src=0)
    return values[0]


def _work(work: Iterator[Any]) -> str:
    until = time.monotonic() + SECONDS
    for _ in work:
        if time.monotonic() >= until:
            return WORKING
    return DONE
