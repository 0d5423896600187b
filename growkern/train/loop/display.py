"""What people see of a run: short lines, and a bar where they look at a terminal.

A log line has twenty numbers. People get the few by which they act, and `log.jsonl` and the
trackers get all.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.integrations import TensorBoardCallback

from growkern.errors import clean, counted, human, say, warn
from growkern.publish import move
from growkern.train.loop.growing import GrowthInRun
from growkern.train.safety import LOG_FILE

LABEL_LOSS, OBJECTIVE, VALIDATION_LOSS = "label loss", "objective", "validation loss"
# seconds after which a run without a bar says that it is alive
SILENCE = 30.0


def losses_of(logs: Mapping[str, Any]) -> dict[str, float]:
    """The losses of a log line, under the names that people read.

    The loss that is trained on mixes the label loss and the KL divergence with shares that change.
    So it may rise while the model improves. Here it is the "objective".
    """
    found = {}
    if "loss" in logs:
        found[LABEL_LOSS if "label_loss" in logs else "loss"] = logs.get("label_loss", logs["loss"])
        if "kl" in logs:
            found["kl"] = logs["kl"]
        if logs.get("alpha"):
            found[OBJECTIVE] = logs["loss"]
    for name in logs:
        if name.startswith("eval_") and name.endswith("loss"):
            part = name.removeprefix("eval_").removesuffix("loss").strip("_")
            found[f"{VALIDATION_LOSS} of {part}" if part else VALIDATION_LOSS] = logs[name]
    return found


def _rest_of(logs: Mapping[str, Any]) -> Iterator[str]:
    """The other numbers of a log line that people read."""
    if logs.get("skipped_steps"):
        yield f"{counted(logs['skipped_steps'], 'step')} skipped"
    if "learning_rate" in logs:
        yield f"lr {logs['learning_rate']:.3g}"
    if "grad_norm" in logs:
        yield f"grad_norm {logs['grad_norm']:.3g}"
    if "tokens_per_second" in logs:
        yield f"{human(logs['tokens_per_second'])} tokens/s".replace("  ", " ")
    if "mfu" in logs:
        yield f"MFU {logs['mfu']:.1%}"
    if "expert_largest_share" in logs:
        yield f"largest expert share {logs['expert_largest_share']:.0%}"


def last_losses(history: Sequence[Mapping[str, Any]], step: int) -> str:
    """The last label loss of a run, and the last loss on the validation data if it has any.

    A loss of another step than the last one is printed with its step.
    """
    losses = []
    for name, text in {"label_loss": LABEL_LOSS, "eval_loss": VALIDATION_LOSS}.items():
        lines = [line for line in history if name in line]
        if lines:
            place = "" if lines[-1]["step"] == step else f" at step {lines[-1]['step']}"
            losses.append(f"{text} {lines[-1][name]:.4f}{place}")
    return ", ".join(losses)


def warn_of_divergence(history: Sequence[Mapping[str, Any]], since: int) -> None:
    """Warn if a loss ends far above the first one since a step, at which the model grew.

    It is the validation loss or, without two of these, the label loss. Batches differ, so the
    lowest of the last three label losses counts.
    """
    for name, text, least, last in (
        ("eval_loss", VALIDATION_LOSS, since, 1),
        ("label_loss", LABEL_LOSS, since + 1, 3),
    ):
        # of two evaluations at a step, the second is that of the grown model
        losses = {x["step"]: x[name] for x in history if name in x and x["step"] >= least}
        first, *later = losses.values() or [0.0]
        if later:
            end = min(later[-last:])
            if end > 1.1 * first + 0.1:
                fix = "lower learning_rate, or take fewer steps"
                warn(f"{text} rose from {first:.4g} to {end:.4g}: {fix}")
            return


class _Lines(TrainerCallback):
    """Prints a line for each log line and for each growth, on the first process alone."""

    def __init__(self, growths: GrowthInRun) -> None:
        super().__init__()
        self.growths = growths
        self._before: dict[str, str] = {}  # a growth
        self._first, self._since = 0, time.monotonic()

    def show(self, line: str) -> None:
        """Print a line."""
        say(line)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell of the growth that has just been made, if this part of the run begins with one."""
        self._first, self._since = state.global_step, time.monotonic()
        if self.growths.source is not None and state.is_world_process_zero:
            for line in state.log_history:
                at = f" ({{:.4f}} at step {line['step']}, before the growth)"
                self._before |= {name: at.format(x) for name, x in losses_of(line).items()}
            count = sum(p.numel() for p in kwargs["model"].parameters())
            self.show(f"step {state.global_step}: {self.growths.described(count)}")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print a log line."""
        logs = logs or {}
        # the last line of Trainer has times alone
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        losses = losses_of(logs)
        # the first line after a growth compares
        before = {name: self._before.pop(name, "") for name in losses}
        words = [f"{name} {loss:.4f}{before[name]}" for name, loss in losses.items()]
        words += _rest_of(logs)
        if "loss" in logs:
            words += self._time_left(state)
        # a line of somebody else
        words = words or [f"{name} {value}" for name, value in logs.items()]
        self.show(f"step {state.global_step} of {state.max_steps}: {', '.join(words)}")

    def _time_left(self, state: Any) -> Iterator[str]:
        done, left = state.global_step - self._first, state.max_steps - state.global_step
        if done and left:
            seconds = (time.monotonic() - self._since) / done * left
            yield f"{timedelta(seconds=round(seconds))} left"


class Lines(_Lines, PrinterCallback):
    """The lines alone, with the time. After `SILENCE` without one, the run says it is alive."""

    _said, _batches = 0.0, 0

    def show(self, line: str) -> None:
        """Print a line with the local time."""
        super().show(f"{datetime.now():%Y-%m-%d %H:%M:%S} {line}")
        self._said = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._said = time.monotonic()
        super().on_train_begin(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell of the step, if the run was silent."""
        if self._is_silent(state):
            known = last_losses(state.log_history, state.global_step)
            words = [*([known] if known else []), *self._time_left(state)]
            self.show(f"step {state.global_step} of {state.max_steps}: {', '.join(words)}")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the batch, and tell of it if the run was silent."""
        self._batches += 1
        if self._is_silent(state):
            self.show(f"evaluating: {self._batches} batches done")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count batches anew."""
        self._batches = 0

    def _is_silent(self, state: Any) -> bool:
        return state.is_world_process_zero and time.monotonic() - self._said > SILENCE


