"""Measures the steps of `TwoStageTrainer` beside those of other trainers on the same model.

    python -m bench.speed.trainer

- "no teacher": the overhead over a plain `transformers.Trainer` (goal: at most 3 %). Every token is
  a label, so both compute as much.
- "teacher": against a `transformers.Trainer` that distils from whole logits (goal: faster).
- "stage 1": the mean step of stage 1 over the full step, against the same ratio of the FLOPs (goal:
  within 10 %).

All trainers run in one process and take turns after every step. A ratio is the median over the
ratios of neighbouring steps. For stage 1 it is the mean over depths of these medians.
"""

import argparse
import copy
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from bench.paper.models import FAMILIES, Size
from bench.shared.harness import benchmark_parser, measure_all, now, options_of
from growkern import InheritanceSchedule, TwoStageConfig, TwoStageTrainer
from growkern.train.model import ModelCost, TokenCounts, layer_stacks

ALPHA, TEMPERATURE = 0.5, 2.0
PLAIN, OURS = "transformers.Trainer", "TwoStageTrainer"
DISTILLING, BESIDE_TEACHER = "distillation on whole logits", "TwoStageTrainer, teacher"
STAGE1 = "TwoStageTrainer, stage 1"


class DistillingTrainer(transformers.Trainer):
    """The usual distillation: cross-entropy and KL from the logits of both models."""

    def __init__(self, *args: Any, teacher: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.teacher = teacher.to(self.args.device).eval().requires_grad_(False)

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Tensor:
        """(1 - ALPHA) times the cross-entropy, plus ALPHA times the KL from the teacher."""
        labels_R = inputs["labels"][:, 1:].flatten()
        student_RV = model(inputs["input_ids"]).logits[:, :-1].flatten(0, 1)
        with torch.no_grad():
            teacher_RV = self.teacher(inputs["input_ids"]).logits[:, :-1].flatten(0, 1)
        kl = F.kl_div(
            (student_RV / TEMPERATURE).log_softmax(-1),
            (teacher_RV / TEMPERATURE).log_softmax(-1),
            reduction="batchmean",
            log_target=True,
        )
        loss = F.cross_entropy(student_RV, labels_R)
        return (1 - ALPHA) * loss + ALPHA * TEMPERATURE**2 * kl


def gpt2(width: int, layers: int, vocab: int, length: int) -> Any:
    """A GPT-2 with random weights and without dropout, which the teacher would not share."""
    size = Size(layers, width, max(1, width // 64))
    config = FAMILIES["gpt2"].config(size, vocab, length, 0.0)
    return transformers.GPT2LMHeadModel(config)


def contenders(teacher: Any, stages: TwoStageConfig) -> dict[str, Callable[..., Any]]:
    """Functions that make each trainer, by name."""
    schedule = InheritanceSchedule(alpha=ALPHA, decay="constant", temperature=TEMPERATURE)
    return {
        PLAIN: transformers.Trainer,
        OURS: TwoStageTrainer,
        DISTILLING: partial(DistillingTrainer, teacher=teacher),
        BESIDE_TEACHER: partial(TwoStageTrainer, teacher=teacher, inheritance=schedule),
        STAGE1: partial(TwoStageTrainer, two_stage=stages),
    }


def mean_of_medians(name: str, values: list[float], stages: TwoStageConfig, layers: int) -> float:
    """The median over steps, or in stage 1 the mean over depths of their medians."""
    if name != STAGE1:
        return statistics.median(values)
    return statistics.mean(map(statistics.median, by_depth(values, stages, layers).values()))


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


class Clock(transformers.TrainerCallback):
    """Measures the steps of a trainer that gives the turn to another one after each step.

    Attributes:
        seconds: of each step but the first, without the turns of the others.
    """

    def __init__(self, turns: Turns, me: int) -> None:
        self.seconds: list[float] = []
        self._turns, self._me, self._begun = turns, me, 0.0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """End a step. The next one begins with the next turn."""
        if self._begun:
            self.seconds.append(now() - self._begun)
        self._turns.pass_on(self._me, again=True)
        self._turns.wait(self._me)
        self._begun = now()


def by_depth(values: Sequence[float], stages: Any, layers: int) -> dict[int, list[float]]:
    """The values of steps of stage 1, of which the first is that of the second step, by depth."""
    depths: dict[int, list[float]] = {}
    for step, value in enumerate(values, start=1):
        depths.setdefault(stages.depth(step, layers), []).append(value)
    return depths


def trained(make: Callable[..., Any], model: Any, ids: Tensor, steps: int, clock: Clock) -> Any:
    """Train a model for some steps, in which every token is a label.

    Args:
        ids: (B, S) int64, the batch of every step.
    """
    with tempfile.TemporaryDirectory() as directory:
        args = transformers.TrainingArguments(
            directory,
            max_steps=steps,
            per_device_train_batch_size=len(ids),
            learning_rate=1e-5,
            max_grad_norm=0.0,
            logging_first_step=True,
            logging_steps=10**6,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            train_sampling_strategy="sequential",
        )
        rows = [{"input_ids": row, "labels": row} for row in ids] * steps
        trainer = make(model, args, train_dataset=rows, callbacks=[clock])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return trainer


def step_times(
    makers: dict[str, Callable[..., Any]], model: Any, ids: Tensor, steps: int
) -> dict[str, list[float]]:
    """Train copies of a model with several trainers, which take turns after every step.

    Other load on the machine slows neighbouring steps alike, so their ratio means something.

    Args:
        ids: (B, S) int64, the batch of every step.
    """
    turns = Turns(len(makers))
    seconds: dict[str, list[float]] = {}
    errors: list[BaseException] = []

    def run(me: int, name: str) -> None:
        try:
            turns.wait(me)
            clock = Clock(turns, me)
            trained(makers[name], copy.deepcopy(model), ids, steps, clock)
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


def flops_share(model: Any, stages: TwoStageConfig, shape: tuple[int, int], steps: int) -> float:
    """FLOPs of a step of stage 1 over those of a full step, as a mean over the depths that ran."""
    cost, sizes = ModelCost(model, layer_stacks(model)), TokenCounts.of_rows(*shape)
    layers = model.config.num_hidden_layers
    head = (sizes.tokens - sizes.sequences) * cost.head_row(train=True)
    depths = {stages.depth(step, layers) for step in range(1, steps)}
    some = [cost.train(sizes, stages.part_of(depth)) + head for depth in depths]
    return statistics.mean(some) / (cost.train(sizes) + head)


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of the table: one per comparison."""
    torch.manual_seed(0)
    student = gpt2(options.width, options.layers, options.vocab, options.length)
    teacher = gpt2(options.width // 2, options.layers, options.vocab, options.length)
    ids = torch.randint(options.vocab, (options.batch, options.length))
    stages = TwoStageConfig(max(1, options.layers // 4), stage1_steps=options.steps)
    times = step_times(contenders(teacher, stages), student, ids, options.steps)

    def mean(name: str, values: list[float]) -> float:
        return mean_of_medians(name, values, stages, options.layers)

    size = f"{options.layers} x {options.width}, V {options.vocab}"
    share = flops_share(student, stages, (options.batch, options.length), options.steps)
    for case, ours, theirs in (
        ("no teacher", OURS, PLAIN),
        ("teacher", BESIDE_TEACHER, DISTILLING),
        ("stage 1", STAGE1, OURS),
    ):
        row = {
            "case": case,
            "model": size,
            "batch": f"{options.batch} x {options.length}",
            "beside": theirs,
            "steps": len(times[ours]),
            "ms": 1e3 * mean(ours, times[ours]),
            "ms beside": 1e3 * mean(theirs, times[theirs]),
            "ratio": mean(ours, [a / b for a, b in zip(times[ours], times[theirs], strict=True)]),
        }
        if case == "stage 1":
            row |= {"FLOP share": share, "ratio / FLOP share": row["ratio"] / share}
        yield row


def main() -> None:
    parser = benchmark_parser(__doc__, repeats=None)
    for name, default in (
        *(("width", 256), ("layers", 8), ("vocab", 32_000)),
        *(("batch", 8), ("length", 128), ("steps", 60)),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = options_of(parser, "tests/train/test_trainer.py")
    measure_all("trainer", measure(options))


if __name__ == "__main__":
    main()
