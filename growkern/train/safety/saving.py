"""Writes the checkpoints and the model of a run, and ends a run after a signal.

What is written appears on disk only when it is complete.

The checkpoint of a sharded model is written in the background, unless `async_checkpoints` is off:
all processes copy their parts to CPU memory, training continues, and a thread of each process
writes its copy. The threads talk to each other through a process group of their own. The next
save, a signal, an error and the end of the run wait for them. A process that is killed meanwhile
leaves a staging folder, which the next start deletes, and the earlier checkpoints.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from growkern.errors import GrowthError, say, warn
from growkern.train.distributed import Parts, Shards, all_finite, largest_entry, write_parts
from growkern.train.safety.checkpoints import (
    MANIFEST,
    damage,
    last_checkpoint,
    newest_whole,
    step_of,
)
from growkern.train.safety.signals import SignalWatch, interruption
from growkern.train.safety.staging import (
    STAGING,
    Processes,
    Step,
    close_staging,
    in_background,
    open_staging,
    publish,
    publish_into,
    rotate,
)

FINAL = "model"
RESUME_HINT = "trainer.train(resume_from_checkpoint=True)"
# the others wait while the first process reads a large checkpoint for its checksums
MOST_TIME = timedelta(hours=6)
Write = Callable[[Path], None]


class Saver:
    """Saves whole checkpoints and whole models.

    Args:
        stops: knows of signals, which wait for the checkpoint of their step.

    Attributes:
        hint: how to start the run again, for messages.
        saved_at: when the last save began.
    """

    def __init__(self, args: TrainingArguments, accelerator: Any, stops: Stops) -> None:
        self._args, self._stops = args, stops
        self._processes = Processes.of_accelerator(accelerator)
        self.hint = RESUME_HINT
        self.saved_at = time.monotonic()
        self._pending: tuple[Path, Future[str | None]] | None = None
        self._group: dist.ProcessGroup | None = None

    @property
    def is_written(self) -> bool:
        """Whether a checkpoint in the background is written, and nobody has waited for it."""
        return self._pending is not None and self._pending[1].done()

    def save(self, model: Any, run: Path, state: Any, write: Write, shards: Shards) -> Path | None:
        """Save a checkpoint in a staging folder that becomes the checkpoint when it is complete.

        If the disk is full, training continues with the earlier checkpoints and a warning.

        Args:
            state: of the trainer; it is written too.
            write: writes `checkpoint-<step>` in the folder that it gets.
            shards: have parts that may be written in the background.
        """
        step = state.global_step
        self.wait(step)
        if not all_finite(model):
            raise GrowthError(
                f"step {step}: the weights are not finite and were not saved; {self.last(step)}"
            )
        target, best = run / f"checkpoint-{step}", best_checkpoint(run, state)
        staged, shards.copied = run / STAGING / target.name, {}

        def write_all() -> None:
            write(staged.parent)
            # all processes: Trainer loads the best model at the end where it is named
            state.best_model_checkpoint = best and str(best)
            if self._args.should_save:
                state.save_to_json(str(staged / TRAINER_STATE_NAME))

        def appear() -> None:
            publish(staged, target)
            rotate(target, self._args.save_total_limit, best)

        failure = self._stage(run, write_all)
        self.saved_at = time.monotonic()
        copied, shards.copied = shards.copied, {}
        if failure is None and copied:
            self._write_behind(target, staged, copied, appear)
            # it would be pushed before it is complete
            return self.wait(step) if self._stops.number or self._args.push_to_hub else None
        failure = failure or self._processes.take(run, self._last(run, appear))
        return self._checked(target, failure, step)

    def _stage(self, run: Path, write: Step) -> str | None:
        """Write to a new staging folder, in all processes; why that failed, or None."""
        first = self._processes.first
        return self._processes.take(run, lambda: first and open_staging(run), write)

    def _last(self, run: Path, appear: Step) -> Step:
        """Lets what is staged appear, in the first process alone."""

        def step() -> None:
            if self._processes.first:
                appear()
                close_staging(run)

        return step

    def _write_behind(self, target: Path, staged: Path, copied: Parts, appear: Any) -> None:
        """Write the copied parts of a checkpoint while training continues."""
        # messages of two threads in one group would get mixed up; NCCL takes no CPU tensors
        group = self._group = self._group or dist.new_group(backend="gloo", timeout=MOST_TIME)
        steps = lambda: write_parts(copied, staged, group), self._last(target.parent, appear)
        take = partial(Processes.of_group(group).take, target.parent, *steps)
        self._pending = target, in_background(f"write {target.name}", take)

    def wait(self, step: int) -> Path | None:
        """Wait for the checkpoint that is written in the background, if there is one."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        target, written = pending
        try:
            failure = written.result()
        except Exception as error:
            raise GrowthError(f"{target} was not saved: {error}") from error
        return self._checked(target, failure, step)

    def _checked(self, target: Path, failure: str | None, step: int) -> Path | None:
        """A checkpoint that was saved; or say that it was not."""
        if failure is None:
            return target
        message = f"{target} was not saved ({failure}); {self.last(step)}"
        # a signal waits for the checkpoint of its step, not for an earlier one
        if self._stops.number and step_of(target) == step:
            name = Signals(self._stops.number).name
            raise GrowthError(f"{name}: {message}; to resume: {self.hint}")
        if self._processes.first:
            warn(f"{message}; training continues")
        return None

    def last(self, step: int) -> str:
        """Says which checkpoint is the last one, for messages; see `wait`."""
        self.wait(step)
        last = last_checkpoint(Path(self._args.output_dir))
        return "there is no checkpoint" if last is None else f"the last good checkpoint is {last}"

    def save_final(self, state: Any, write: Write) -> None:
        """Save the model of a run, and the state of the trainer beside it.

        If the disk takes no more, this raises, and the checkpoints are as they were.
        """
        run = Path(self._args.output_dir)
        staged = run / STAGING / FINAL

        def write_all() -> None:
            write(staged)
            if self._args.should_save:
                state.save_to_json(str(staged / TRAINER_STATE_NAME))

        last = self._last(run, lambda: publish_into(staged, run))
        failure = self._stage(run, write_all) or self._processes.take(run, last)
        if failure is not None:
            raise GrowthError(
                f"the model was not saved ({failure}); {self.last(state.global_step)}; to resume: "
                f"{self.hint}"
            )

    def newest_whole(self) -> Path | None:
        """The latest whole checkpoint of the run, the same for all processes."""
        answer: list[Any] = [None, None]  # the checkpoint, or what is wrong
        if self._processes.first:
            directory = Path(self._args.output_dir)
            close_staging(directory)
            try:
                answer[0] = newest_whole(directory)
            except GrowthError as error:
                answer[1] = str(error)
        newest, wrong = self._processes.gather(answer)[0]
        if wrong is not None:
            raise GrowthError(wrong)
        return newest

    def before_growth(self, step: int) -> Path:
        """The checkpoint of a step, from which a larger model is about to grow."""
        checkpoint = Path(self._args.output_dir) / f"checkpoint-{step}"
        if not (checkpoint / MANIFEST).is_file():
            raise GrowthError(
                f"the growth at step {step} continues from {checkpoint}, which could not be "
                f"saved; {self.last(step)}; make room, then resume: {self.hint}"
            )
        return checkpoint

    def end_run(self, step: int) -> NoReturn:
        """End the run after a signal. All processes do, and one says so."""
        number = self._stops.number
        if self._processes.first:
            name, saved = Signals(number).name, last_checkpoint(Path(self._args.output_dir))
            say(f"{name} after step {step}: saved in {saved}; to resume: {self.hint}", sys.stderr)
        raise interruption(number)

    def chosen(self, checkpoint: str | Path | bool | None) -> Path | None:
        """The checkpoint to resume from; None begins a run."""
        if checkpoint is True:
            newest = self.newest_whole()
            if newest is None:
                raise GrowthError(f"{self._args.output_dir} has no checkpoint to resume from")
            return newest
        if not checkpoint:
            return None
        given = Path(checkpoint)
        wrong = damage(given) if (given / MANIFEST).is_file() else None
        if wrong is not None:
            raise GrowthError(f"{given} is damaged: {wrong}")
        return given