class Bar(_Lines, ProgressCallback):
    """The bar of transformers, with the lines above it."""

    def show(self, line: str) -> None:
        """Print a line above the bar."""
        tqdm.write(clean(line, kept=""))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the bar, from the step at which this part of the run begins."""
        if state.is_world_process_zero:
            place = {"initial": state.global_step, "total": state.max_steps}
            self.training_bar = tqdm(**place, dynamic_ncols=True, leave=False, unit="step")
        self.current_step = state.global_step
        super().on_train_begin(args, state, control, **kwargs)


class LogFile(TrainerCallback):
    """Writes every log line at once to a file in the run's directory, on the first process alone.

    The file has the lines of the trainer's state. If it cannot be written, the callback warns once.
    """

    _file: Path | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin with the lines of the checkpoint: those after it are logged again."""
        if state.is_world_process_zero:
            self._file = file = Path(args.output_dir) / LOG_FILE
            with (
                contextlib.suppress(OSError),
                file.open(encoding="utf-8", errors="replace") as lines,
            ):
                # of another program
                if '"step":' not in next(lines, '"step":'):
                    move(file, file.with_suffix(".old.jsonl"))
            self._write("w", state.log_history)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add a line."""
        self._write("a", state.log_history[-1:])

    def _write(self, mode: str, lines: Sequence[Mapping[str, Any]]) -> None:
        if self._file is not None:
            try:
                with self._file.open(mode, encoding="utf-8") as file:
                    file.writelines(f"{json.dumps(line, default=str)}\n" for line in lines)
            except OSError as error:
                warn(f"{self._file} gets no more lines ({error}); training continues")
                self._file = None


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
            warn(f"no more TensorBoard logs are written ({error}); training continues")


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
    """Replace the callbacks of a trainer that print log lines or write them for TensorBoard.

    A file gets them too.
    """
    trainer.add_callback(LogFile())
    board = trainer.pop_callback(TensorBoardCallback)
    if board is not None:
        trainer.add_callback(SafeTensorBoard(board.tb_writer))
    # a file or a pipe, as those of nohup and SLURM, would be full of bars
    kinds = {ProgressCallback: Bar if sys.stderr.isatty() else Lines, PrinterCallback: Lines}
    # a notebook has another bar, and the user's may be a subclass
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback) in kinds:
            trainer.remove_callback(callback)
            trainer.add_callback(kinds[type(callback)](trainer.growths))
