"""Runs of Hugging Face trainers on random tokens, with the time of every step."""

import copy
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from bench.shared.harness import now


class RandomRows(torch.utils.data.Dataset):
    """The rows of one batch, again and again."""

    def __init__(self, ids: Tensor, labels: Tensor, count: int) -> None:
        self.ids, self.labels, self.count = ids.cpu(), labels.cpu(), count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        at = i % len(self.ids)
        return {"input_ids": self.ids[at], "labels": self.labels[at]}


class Clock(transformers.TrainerCallback):
    """Notes when each step ended, after the device has finished its work."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(now())

    @property
    def seconds(self) -> list[float]:
        """The time of each step but the first."""
        return [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]


class Turns:
    """Lets several threads take turns. One of them runs at a time."""

    def __init__(self, count: int) -> None:
        self._waiting, self._change = list(range(count)), threading.Condition()

    def wait(self, me: int) -> None:
        """Wait until it is the turn of this thread."""
        with self._change:
            self._change.wait_for(lambda: self._waiting[0] == me)

    def pass_on(self, me: int, *, again: bool) -> None:
        """Give the turn to the next thread.

        Args:
            again: whether this thread takes part in the next round.
        """
        with self._change:
            self._waiting.remove(me)
            self._waiting += [me] if again else []
            self._change.notify_all()


class ClockInTurns(Clock):
    """Measures the steps of a trainer that gives the turn to another one after each step."""

    def __init__(self, turns: Turns, me: int) -> None:
        super().__init__()
        self._turns, self._me, self._taken = turns, me, []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """End a step. The next one begins with the next turn."""
        end = now()
        if self.ends:
            self._taken.append(end - self.ends[-1])
        self._turns.pass_on(self._me, again=True)
        self._turns.wait(self._me)
        self.ends.append(now())

    @property
    def seconds(self) -> list[float]:
        """The time of each step but the first, without the turns of the others."""
        return self._taken


def by_depth(values: Sequence[float], stages: Any, layers: int) -> dict[int, list[float]]:
    """The values of steps of stage 1, of which the first is that of the second step, by depth."""
    depths: dict[int, list[float]] = {}
    for step, value in enumerate(values, start=1):
        depths.setdefault(stages.depth(step, layers), []).append(value)
    return depths


def trained(
    make: Callable[..., Any],
    model: Any,
    ids: Tensor,
    labels: Tensor,
    steps: int,
    clock: Clock | None = None,
    **options: Any,
) -> tuple[Any, Clock]:
    """Train a model for some steps.

    Args:
        ids, labels: (B, S) int64, the batch of every step.
    """
    clock = clock or Clock()
    with tempfile.TemporaryDirectory() as directory:
        args = transformers.TrainingArguments(
            directory,
            max_steps=steps,
            per_device_train_batch_size=len(labels),
            learning_rate=1e-5,
            max_grad_norm=0.0,
            logging_first_step=True,
            logging_steps=10**6,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            train_sampling_strategy="sequential",
            **options,
        )
        data = RandomRows(ids, labels, steps * len(labels))
        trainer = make(model, args, train_dataset=data, callbacks=[clock])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return trainer, clock


def step_times(
    makers: dict[str, Callable[..., Any]], model: Any, ids: Tensor, labels: Tensor, steps: int
) -> dict[str, list[float]]:
    """Train copies of a model with several trainers, which take turns after every step.

    Other load on the machine slows neighbouring steps alike, so their ratio means something.

    Args:
        ids, labels: (B, S) int64, the batch of every step.
    """
    turns = Turns(len(makers))
    seconds: dict[str, list[float]] = {}
    errors: list[BaseException] = []

    def run(me: int, name: str) -> None:
        try:
            turns.wait(me)
            own = copy.deepcopy(model)
            _, clock = trained(makers[name], own, ids, labels, steps, ClockInTurns(turns, me))
            seconds[name] = clock.seconds
        except BaseException as error:
            errors.append(error)
        finally:
            turns.pass_on(me, again=False)

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(makers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return {name: seconds[name] for name in makers}
