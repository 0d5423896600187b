"""How well grown moments match those that the grown model would have itself.

Adam averages gradients and their squares. `growkern.grow_optimizer` computes both from the source's
(`growkern.growth.optimizer.moments`). Here they are compared with averages over the same batches,
of a source and of the models that grow from it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import cosine_similarity

from bench.symmetry.models import Model, grown
from bench.symmetry.runs import loss_of, trained_source
from bench.symmetry.text import training_batches
from growkern.growth.optimizer.moments import grow_moment

BATCHES, SEED = 30, 5
VARIANTS = (("none", 0.0), ("noise", 0.5), ("split", 0.0), *(("routing", a) for a in (1.0, 2.0)))
Averages = dict[str, dict[str, Tensor]]


def averages(model: Any, masked: bool) -> Averages:
    """Means over batches of the gradients and of their squares, by the names of Adam's state."""
    found: Averages = {"exp_avg": {}, "exp_avg_sq": {}}
    batches = training_batches(SEED, masked)
    for _ in range(BATCHES):
        model.zero_grad()
        loss_of(model, *next(batches)).backward()
        for name, p in model.named_parameters():
            for power, means in enumerate(found.values(), start=1):
                means[name] = means.get(name, 0) + p.grad**power / BATCHES
    return found


def compare(model: Model, folder: Path, say: Callable[[str], None]) -> str:
    """The table of one model in markdown: medians over its tensors.

    Args:
        model: source and target.
        folder: of the trained sources.
        say: shows a line of progress.
    """
    small = model.untrained(seed=0)
    small.load_state_dict(trained_source(model, folder, say)["state"])
    own = averages(small.train(), model.is_masked)
    lines = [
        f"{model.name}, medians (and largest) over the tensors",
        "",
        "| symmetry | squares, the model's own / grown | gradients, cosine (and smallest) |",
        "|---|---|---|",
    ]
    for symmetry, amplitude in VARIANTS:
        ratios, cosines = _compare(small, own, model, symmetry, amplitude)
        lines.append(
            f"| {symmetry} {amplitude:g} | {statistics.median(ratios):.2f} ({max(ratios):.2f}) | "
            f"{statistics.median(cosines):.2f} ({min(cosines):.2f}) |"
        )
    return "\n".join([*lines, ""])


def _compare(
    small: Any, own: Averages, model: Model, symmetry: str, amplitude: float
) -> tuple[list[float], list[float]]:
    """Per tensor: the sum of squares over that of the grown moment, and a cosine of the means."""
    large = grown(small, model, symmetry, amplitude, seed=3)
    found, plan = averages(large, model.is_masked), large.growth_plan
    ratios, cosines = [], []
    for task in plan.tasks:
        if task.name not in found["exp_avg"]:
            continue
        mean, square = (
            grow_moment(plan, task, lambda name, _, key=key: own[key][name], key=key)
            for key in found
        )
        ratios.append((found["exp_avg_sq"][task.name].sum() / square.sum()).item())
        means = (found["exp_avg"][task.name].flatten(), mean.flatten())
        cosines.append(cosine_similarity(*means, dim=0).item())
    return ratios, cosines
