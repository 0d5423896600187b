"""A `transformers.Trainer` whose checkpoints and models appear on disk only when complete.

The checkpoint of a sharded model is written in the background, unless `async_checkpoints` is off:
all processes copy their parts to CPU memory, training continues, and a thread of each process
writes its copy. The threads talk to each other through a process group of their own. The next
save, a signal, an error and the end of the run wait for them. A process that is killed meanwhile
leaves a staging folder, which the next start deletes, and the earlier checkpoints.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from signal import Signals
from typing import Any

import torch
import torch.distributed as dist
from transformers.trainer import TRAINER_STATE_NAME

from growkern.errors import GrowthError, GrowthWarning
from growkern.train.distributed.checkpoint import Parts, write_parts
from growkern.train.distributed.shard import all_finite, largest_entry
from growkern.train.safety.background import BackgroundSave
from growkern.train.safety.checkpoints import (
    last_checkpoint,
    publish,
    publish_into,
    rotate,
    step_of,
)
from growkern.train.safety.evaluation import StoppableTrainer
from growkern.train.safety.staging import Processes, begin_together, finish_together

FINAL = "model"
# the others wait while the first process reads a large checkpoint for its checksums
MOST_TIME = timedelta(hours=6)


class SavingTrainer(StoppableTrainer):
    """A trainer that saves whole checkpoints and whole models.

    Attributes:
        resume_hint: how to start the run again, for messages.
    """

    resume_hint = "trainer.train(resume_from_checkpoint=True)"
    _staging: Path | None = None
    _pending: BackgroundSave | None = None
    _group: dist.ProcessGroup | None = None
    # when the last save began
    _saved_at: float = 0.0

    def init_hf_repo(self, *args: Any, **options: Any) -> None:
        """Trainer's; a Hub that cannot be reached is an error of one line."""
        try:
            super().init_hf_repo(*args, **options)
        except Exception as error:
            # which classes the Hub's client raises depends on its version
            why = " ".join(str(error).split()) or type(error).__name__
            raise GrowthError(f"push_to_hub: the repository cannot be made: {why}") from error

    def _get_output_dir(self, trial: Any) -> str:
        """Trainer's, or the staging folder while a checkpoint is written."""
        return str(self._staging or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Trainer's, in a staging folder that becomes the checkpoint when it is complete.

        If the disk is full, training continues with the earlier checkpoints and a warning.
        """
        self.wait_for_checkpoint()
        if not all_finite(self.model):
            raise GrowthError(
                f"step {self.state.global_step}: the weights are not finite and were not saved; "
                f"{self._last_save()}"
            )
        run = Path(self._get_output_dir(trial))
        target = run / f"checkpoint-{self.state.global_step}"
        best = self._best_checkpoint(run)

        def write(staging: Path) -> None:
            with self._writing_to(staging):
                super(SavingTrainer, self)._save_checkpoint(model, trial)
            # all processes: Trainer loads the best model at the end where it is named
            self.state.best_model_checkpoint = best and str(best)
            if self.args.should_save:
                self.state.save_to_json(str(staging / target.name / TRAINER_STATE_NAME))

        processes = Processes.of_accelerator(self.accelerator)
        staging, failure = begin_together(processes, run, write)
        self._saved_at = time.monotonic()

        def appear() -> None:
            publish(staging / target.name, target)
            rotate(target, self.args.save_total_limit, best)

        copied = self.take_copied()
        if failure is None and copied:
            self._write_behind(target, staging / target.name, copied, appear)
            return
        if failure is None:
            failure = finish_together(processes, run, lambda: None, appear)
        self._after_save(target, failure)

    def _write_behind(self, target: Path, staged: Path, copied: Parts, appear: Any) -> None:
        """Write the copied parts of a checkpoint while training continues."""
        # messages of two threads in one group would get mixed up; NCCL takes no CPU tensors
        group = self._group = self._group or dist.new_group(backend="gloo", timeout=MOST_TIME)
        processes = Processes.of_group(group)
        self._pending = BackgroundSave(
            target,
            lambda: finish_together(
                processes, target.parent, lambda: write_parts(copied, staged, group), appear
            ),
        )
        if self._stop or self.args.push_to_hub:
            self.wait_for_checkpoint()

    def wait_for_checkpoint(self) -> None:
        """Wait for the checkpoint that is written in the background, if there is one.

        Raises:
            GrowthError: it could not be written, and not because the disk is full.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            self._after_save(pending.target, pending.wait())

    def _after_save(self, target: Path, failure: str | None) -> None:
        """Say that a checkpoint was not saved, or push it to the hub."""
        if failure is None:
            if self.args.push_to_hub:
                self._push_from_checkpoint(str(target))
            return
        message = f"{target} was not saved ({failure}); {self._last_save()}"
        # a signal waits for the checkpoint of its step, not for an earlier one
        if self._stop and step_of(target) == self.state.global_step:
            name = Signals(self._stop).name
            raise GrowthError(f"{name}: {message}; to resume: {self.resume_hint}")
        if self.is_world_process_zero():
            warnings.warn(f"{message}; training continues", GrowthWarning, stacklevel=2)

    def _last_save(self) -> str:
        self.wait_for_checkpoint()
        last = last_checkpoint(Path(self.args.output_dir))
        return "there is no checkpoint" if last is None else f"the last good checkpoint is {last}"

    def _load_best_model(self) -> None:
        self.wait_for_checkpoint()
        super()._load_best_model()

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        """Trainer's, but the last checkpoint stays beside the best one.

        Trainer deletes it if it keeps one checkpoint. A run that is killed before it has saved its
        model would then train again from the best one, and a growth continues from the last.
        """
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(*args, **options)
        finally:
            self.args.save_total_limit = limit

    def _best_checkpoint(self, run: Path) -> Path | None:
        """The checkpoint with the best metric so far; this one if the metric is this step's."""
        step = self.state.best_global_step
        if not step:
            return None
        best = run / f"checkpoint-{step}"
        return best if step == self.state.global_step or best.exists() else None

    @contextlib.contextmanager
    def _writing_to(self, staging: Path) -> Iterator[None]:
        """While active, Trainer writes its checkpoint to a folder and leaves all others alone."""
        best_step, push = self.state.best_global_step, self.args.push_to_hub
        # With a best step, Trainer waits for all processes; one whose disk failed would block them.
        # With push_to_hub it would upload before the checkpoint is complete
        self._staging, self.state.best_global_step, self.args.push_to_hub = staging, None, False
        try:
            yield
        finally:
            self._staging, self.state.best_global_step = None, best_step
            self.args.push_to_hub = push

    def save_final_model(self, dtype: torch.dtype) -> None:
        """Save the model, its tokenizer and the log history to the output directory.

        Args:
            dtype: of the weights in the file. The model in memory gets this dtype too. Weights
                that are too large for float16 stay as they are, with a warning.

        Raises:
            GrowthError: the disk takes no more. The checkpoints are as they were.
        """
        self.wait_for_checkpoint()
        run = Path(self.args.output_dir)
        if largest_entry(self.model) <= torch.finfo(dtype).max:
            self.model.to(dtype)
        else:
            warnings.warn(
                f"a weight does not fit into {dtype}: the model is saved in {self.model.dtype}",
                GrowthWarning,
                stacklevel=2,
            )

        def write(staging: Path) -> None:
            self.save_model(str(staging / FINAL), _internal_call=True)
            if self.args.should_save:
                self.state.save_to_json(str(staging / FINAL / TRAINER_STATE_NAME))

        processes = Processes.of_accelerator(self.accelerator)
        staging, failure = begin_together(processes, run, write)
        if failure is None:
            failure = finish_together(
                processes, run, lambda: None, lambda: publish_into(staging / FINAL, run)
            )
        if failure is not None:
            raise GrowthError(
                f"the model was not saved ({failure}); {self._last_save()}; to resume: "
                f"{self.resume_hint}"
            )
