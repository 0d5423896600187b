"""What people see of a run: its progress bar, the names of its losses, and TensorBoard."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import ProgressCallback
from transformers.integrations import TensorBoardCallback

from growkern.errors import GrowthWarning

LABEL_LOSS, OBJECTIVE, VALIDATION_LOSS = "label loss", "objective", "validation loss"


def shown(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a log line for people: the label loss first, under a name of its own.

    The loss that is trained on mixes the label loss and the KL divergence with shares that change.
    So it may rise while the model improves. Here it is the "objective".

    Args:
        logs: of `Trainer.log`; "mlm" is the loss of the labels alone.
    """
    if "mlm" not in logs:
        return dict(logs)
    rest = {name: value for name, value in logs.items() if name not in ("mlm", "loss")}
    return {LABEL_LOSS: logs["mlm"], OBJECTIVE: logs["loss"], **rest}


def last_losses(history: Sequence[Mapping[str, Any]], step: int) -> str:
    """The last label loss of a run, and the last loss on the validation data if it has any.

    Args:
        history: the log lines of the run.
        step: the last one. A loss of another step is printed with its step.
    """
    found = []
    for name, text in {"mlm": LABEL_LOSS, "eval_loss": VALIDATION_LOSS}.items():
        lines = [line for line in history if name in line]
        if lines:
            place = "" if lines[-1]["step"] == step else f" at step {lines[-1]['step']}"
            found.append(f"{text} {lines[-1][name]:.4f}{place}")
    return ", ".join(found)


class NamedProgress(ProgressCallback):
    """The bar of transformers, with log lines that name the label loss."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show a log line above the bar."""
        super().on_log(args, state, control, logs=shown(logs or {}), **kwargs)


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


def use_own_displays(trainer: Any) -> None:
    """Replace the progress bar and the TensorBoard callback of a trainer, if it has them."""
    board = trainer.pop_callback(TensorBoardCallback)
    if board is not None:
        trainer.add_callback(SafeTensorBoard(board.tb_writer))
    # a notebook has another bar, and the user's may be a subclass
    for one in list(trainer.callback_handler.callbacks):
        if type(one) is ProgressCallback:
            trainer.remove_callback(one)
            trainer.add_callback(NamedProgress())
