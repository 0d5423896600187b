"""One training run of the study, and the trained sources that all runs of a model share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import growkern
from bench.shared.results import git_facts, machine
from bench.shared.symmetry_tables import END_RATE, LONG, WARMUP
from bench.symmetry.models import AKI, PADDED, Model, distances, grown
from bench.symmetry.text import facts, training_batches, validation_batches
from growkern.growth.optimizer.adamw import decay_groups
from growkern.whole import write_whole

# in the last third of its steps, the source's learning rate falls linearly to END_RATE: training
# continues at the rate at which it ended, so that a rise of the loss is due to growth
SOURCE_STEPS, SOURCE_RATE, SOURCE_WARMUP = 3000, 2e-3, 100
CLIP, WEIGHT_DECAY = 1.0, 0.01
EVALUATED = (25, 50, 100, 200, 400, 700, 1000, 1400, 2000, 3000, 4000)


@dataclass(frozen=True)
class Run:
    """The settings of one run. Two runs with the same settings give the same row.

    Attributes:
        model: its source and target.
        symmetry: "continued" trains the small model further. The others are those of `grown`.
        amplitude: of noise or routing, else 0.
        optimizer: "adamw", "growth" (GrowthAdamW with fresh moments), or with the source's moments
            "growth-moments" and "adamw-moments". "growth-clipped" is "growth" with gradients that
            are clipped by `growkern.growth_clip_norm_`, as the trainer does it; all others are
            clipped by their plain norm.
        rate: learning rate after the warm-up; it stays constant.
        seed: of the data after growth, and of the growth.
        steps: after growth. Runs that only choose a rate are evaluated at their end alone.
        clip: largest norm of the gradient.
        warmup: steps in which the learning rate rises.
    """

    model: Model
    symmetry: str
    amplitude: float
    optimizer: str
    rate: float
    seed: int
    steps: int = LONG
    clip: float = CLIP
    warmup: int = WARMUP

    @property
    def variant(self) -> str:
        """Symmetry and amplitude, for tables."""
        return f"{self.symmetry} {self.amplitude:g}" if self.amplitude else self.symmetry

    def settings(self) -> dict[str, Any]:
        """All settings as JSON."""
        return asdict(self) | {"model": self.model.name}


# ------------------------------------------------------------------ pieces


def loss_of(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of a batch, in nats."""
    return cross_entropy(model(input_ids=x).logits.flatten(0, 1).float(), labels.flatten())


@torch.no_grad()
def validation_loss(model: Any, masked: bool) -> float:
    """Mean loss per predicted byte, in nats."""
    total = count = 0.0
    for x, labels in validation_batches(masked):
        n = int((labels >= 0).sum())
        total, count = total + n * loss_of(model, x, labels).item(), count + n
    return total / count


def _train(
    model: Any, optimizer: Any, batches: Any, steps: int, rate_at: Any, clip: Any, after: Any
) -> None:
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step)
        loss_of(model, *next(batches)).backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        after(step)


def _clipping(optimizer: str, norm: float) -> Callable[[Any], Any]:
    if optimizer == "growth-clipped":
        return lambda model: growkern.growth_clip_norm_(model, norm)
    return lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), norm)


def _adamw(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(decay_groups(model, WEIGHT_DECAY), lr=0.0)


# ------------------------------------------------------------------ source


def trained_source(model: Model, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """The trained source of a model: `state`, `optimizer` and `loss`. It is trained once."""
    file = folder / f"{model.name.replace(' ', '-')}.pt"
    if not file.is_file():
        found = _train_source(model, say)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, lambda partial: torch.save(found, partial))
    return torch.load(file, weights_only=True)


def _train_source(model: Model, say: Callable[[str], None]) -> dict[str, Any]:
    small = model.untrained(seed=0).train()
    optimizer, start = _adamw(small), time.perf_counter()

    def rate_at(step: int) -> float:
        left = min(1.0, (SOURCE_STEPS - step) / (SOURCE_STEPS / 3))
        rate = END_RATE + (SOURCE_RATE - END_RATE) * left
        return rate * min(1.0, step / SOURCE_WARMUP)

    curve: dict[str, float] = {}

    def after(step: int) -> None:
        if step % 500 == 0:
            curve[str(step)] = validation_loss(small, model.is_masked)
            say(f"source {model.name}: step {step}, loss {curve[str(step)]:.4f}")

    batches = training_batches(0, model.is_masked)
    _train(small, optimizer, batches, SOURCE_STEPS, rate_at, _clipping("adamw", CLIP), after)
    return {
        "state": small.state_dict(),
        "optimizer": optimizer.state_dict(),
        "loss": curve[str(SOURCE_STEPS)],
        "curve": curve,
        "seconds": time.perf_counter() - start,
        "commit": git_facts()["commit"],
    }


# --------------------------------------------------------------------- run


def _started(run: Run, source: dict[str, Any]) -> tuple[Any, Any]:
    """The model to train and its optimizer."""
    small = run.model.untrained(seed=0)
    small.load_state_dict(source["state"])
    with_moments = run.optimizer.endswith("-moments")
    if run.symmetry == "continued":
        model, state = small.train(), source["optimizer"]
        optimizer: torch.optim.Optimizer = _adamw(model)
    else:
        model = grown(small, run.model, run.symmetry, run.amplitude, run.seed)
        plan = model.growth_plan
        state = growkern.grow_optimizer(source["optimizer"], plan) if with_moments else None
        if run.optimizer.startswith("growth"):
            optimizer = growkern.GrowthAdamW(decay_groups(model, WEIGHT_DECAY), plan, lr=0.0)
        else:
            optimizer = _adamw(model)
    if with_moments:
        optimizer.load_state_dict(state)
    return model, optimizer


def carried_out(run: Run, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Train one run and return its row: settings, losses, distances and the facts of the machine.

    Args:
        folder: of the trained sources.
        say: shows a line of progress.
    """
    source = trained_source(run.model, folder, say)
    model, optimizer = _started(run, source)
    masked, start = run.model.is_masked, time.perf_counter()
    losses = {"0": validation_loss(model, masked)}
    apart: dict[str, dict[str, float]] = {}
    probe = validation_batches(masked)[0][0]

    def look(step: int) -> None:
        if step != run.steps and (step not in EVALUATED or run.steps < LONG):
            return
        losses[str(step)] = validation_loss(model, masked)
        if run.symmetry != "continued" and not run.symmetry.startswith((AKI, PADDED)):
            apart[str(step)] = distances(model, run.model.times, probe)
        if not math.isfinite(losses[str(step)]):
            raise FloatingPointError(f"{run}: loss {losses[str(step)]} at step {step}")

    def rate_at(step: int) -> float:
        return run.rate * min(1.0, step / run.warmup)

    batches = training_batches(run.seed, masked)
    clip = _clipping(run.optimizer, run.clip)
    _train(model, optimizer, batches, run.steps, rate_at, clip, look)
    return {
        **run.settings(),
        "source_loss": source["loss"],
        "losses": losses,
        "apart": apart,
        "seconds": round(time.perf_counter() - start, 1),
        "text": facts(),
        "machine": machine(),
    }
