"""The signal that ends a run: all processes learn of it, and stop at the same place."""

from __future__ import annotations

import sys
from pathlib import Path
from signal import Signals
from typing import Any, NoReturn

import torch

from growkern.printing import say
from growkern.train.safety.checkpoints import last_checkpoint
from growkern.train.safety.signals import SignalWatch, interruption

BATCHES_BETWEEN_QUESTIONS = 8


class EvaluationStopped(Exception):
    """A signal came during an evaluation."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


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

    def of_any(self) -> int:
        """Number of the signal that waits in one of the processes, or 0. All of them must ask."""
        pending = self.signals.pending
        if self._accelerator.num_processes > 1:
            mine = torch.tensor([pending], device=self._accelerator.device)
            pending = int(self._accelerator.gather(mine).max())
        return pending

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
        several = self._accelerator.num_processes > 1
        if several and self.evaluated % BATCHES_BETWEEN_QUESTIONS:
            return
        pending = self.of_any()
        if pending:
            raise EvaluationStopped(pending)

    def end_run(self, step: int, run: Path, hint: str) -> NoReturn:
        """End the run. All processes do, and one says so.

        Args:
            hint: how to resume.

        Raises:
            KeyboardInterrupt, Terminated: always.
        """
        if self._accelerator.is_main_process:
            name, saved = Signals(self.number).name, last_checkpoint(run)
            say(f"{name} after step {step}: saved in {saved}; to resume: {hint}", sys.stderr)
        raise interruption(self.number)


def misses_evaluation(args: Any, state: Any, sets: Any) -> bool:
    """Whether a signal has ended or prevented the evaluation of the current step.

    Args:
        args: of the trainer.
        state: with the log history of the checkpoint that was loaded.
        sets: the data for evaluation, maybe several sets by their names.
    """
    step = state.global_step
    if args.eval_strategy != "steps" or step < max(1, args.eval_delay):
        return False
    if step % state.eval_steps and step != state.max_steps:
        return False
    names = [f"eval_{name}" for name in sets] if isinstance(sets, dict) else ["eval"]
    logged = {key for line in state.log_history if line["step"] == step for key in line}
    return not all(f"{name}_loss" in logged for name in names)
