"""The progress bar of a run, and the names under which losses are shown to people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import ProgressCallback

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


def use_named_progress(trainer: Any) -> None:
    """Replace the progress bar of a trainer, if it has the plain one of transformers."""
    # a notebook has another one, and the user's may be a subclass
    for one in list(trainer.callback_handler.callbacks):
        if type(one) is ProgressCallback:
            trainer.remove_callback(one)
            trainer.add_callback(NamedProgress())