def best_checkpoint(run: Path, state: Any) -> Path | None:
    """The checkpoint with the best metric so far; this one if the metric is this step's."""
    step = state.best_global_step
    if not step:
        return None
    best = run / f"checkpoint-{step}"
    return best if step == state.global_step or best.exists() else None


def set_dtype(model: Any, dtype: torch.dtype) -> None:
    """Give the weights of a model a dtype, unless one is too large for it; then warn."""
    if largest_entry(model) <= torch.finfo(dtype).max:
        model.to(dtype)
    else:
        warn(f"a weight does not fit into {dtype}: the model is saved in {model.dtype}")


@contextlib.contextmanager
def plain_hub_errors() -> Iterator[None]:
    """While active, an error of the Hub is one line."""
    try:
        yield
    except Exception as error:
        # which classes the Hub's client raises depends on its version
        why = " ".join(str(error).split()) or type(error).__name__
        raise GrowthError(f"push_to_hub: the repository cannot be made: {why}") from error


BATCHES_BETWEEN_QUESTIONS = 8


class EvaluationStopped(Exception):
    """A signal came during an evaluation."""


class Stops:
    """Whether and why a run stops.

    Attributes:
        signals: that come now.
        number: of the signal that ends the run, or 0.
        evaluated: batches of the evaluation that runs.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.signals = SignalWatch(enabled=False)
        self.number = self.evaluated = 0

    def of_any(self) -> bool:
        """Whether a signal waits in one of the processes; it is noted. All of them must ask."""
        self.number = self.signals.pending
        if self._accelerator.num_processes > 1:
            mine = torch.tensor([self.number], device=self._accelerator.device)
            self.number = int(self._accelerator.gather(mine).max())
        return self.number > 0

    def end_evaluation(self) -> None:
        """End an evaluation between two steps if a signal waits. Call this for every batch.

        Raises:
            EvaluationStopped: there is one, so the run can save before it is killed.
        """
        if not self.signals.deferred:
            # it raises by itself
            return
        self.evaluated += 1
        # all processes have to leave at the same batch, and every question costs time
        if self._accelerator.num_processes > 1 and self.evaluated % BATCHES_BETWEEN_QUESTIONS:
            return
        if self.of_any():
            raise EvaluationStopped


def evaluates_start(args: Any, state: Any) -> bool:
    """Whether a model that was just grown is evaluated before it is trained."""
    is_evaluated = args.eval_strategy == "steps" and state.global_step >= args.eval_delay
    return is_evaluated and not args.eval_on_start


def misses_evaluation(args: Any, state: Any, sets: Any) -> bool:
    """Whether a signal has ended or prevented the evaluation of the current step."""
    step = state.global_step
    if args.eval_strategy != "steps" or step < max(1, args.eval_delay):
        return False
    if step % state.eval_steps and step != state.max_steps:
        return False
    names = [f"eval_{name}" for name in sets] if isinstance(sets, dict) else ["eval"]
    logged = {key for line in state.log_history if line["step"] == step for key in line}
    return not all(f"{name}_loss" in logged for name in names)
