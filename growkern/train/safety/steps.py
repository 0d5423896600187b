"""Looks at every step before the optimizer takes it: a step that is not finite is never taken."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import TrainingArguments

from growkern.arguments import MOST_SEED, seed_of_process
from growkern.errors import GrowthError
from growkern.train.safety.saving import Saver, Stops

OnNonfinite: TypeAlias = Literal["stop", "skip"]
# with broken weights every step would be skipped, without end
MOST_SKIPPED_IN_A_ROW = 100


@dataclass(frozen=True)
class StepReport:
    """The facts about a step that all processes share before the optimizer takes it."""

    ranks: tuple[int, ...]
    norm: bool
    stop: int
    save: bool
    written: bool


class StepWatch:
    """Looks at the steps of a run. `report` is that of the last step, until it was acted on.

    For `on_nonfinite` and `save_minutes` see `TwoStageTrainer`.
    """

    def __init__(
        self,
        on_nonfinite: OnNonfinite,
        save_minutes: float,
        accelerator: Any,
        stops: Stops,
        saver: Saver,
    ) -> None:
        self._on_nonfinite, self._save_minutes = on_nonfinite, save_minutes
        self._accelerator, self._stops, self._saver = accelerator, stops, saver
        self.start()

    def start(self) -> None:
        """Begin a run, or go on with it when its model has grown."""
        self._stops.number, self._saver.saved_at = 0, time.monotonic()
        self.report: StepReport | None = None
        self._loss: Tensor | float = 0.0
        self._in_a_row, self._is_due = 0, False

    def add(self, loss: Tensor) -> None:
        """Add the loss of a batch of the step."""
        self._loss = self._loss + loss

    def is_taken(self, norm: Any, step: int) -> bool:
        """Whether the optimizer takes a step; all processes must ask, once per step."""
        self.report = report = self._agree(norm)
        self._loss = 0.0
        if report.norm and not report.ranks:
            self._in_a_row = 0
            return True
        self._in_a_row += 1
        too_many = self._in_a_row > MOST_SKIPPED_IN_A_ROW
        if self._on_nonfinite == "stop" or too_many:
            fault = f"the gradient norm is {float(norm)}"
            if report.ranks:
                fault = f"the loss is NaN or infinite on rank {', '.join(map(str, report.ranks))}"
            fix = 'lower learning_rate, or set on_nonfinite = "skip"'
            if too_many:
                fault += f" and {MOST_SKIPPED_IN_A_ROW} steps before it were skipped"
                fix = "lower learning_rate"
            raise GrowthError(f"step {step}: {fault}; {self._saver.last(step - 1)}; {fix}")
        return False

    def take_report(self) -> bool:
        """Act on the report of the step, if there is one: whether a checkpoint was written."""
        report, self.report = self.report, None
        self._is_due = report is not None and report.save
        if report is not None:
            self._stops.number = report.stop
        return report is not None and report.written

    def choose_work(self, control: Any, state: Any, args: TrainingArguments) -> None:
        """Let Trainer save before a stop, when the clock says so, and log the end of a run."""
        if self._stops.number:
            control.should_save = True
            # an evaluation may take longer than the system waits before it kills
            control.should_evaluate = False
        elif self._is_due:
            control.should_save = True
        if state.global_step >= state.max_steps and args.logging_strategy != "no":
            # the loss of the last steps would be in no line
            control.should_log = True

    def _agree(self, norm: Any) -> StepReport:
        """Exchange the state of the step between the processes, and read it back once."""
        accelerator, minutes = self._accelerator, self._save_minutes
        # a gradient scaler skips the steps that overflow in float16 by itself
        checked = norm if accelerator.scaler is None else 0.0
        both = [torch.as_tensor(x, device=accelerator.device) for x in (self._loss, checked)]
        due = minutes > 0 and time.monotonic() - self._saver.saved_at > 60 * minutes
        mine = [self._stops.signals.pending, due, self._saver.is_written]
        values = torch.stack(both)
        if accelerator.num_processes == 1:
            rows = [values.tolist() + mine]
        else:
            rows = accelerator.gather(torch.cat([values, values.new_tensor(mine)])[None]).tolist()
        return StepReport(
            ranks=tuple(rank for rank, row in enumerate(rows) if not math.isfinite(row[0])),
            norm=all(math.isfinite(row[1]) for row in rows),
            stop=int(max(row[2] for row in rows)),
            save=any(row[3] for row in rows),
            written=all(row[4] for row in rows),
        )


def clip_on_cpu(model: nn.Module, most: float, accelerator: Any) -> Tensor | None:
    """The norm of the gradients, which are clipped to `most`; None where accelerate has to do it.

    The bits are those of `accelerator.clip_grad_norm_`. That multiplies by 1 if there is nothing to
    clip, and takes twice the time.
    """
    is_alone = accelerator.distributed_type == DistributedType.NO and accelerator.scaler is None
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not is_alone or not all(type(x) is Tensor and x.is_cpu for x in gradients):
        return None
    norm = nn.utils.get_total_norm(gradients)
    # the sum is that of PyTorch's factor. NaN is not below
    if not norm + 1e-6 <= most:
        nn.utils.clip_grads_with_norm_(model.parameters(), most, norm)
    return norm


@contextlib.contextmanager
def own_random_numbers(args: TrainingArguments) -> Iterator[None]:
    """While active, each of several processes draws other dropout masks.

    Afterwards the generator of the CPU is the same in all processes again: data sets and samplers
    may draw the order of the rows from it.
    """
    if args.world_size == 1:
        yield
        return
    shared = int(torch.randint(MOST_SEED, ()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of_process(shared, args.process_index))
        yield
