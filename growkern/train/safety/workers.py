"""Keeps the processes that load data alive when a signal ends the run.

`scancel`, `systemctl stop` and `kill -TERM -PGID` send SIGTERM to every process of a run. A worker
that died of it would make the main process fail before its checkpoint is saved.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from growkern.train.safety.signals import SIGNALS


def guard_workers(loader: Any) -> Any:
    """Let the workers of a data loader ignore SIGINT and SIGTERM, unless the loader sends them.

    A worker still ends when the loader shuts it down, and when the main process dies: it looks for
    both while it waits for work.

    Args:
        loader: of PyTorch or of accelerate; changed in place. Its `worker_init_fn` runs as before.

    Returns:
        The loader.
    """
    # accelerate iterates over a loader inside its own
    inner = getattr(loader, "base_dataloader", loader)
    if not getattr(inner, "num_workers", 0):
        return loader
    make_iterator = inner._get_iterator

    def guarded() -> Any:
        # a process inherits this, so that there is no moment at which a signal could end it
        with _blocked():
            return make_iterator()

    inner._get_iterator = guarded
    inner.worker_init_fn = partial(_start, before=inner.worker_init_fn)
    return loader


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    """While active, no signal is delivered to this thread. Those that came are delivered after."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(number: int, *, before: Callable[[int], Any] | None) -> None:
    """Runs first in a worker, whose signals are blocked."""
    # macOS does not tell who sent a signal: there, a loader that waits kills no worker
    if hasattr(signal, "sigwaitinfo"):
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    if before is not None:
        before(number)


def _end_with(parent: int) -> None:
    """End this process when the parent sends SIGTERM, as it does to a worker that hangs."""
    while True:
        found = signal.sigwaitinfo(SIGNALS)
        if found.si_signo == signal.SIGTERM and found.si_pid == parent:
            os._exit(0)
