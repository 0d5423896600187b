"""Evaluations that a signal ends early, so that the run can save before it is killed."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from growkern.train.distributed.trainer import ShardedTrainer
from growkern.train.safety.signals import SignalWatch

BATCHES_BETWEEN_QUESTIONS = 8


class _EvaluationStopped(Exception):
    """A signal came during an evaluation.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class MissedEvaluation(TrainerCallback):
    """Makes up for an evaluation that a signal ended or prevented, when the run resumes.

    Args:
        trainer: evaluates.
    """

    def __init__(self, trainer: StoppableTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.trainer.is_evaluated_at(state.global_step):
            self.trainer.evaluate_if_missed()


class StoppableTrainer(ShardedTrainer):
    """A trainer whose evaluations between two steps end after a signal."""

    control: Any
    state: Any
    eval_dataset: Any
    _signals: SignalWatch
    # number of the signal that ends the run, or 0
    _stop: int = 0
    # batches of the evaluation that runs
    _evaluated: int = 0

    def end_evaluation_after_signal(self) -> None:
        """End an evaluation of the training loop if a signal waits. Call this for every batch."""
        if not self.is_in_train:
            return
        self._evaluated += 1
        # all processes have to leave at the same batch, and every question costs time
        if self.accelerator.num_processes > 1 and self._evaluated % BATCHES_BETWEEN_QUESTIONS:
            return
        pending = self.signal_of_any()
        if pending:
            raise _EvaluationStopped(pending)

    def signal_of_any(self) -> int:
        """Number of the signal that waits in one of the processes, or 0. All of them must ask."""
        pending = self._signals.pending
        if self.accelerator.num_processes > 1:
            mine = torch.tensor([pending], device=self.args.device)
            pending = int(self.accelerator.gather(mine).max())
        return pending

    def is_evaluated_at(self, step: int) -> bool:
        """Whether an undisturbed run has an evaluation after a step."""
        if self.args.eval_strategy != "steps" or step < max(1, self.args.eval_delay):
            return False
        return step % self.state.eval_steps == 0 or step == self.state.max_steps

    def evaluate_if_missed(self) -> None:
        """Evaluate the checkpoint that was loaded if the evaluation of its step has no numbers."""
        step = self.state.global_step
        lines = [line for line in self.state.log_history if line["step"] == step]
        several = isinstance(self.eval_dataset, dict)
        names = [f"eval_{name}" for name in self.eval_dataset] if several else ["eval"]
        found = {key for line in lines for key in line}
        if all(f"{name}_loss" in found for name in names):
            return
        if metrics := self._evaluate(None, None):
            self._determine_best_metric(metrics, None)

    def _evaluate(self, *args: Any, **options: Any) -> Any:
        """Trainer's. After a signal it gives no numbers; the run will save and end."""
        self._evaluated = 0
        try:
            return super()._evaluate(*args, **options)
        except _EvaluationStopped as stopped:
            self._stop, self.control.should_save = stopped.number, True
            return {}

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Trainer's; without numbers, whether to save."""
        return bool(self._stop) or super()._determine_best_metric(metrics, trial)
