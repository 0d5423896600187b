"""A checkpoint that a thread writes while training continues.

A thread and not a process: it ends with its process. A writer that outlived a killed run would
write into the next one's staging folder.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch

from growkern.errors import GrowthError


class BackgroundSave:
    """The write of one checkpoint, which begins at once.

    Args:
        target: the checkpoint.
        write: writes it; returns why the disk took no more, or None.
    """

    def __init__(self, target: Path, write: Callable[[], str | None]) -> None:
        self.target = target
        self._write = write
        self._failure: str | None = None
        self._error: Exception | None = None
        accelerated = torch.accelerator.is_available()
        self._device = torch.accelerator.current_device_index() if accelerated else None
        # a daemon: a second Ctrl-C ends the process without waiting for the disk
        self._thread = threading.Thread(target=self._run, name=f"write {target.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._device is not None:
                # a new thread would take the first device, and memory there
                torch.accelerator.set_device_index(self._device)
            self._failure = self._write()
        except Exception as error:
            self._error = error

    @property
    def is_done(self) -> bool:
        """Whether the write has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> str | None:
        """Wait for the end of the write.

        Returns:
            None, or why the disk took no more.

        Raises:
            GrowthError: the write failed in another way.
        """
        self._thread.join()
        if self._error is not None:
            raise GrowthError(f"{self.target} was not saved: {self._error}") from self._error
        return self._failure
