"""A `transformers.Trainer` whose runs survive crashes, signals and bad steps.

A checkpoint appears only when it is complete. A signal saves before it ends the run. A step whose
loss or gradient is not finite is never taken. Float32 weights are kept in training.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any, NoReturn

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from growkern.errors import GrowthError, nearest
from growkern.printing import say
from growkern.seeds import MOST_SEED, seed_of_process
from growkern.train.safety.checkpoints import (
    MANIFEST,
    behind_link,
    close_staging,
    damage,
    last_checkpoint,
    newest_whole,
)
from growkern.train.safety.evaluation import MissedEvaluation
from growkern.train.safety.precision import set_precision
from growkern.train.safety.saving import SavingTrainer
from growkern.train.safety.signals import SignalWatch, interruption
from growkern.train.safety.workers import guard_workers

ON_NONFINITE = ("stop", "skip")
# with broken weights every step would be skipped, without end
MOST_SKIPPED_IN_A_ROW = 100


@dataclass(frozen=True)
class StepReport:
    """The facts about a step that all processes share before the optimizer takes it.

    Attributes:
        ranks: the processes whose loss is not finite.
        norm: whether the gradient norm is finite.
        stop: number of the signal that some process received, or 0.
        save: whether a checkpoint is due by the clock.
        written: whether all processes have written the checkpoint in the background.
    """

    ranks: tuple[int, ...]
    norm: bool
    stop: int
    save: bool
    written: bool


class SafeTrainer(SavingTrainer):
    """A trainer that saves whole checkpoints, stops cleanly, and never steps on NaN.

    Args:
        model: the model in training. Weights in half precision become float32, in place.
        args: of `transformers.Trainer`.
        precision: "fp32"; "bf16", which is autocast over float32 weights; "pure-bf16"; None follows
            `args.bf16`.
        on_nonfinite: when a loss or a gradient norm is NaN or infinite, "stop" raises an error, and
            "skip" leaves out the optimizer step and counts it as `skipped_steps` in the log.
        save_minutes: a checkpoint is also saved when this time has passed since the last; 0 saves
            by `args` alone.
        options: all other keyword arguments of `transformers.Trainer`.

    Raises:
        GrowthError: a value is not one of those above.
    """

    control: Any

    def __init__(
        self,
        model: Any,
        args: TrainingArguments,
        *,
        precision: str | None = None,
        on_nonfinite: str = "stop",
        save_minutes: float = 0.0,
        **options: Any,
    ) -> None:
        if on_nonfinite not in ON_NONFINITE:
            raise GrowthError(
                f"on_nonfinite is {on_nonfinite!r}{nearest(on_nonfinite, ON_NONFINITE)}"
            )
        if not save_minutes >= 0:
            raise GrowthError(f"save_minutes is {save_minutes}: it must be 0 or more")
        args.output_dir = str(behind_link(Path(str(args.output_dir))))
        # the filter replaces NaN by an average, in the log alone
        args.logging_nan_inf_filter = False
        if args.data_seed is None:
            # accelerate would take the seed that PyTorch has when training begins, and each process
            # and each resumed run may have another one
            args.data_seed = args.seed
        self.precision = set_precision(model, args, precision)
        self.on_nonfinite, self.save_minutes = on_nonfinite, save_minutes
        super().__init__(model=model, args=args, **options)
        self.add_callback(MissedEvaluation(self))
        self._signals = SignalWatch(enabled=False)
        self._report: StepReport | None = None
        self._step_loss: Tensor | float = 0.0
        self._stop = self._skipped = self._skipped_in_a_row = 0

    # ------------------------------------------------------------------- runs

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, **options: Any) -> Any:
        """Train. SIGINT and SIGTERM save a checkpoint at the end of the current step.

        If `args.save_strategy` is "no", they end the run without a checkpoint. A signal in the last
        step raises too, after the run has ended.

        Args:
            resume_from_checkpoint: a checkpoint, or True for the latest whole one in
                `args.output_dir`.
            options: of `transformers.Trainer.train`.

        Raises:
            GrowthError: a checkpoint is damaged, or a step is not finite.
            KeyboardInterrupt: SIGINT ended the run.
            Terminated: SIGTERM ended the run.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self.newest_whole_checkpoint()
            if resume_from_checkpoint is None:
                raise GrowthError(f"{self.args.output_dir} has no checkpoint to resume from")
        elif resume_from_checkpoint and (Path(resume_from_checkpoint) / MANIFEST).is_file():
            wrong = damage(Path(resume_from_checkpoint))
            if wrong is not None:
                raise GrowthError(f"{resume_from_checkpoint} is damaged: {wrong}")
        if resume_from_checkpoint:
            options["resume_from_checkpoint"] = str(resume_from_checkpoint)
        self._saved_at = time.monotonic()
        self._stop = self._skipped_in_a_row = 0
        self._report, self._step_loss = None, 0.0
        message = f"stopped; to resume: {self.resume_hint}"
        with SignalWatch(message, enabled=self.args.save_strategy != "no") as self._signals:
            try:
                result = super().train(**options)
            except BaseException:
                # the error that ends the run counts; the checkpoint is complete or gone
                with contextlib.suppress(GrowthError):
                    self.wait_for_checkpoint()
                raise
            self.wait_for_checkpoint()
            self._stop = self.signal_of_any()
            if self._stop:
                self._raise_after_signal()
            return result

    def take_end(self, checkpoint: Path) -> None:
        """Take over the last checkpoint of a run that was killed after it, as if it ended now.

        Args:
            checkpoint: at `args.max_steps`. The model has its size.
        """
        self._load_from_checkpoint(str(checkpoint))
        self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        if self.is_evaluated_at(self.state.global_step):
            self.evaluate_if_missed()
        best = self._best_checkpoint(checkpoint.parent)
        self.state.best_model_checkpoint = best and str(best)
        if self.args.load_best_model_at_end and best is not None:
            self._load_best_model()

    def newest_whole_checkpoint(self) -> Path | None:
        """The latest whole checkpoint in the output directory, the same for all processes.

        Raises:
            GrowthError: there are checkpoints, but all of them are damaged.
        """
        found: list[Any] = [None, None]
        if self.is_world_process_zero():
            directory = Path(self.args.output_dir)
            close_staging(directory)
            try:
                found[0] = newest_whole(directory)
            except GrowthError as error:
                found[1] = str(error)
        if self.accelerator.num_processes > 1:
            broadcast_object_list(found)
        if found[1] is not None:
            raise GrowthError(found[1])
        return found[0]

    def _get_dataloader(self, *args: Any, **options: Any) -> Any:
        """Trainer's; a signal to all processes of the run does not kill those that load data."""
        return guard_workers(super()._get_dataloader(*args, **options))

    # ------------------------------------------------------------------ steps

    def training_step(self, *args: Any, **options: Any) -> Tensor:
        """Trainer's, and add up the loss of the step."""
        # until here nothing would be lost by stopping at once
        self._signals.defer()
        with self._own_random_numbers():
            loss: Tensor = super().training_step(*args, **options)
        self._step_loss = self._step_loss + loss
        return loss

    @contextlib.contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """While active, each of several processes draws other dropout masks.

        Afterwards the generator of the CPU is the same in all processes again: data sets and
        samplers may draw the order of the rows from it.
        """
        if self.args.world_size == 1:
            yield
            return
        shared = int(torch.randint(MOST_SEED, ()))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of_process(shared, self.args.process_index))
            yield

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Trainer's; it is called once per step, right before the optimizer."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        report = self._agree(norm)
        self._step_loss = 0.0
        self._report = report
        if report.norm and not report.ranks:
            self._skipped_in_a_row = 0
            return norm
        self._skipped_in_a_row += 1
        if self.on_nonfinite == "stop" or self._skipped_in_a_row > MOST_SKIPPED_IN_A_ROW:
            raise GrowthError(self._nonfinite_message(report, norm))
        self._skipped += 1
        # parameters without a gradient stay as they are, and so does their optimizer state
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _agree(self, norm: Any) -> StepReport:
        """Exchange the state of the step between the processes, and read it back once."""
        device = self.args.device
        # a gradient scaler skips the steps that overflow in float16 by itself
        checked = norm if self.accelerator.scaler is None else 0.0
        values = [torch.as_tensor(x, device=device) for x in (self._step_loss, checked)]
        due = self.save_minutes > 0 and time.monotonic() - self._saved_at > 60 * self.save_minutes
        written = self._pending is not None and self._pending.is_done
        mine = torch.tensor([self._signals.pending, due, written], device=device).float()
        flags_R5 = torch.cat([torch.stack([~x.isfinite() for x in values]).float(), mine])[None]
        if self.accelerator.num_processes > 1:
            flags_R5 = self.accelerator.gather(flags_R5)
        rows = flags_R5.tolist()
        return StepReport(
            ranks=tuple(rank for rank, row in enumerate(rows) if row[0]),
            norm=not any(row[1] for row in rows),
            stop=int(max(row[2] for row in rows)),
            save=any(row[3] for row in rows),
            written=all(row[4] for row in rows),
        )

    def _nonfinite_message(self, report: StepReport, norm: Any) -> str:
        found = f"the gradient norm is {float(norm)}"
        if report.ranks:
            found = f"the loss is NaN or infinite on rank {', '.join(map(str, report.ranks))}"
        if self._skipped_in_a_row > MOST_SKIPPED_IN_A_ROW:
            found += f" and {MOST_SKIPPED_IN_A_ROW} steps before it were skipped"
        return f"step {self.state.global_step + 1}: {found}; {self._last_save()}"

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log a line, with the number of steps that were skipped in this process, if any.

        The last line has no `train_loss`: Trainer does not know the whole run's.
        """
        if self._skipped and "loss" in logs:
            logs["skipped_steps"] = self._skipped
        # a mean since the last start alone, and NaN after a step that was skipped
        logs.pop("train_loss", None)
        super().log(logs, start_time)

    # ----------------------------------------------------------------- saving

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        """Trainer's, after a step and after an epoch; a stop saves and raises."""
        report, control = self._report, self.control
        # all processes report an error at the same step, and none waits for another
        if report is not None and report.written:
            self.wait_for_checkpoint()
        if report is not None:
            self._stop = report.stop
        if self._stop:
            control.should_log = control.should_save = True
            # an evaluation may take longer than the system waits before it kills
            control.should_evaluate = False
        elif report is not None and report.save:
            control.should_save = True
        if self.state.global_step >= self.state.max_steps and self.args.logging_strategy != "no":
            # the loss of the last steps would be in no line
            control.should_log = True
        self._report = None
        super()._maybe_log_save_evaluate(*args, **options)
        if self.state.global_step >= self.state.max_steps:
            # there are no steps left to write behind
            self.wait_for_checkpoint()
        if self._globalstep_last_logged == self.state.global_step:
            # Trainer subtracts the sum from itself, which leaves NaN in all later lines
            self._tr_loss.zero_()
        if self._stop:
            self._end_after_signal()

    def _end_after_signal(self) -> None:
        """End the training loop, and the run."""
        self.is_in_train = False
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        self._raise_after_signal()

    def _raise_after_signal(self) -> NoReturn:
        """End the run. All processes do, and one says so."""
        message = (
            f"{Signals(self._stop).name} after step {self.state.global_step}: saved in "
            f"{last_checkpoint(Path(self.args.output_dir))}; to resume: {self.resume_hint}"
        )
        if self.is_world_process_zero():
            say(message, sys.stderr)
        raise interruption(self._stop)
