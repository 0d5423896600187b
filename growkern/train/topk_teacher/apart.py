"""Runs coroutines in a thread of their own, for callers that may be interrupted at any moment.

The caller has a thread to itself, because that of a notebook has an event loop already. Nothing
waits for threads that are left over: they are daemons, and no executor joins them at exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

X = TypeVar("X")
Y = TypeVar("Y")
# seconds between two looks for a signal, where a signal does not end the waiting itself
LOOK = 0.1


def run_apart(call: Callable[[X], Awaitable[Y]], items: Sequence[X], at_once: int = 1) -> list[Y]:
    """Call a coroutine function for each item, some at a time.

    An exception in this thread, as a signal handler raises, or in any of the calls cancels the
    others. Nothing waits for their ends.

    Args:
        call: for each item.
        items: for the calls.
        at_once: calls at a time.

    Returns:
        The results, in the order of the items.
    """
    loop, done = asyncio.new_event_loop(), threading.Event()
    # it looks up names
    loop.set_default_executor(_Daemons())
    task = loop.create_task(_gather(call, items, at_once))

    def run() -> None:
        try:
            # the caller may have left, so the exception is taken out here too
            with contextlib.suppress(BaseException):
                loop.run_until_complete(task)
        finally:
            done.set()
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    try:
        threading.Thread(target=run, daemon=True).start()
        while not done.wait(LOOK):
            pass
    except BaseException:
        # the loop may be closed by now
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(task.cancel)
        raise
    return task.result()


async def _gather(call: Callable[[X], Awaitable[Y]], items: Sequence[X], at_once: int) -> list[Y]:
    turns = asyncio.Semaphore(at_once)

    async def one(item: X) -> Y:
        async with turns:
            return await call(item)

    tasks = [asyncio.create_task(one(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        # they close their connections
        await asyncio.gather(*tasks, return_exceptions=True)


class _Daemons(ThreadPoolExecutor):
    """Runs each call in a daemon thread. Python waits at exit for those of the base class."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(call(*args, **options))
            except BaseException as error:
                future.set_exception(error)

        future.set_running_or_notify_cancel()
        threading.Thread(target=run, daemon=True).start()
        return future
