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
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from bench.paper.models import FAMILIES, Size
from bench.shared.harness import benchmark_parser, measure_all, options_of
from bench.shared.trainer_runs import by_depth, step_times
from growkern import InheritanceSchedule, TwoStageConfig, TwoStageTrainer
from growkern.train.model.flops import ModelCost
from growkern.train.model.sub_model import layer_stacks

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
    schedule = InheritanceSchedule(rate=ALPHA, decay="constant", temperature=TEMPERATURE)
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


def flops_share(model: Any, stages: TwoStageConfig, shape: tuple[int, int], steps: int) -> float:
    """FLOPs of a step of stage 1 over those of a full step, as a mean over the depths that ran."""
    cost, (batch, length) = ModelCost(model, layer_stacks(model)), shape
    layers = model.config.num_hidden_layers
    head = batch * (length - 1) * cost.head_row(train=True)
    depths = {stages.depth(step, layers) for step in range(1, steps)}
    some = [cost.train(batch, length, stages.part_of(depth)) + head for depth in depths]
    return statistics.mean(some) / (cost.train(batch, length) + head)


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of the table: one per comparison."""
    torch.manual_seed(0)
    student = gpt2(options.width, options.layers, options.vocab, options.length)
    teacher = gpt2(options.width // 2, options.layers, options.vocab, options.length)
    ids = torch.randint(options.vocab, (options.batch, options.length))
    stages = TwoStageConfig(max(1, options.layers // 4), stage1_steps=options.steps)
    times = step_times(contenders(teacher, stages), student, ids, ids, options.steps)

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
