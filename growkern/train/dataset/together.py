"""Work that some processes do while the others wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
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


def same_everywhere(value: Any) -> Any:
    """The value of the first process, in all of them."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _work(work: Iterator[Any]) -> str:
    until = time.monotonic() + SECONDS
    for _ in work:
        if time.monotonic() >= until:
            return WORKING
    return DONE
