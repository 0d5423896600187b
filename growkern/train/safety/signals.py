"""SIGINT and SIGTERM during a run: finish the step and save, or stop at once."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# launchers pass a signal on that the terminal has sent to every process already
REPEATED_AFTER = 2.0
# seconds: between two looks whether an import is done, and the longest wait for it
RETRY_SECONDS, IMPORT_SECONDS = 0.05, 30.0


class Terminated(SystemExit):
    """SIGTERM ended the run. The exit code is 143, as for a process that the signal killed."""

    def __init__(self, message: str = "") -> None:
        super().__init__(128 + signal.SIGTERM)
        self.message = message

    def __str__(self) -> str:
        return self.message


def interruption(number: int, message: str = "") -> BaseException:
    """The exception that ends a run after a signal.

    Args:
        number: of the signal.
        message: one line for the user; empty if it is already printed.
    """
    return Terminated(message) if number == signal.SIGTERM else KeyboardInterrupt(message)


class SignalWatch:
    """Catches SIGINT and SIGTERM while it is active; a context manager.

    At first a signal raises at once. After `defer` it is only noted in `pending`, so that the
    current step can end. A second SIGINT raises in any case. Outside the main thread, where Python
    delivers no signals, nothing is caught.

    Modules that are being imported may swallow any exception. So a signal that comes during an
    import raises when the import is done, or after `IMPORT_SECONDS`.

    Args:
        message: one line for the user, for the exceptions that are raised at once.
        enabled: False leaves the signals alone.

    Attributes:
        pending: number of the signal that waits for the end of the step, or 0.
        raised: number of the first signal that raised an exception, or 0.
    """

    def __init__(self, message: str = "", *, enabled: bool = True) -> None:
        self.pending = self.raised = 0
        self._message, self._enabled = message, enabled
        self._deferred, self._since = False, 0.0
        self._before: dict[int, Any] = {}
        self._first_seen = 0.0

    def __enter__(self) -> SignalWatch:
        if self._enabled and threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                # a process that its starter told to ignore a signal continues to ignore it
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        if signal.SIGALRM in self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def defer(self) -> None:
        """From now on note signals instead of raising."""
        self._deferred = True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        impatient = number == signal.SIGINT and self.pending and now - self._since > REPEATED_AFTER
        if not self._deferred or impatient:
            self._first_seen = self._first_seen or now
            if _is_importing(frame) and now - self._first_seen < IMPORT_SECONDS:
                self._receive_later(number)
                return
            self.raised = self.raised or number
            raise interruption(number, self._message)
        if not self.pending:
            self.pending, self._since = number, now

    def _receive_later(self, number: int) -> None:
        """Receive a signal again after `RETRY_SECONDS`."""
        before = signal.signal(signal.SIGALRM, lambda _, frame: self._receive(number, frame))
        self._before.setdefault(signal.SIGALRM, before or signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, RETRY_SECONDS)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
