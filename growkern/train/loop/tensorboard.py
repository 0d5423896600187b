"""TensorBoard logs that a full disk cannot end a run with."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

from transformers import Trainer
from transformers.integrations import TensorBoardCallback

from growkern.errors import GrowthWarning


class SafeTensorBoard(TensorBoardCallback):
    """transformers' callback. When a log cannot be written it warns once and writes no more."""

    def __init__(self, tb_writer: Any = None) -> None:
        super().__init__(tb_writer)
        self._failed = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the log."""
        _expect_failing_writers()
        self._try(super().on_train_begin, args, state, control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write a line."""
        self._try(super().on_log, args, state, control, logs=logs, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the log."""
        self._try(super().on_train_end, args, state, control, **kwargs)

    def _try(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if self._failed:
            return
        try:
            work(*args, **kwargs)
        except OSError as error:
            self._failed, self.tb_writer = True, None
            warnings.warn(
                f"no more TensorBoard logs are written ({error}); training continues",
                GrowthWarning,
                stacklevel=2,
            )


def use_safe_tensorboard(trainer: Trainer) -> None:
    """Replace the TensorBoard callback of a trainer, if it has one."""
    found = trainer.pop_callback(TensorBoardCallback)
    if found is not None:
        trainer.add_callback(SafeTensorBoard(found.tb_writer))


def _expect_failing_writers() -> None:
    """Print no traceback when the thread that writes the log fails: the next call raises that."""
    before = threading.excepthook
    if getattr(before, "expects_failing_writers", False):
        return

    def hook(failure: Any) -> None:
        is_writer = type(failure.thread).__name__ == "_AsyncWriterThread"
        if not (is_writer and issubclass(failure.exc_type, OSError)):
            before(failure)

    hook.expects_failing_writers = True  # type: ignore[attr-defined]
    threading.excepthook = hook
