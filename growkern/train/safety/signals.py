"""SIGINT, SIGTERM and SIGUSR1 during a run: finish the step and save, or stop at once.

SLURM sends SIGUSR1 some time before the end of a job (`--signal=USR1@120`). It is treated as
SIGTERM.

`scancel`, `systemctl stop` and `kill -TERM -PGID` send SIGTERM to every process of a run. A worker
that loads data and died of it would make the main process fail before its checkpoint is saved.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# launchers pass a signal on that the terminal has sent to every process already
REPEATED_AFTER = 2.0
# seconds: until a signal raises again, and the longest wait for an import
RETRY_SECONDS, IMPORT_SECONDS = 0.05, 30.0


class Terminated(SystemExit):
    """SIGTERM or SIGUSR1 ended the run. The exit code is 143, as for one that SIGTERM killed."""

    def __init__(self, message: str = "") -> None:
        super().__init__(128 + signal.SIGTERM)
        self.message = message

    def __str__(self) -> str:
        return self.message


INTERRUPTIONS = (KeyboardInterrupt, Terminated)


def interruption(number: int, message: str = "") -> BaseException:
    """The exception that ends a run after a signal. An empty message: it is already printed."""
    return KeyboardInterrupt(message) if number == signal.SIGINT else Terminated(message)


class SignalWatch:
    """Catches SIGINT, SIGTERM and SIGUSR1 while it is active; a context manager.

    A signal is noted in `pending`. At first it also raises at once. After `defer` it does not, and
    a loop looks at `pending`, so that the current step can end. A second SIGINT raises in any case.
    Outside the main thread, where Python delivers no signals, nothing is caught.

    Python swallows what a handler raises in a `__del__` or in the callback of a weak reference, and
    modules that are being imported may swallow it too. So the signal raises again and again until
    its exception gets out of the watch. It waits while that exception is handled, and up to
    `IMPORT_SECONDS` for an import. A signal that is still noted when the watch ends raises then.

    Args:
        message: one line for the user, for the exceptions that are raised here.
        enabled: False leaves the signals alone.

    Attributes:
        pending: number of the first signal, or 0. Watches around this one note it too.
        raised: that number once it has raised an exception here, or 0.
        deferred: whether signals are noted instead of raising.
    """

    def __init__(self, message: str = "", *, enabled: bool = True) -> None:
        self.pending = self.raised = 0
        self._message, self._enabled = message, enabled
        self.deferred, self._since = False, 0.0
        self._before: dict[int, Any] = {}
        self._report: Callable[[Any], Any] = sys.unraisablehook

    def __enter__(self) -> SignalWatch:
        if self._enabled and threading.current_thread() is threading.main_thread():
            self._report, sys.unraisablehook = sys.unraisablehook, self._report_others
            if _active:
                # raised already, but swallowed
                self.pending, self._since = _active[-1].pending, _active[-1]._since
            _active.append(self)
            for number in SIGNALS:
                # a process that its starter told to ignore a signal continues to ignore it
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self not in _active:
            return
        # an exception in here would leave a handler behind
        self.deferred = True
        if signal.SIGALRM in self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before, sys.unraisablehook = {}, self._report
        _active.remove(self)
        if self.pending and _active:
            # the code between the two watches may swallow the exception
            _active[-1]._raise_later()
        if self.pending and error is None:
            self._raise()

    def defer(self) -> None:
        """From now on note signals instead of raising."""
        self.deferred = True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        repeated = number == signal.SIGINT and self.pending and now - self._since > REPEATED_AFTER
        for watch in _active:
            if not watch.pending:
                watch.pending, watch._since = number, now
        if repeated:
            self.deferred = False
        self._raise_if_free(frame, at_once=bool(repeated))

    def _raise_if_free(self, frame: FrameType | None, *, at_once: bool = False) -> None:
        """Raise, unless the exception would be lost or is on its way; and look again later."""
        if self.deferred or not self.pending:
            return
        self._raise_later()
        waits = time.monotonic() - self._since < IMPORT_SECONDS and _is_importing(frame)
        if not waits and (at_once or not _is_ending()):
            self._raise()

    def _raise(self) -> NoReturn:
        for watch in [self, *_active]:
            watch.raised = watch.raised or self.pending
        raise interruption(self.pending, self._message)

    def _raise_later(self) -> None:
        before = signal.signal(signal.SIGALRM, lambda _, frame: _active[-1]._raise_if_free(frame))
        self._before.setdefault(signal.SIGALRM, before or signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, RETRY_SECONDS)

    def _report_others(self, unraisable: Any) -> None:
        """Report an exception that Python swallows, unless it will be raised again."""
        if not isinstance(unraisable.exc_value, INTERRUPTIONS):
            self._report(unraisable)


# from the outermost to the innermost; only the main thread has some
_active: list[SignalWatch] = []


def settle() -> None:
    """Forget the signal that has come: the caller ends the command because of it."""
    for watch in _active:
        watch.pending = watch.raised = 0


def _is_ending() -> bool:
    """Whether the exception of a signal is being handled, in the code that this one interrupts."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, INTERRUPTIONS):
        error = error.__context__
    return error is not None


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def guard_workers(loader: Any) -> Any:
    """Let the workers of a data loader ignore `SIGNALS`, unless the loader sends them.

    A worker still ends when the loader shuts it down, and when the main process dies: it looks for
    both while it waits for work. The loader is changed in place.
    """
    # accelerate iterates over a loader inside its own
    inner = getattr(loader, "base_dataloader", loader)
    if not getattr(inner, "num_workers", 0):
        return loader
    # A loader that refers to itself waits for garbage collection, which closes its queues first.
    # Its workers would then miss the word to end, and each would be waited for 5 seconds.
    make_iterator, itself = type(inner)._get_iterator, weakref.ref(inner)

    def guarded() -> Any:
        # a process inherits this, so that there is no moment at which a signal could end it
        with _blocked():
            return make_iterator(itself())

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
        came = signal.sigwaitinfo(SIGNALS)
        if came.si_signo == signal.SIGTERM and came.si_pid == parent:
            os._exit(0)
