"""Trains a model whose learning rate rises, stays and falls, with the ends of several runs.

A run of any length is a branch of one trunk, over whose last part the rate falls (WSD). So one
training yields the ends of runs of several lengths.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import growkern
from bench.paper.models import Size
from bench.paper.settings import Setting
from bench.shared.harness import now
from bench.shared.recorder import Recorder
from growkern.train.model import ModelCost, TokenCounts, layer_stacks

# the share of a run in which the rate falls; evaluations of a trunk
FALL, EVALUATIONS = 0.2, 8
BETAS, DECAY, NORM = (0.9, 0.95), 0.1, 1.0
Row = dict[str, Any]


@dataclass
class Text:
    """Rows of tokens on the device.

    Attributes:
        train, validation: (rows, length) int64.
        facts: the files, bytes and tokens.
    """

    train: Tensor
    validation: Tensor
    facts: Row


def head_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy, averaged over the labels."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def optimizer_of(model: Any, rate: float) -> torch.optim.Optimizer:
    """The optimizer that growkern's trainer takes: `GrowthAdamW` after growth."""
    groups, plan = growkern.decay_groups(model, DECAY), getattr(model, "growth_plan", None)
    if plan is None:
        return torch.optim.AdamW(groups, rate, betas=BETAS, fused=True)
    return growkern.GrowthAdamW(groups, plan, rate, betas=BETAS)


@dataclass
class Place:
    """What all trainings of a seed share."""

    recorder: Recorder
    setting: Setting
    seed: int
    text: Text
    losses: Callable[..., Tensor]
    backend: str
    order: Tensor

    def untrained(self, size: Size, layers: int | None = None) -> Any:
        """A model with random weights."""
        return self.setting.untrained(size, self.seed, layers).to(self.recorder.device)

    def grown(self, model: Any, **how: Any) -> Any:
        """The model, grown by growkern."""
        return growkern.grow(model, seed=self.seed, **how)

    def add(self, **row: Any) -> None:
        """Record a row, and show it in the log."""
        self.recorder.add(row)
        print(row, flush=True)


@dataclass
class Training:
    """A model in training.

    Attributes:
        backwards: whether it reads the text from its end. The source does, so that its target
            reads text that is new, as long as there is any.
    """

    place: Place
    name: str
    model: Any
    steps: int
    backwards: bool = False
    flops: float = 0.0
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.took(self.model)

    def took(self, model: Any) -> None:
        """Take a model, compile its blocks, and make an optimizer for it."""
        setting = self.place.setting
        self.model, self.optimizer = model, optimizer_of(model, setting.source_rate)
        cost, labels = ModelCost(model, layer_stacks(model)), setting.batch * (setting.length - 1)
        self.step_flops = cost.train(TokenCounts.of_rows(setting.batch, setting.length))
        self.step_flops += labels * cost.head_row(train=True)
        # after the FLOPs are counted, which takes a small forward pass
        for block in model.train().transformer.h:
            # with dynamic sizes the second width would have slower kernels
            block.compile(backend=self.place.backend, dynamic=False)

    def loss(self, ids: Tensor) -> Tensor:
        with torch.autocast(ids.device.type, dtype=torch.bfloat16):
            hidden = self.model.transformer(ids, use_cache=False).last_hidden_state
            return self.place.losses(hidden[:, :-1], self.model.lm_head.weight, ids[:, 1:])

    def step(self, number: int, share: float = 1.0) -> None:
        """One step at a share of the rate that this step of a trunk has."""
        place, setting = self.place, self.place.setting
        first = number * setting.batch
        at = torch.arange(first, first + setting.batch, device=place.order.device)
        at = -1 - at if self.backwards else at
        rise = min(1.0, (number + 1) / max(1, round(setting.warmup * self.steps)))
        for group in self.optimizer.param_groups:
            group["lr"] = setting.source_rate * rise * share
        self.loss(place.text.train[place.order[at % len(place.order)]]).backward()
        if isinstance(self.optimizer, growkern.GrowthAdamW):
            growkern.growth_clip_norm_(self.model, NORM)
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.flops += self.step_flops

    def validate(self) -> float:
        """The loss on the held-out text."""
        rows, size = self.place.text.validation, self.place.setting.batch
        # with gradients, though nobody needs them: so the compiled blocks are those of training
        parts = [self.loss(part).detach() for part in rows.split(size) if len(part) == size]
        return float(torch.stack(parts).mean())

    def keep(self, step: int, *, is_end: bool) -> None:
        """Evaluate, and record the loss."""
        row = {"system": self.name, "seed": self.place.seed, "steps": step, "flops": self.flops}
        seconds = round(now() - self.place.recorder.started, 1)
        row |= {"loss": self.validate(), "ends a run": is_end, "seconds": seconds}
        self.place.add(**row)
        self.rows.append(row)

    def run(self, ends: Sequence[float] = (1.0,), at: Sequence[tuple[int, Any]] = ()) -> float:
        """Train, with an end at each of these shares of the steps.

        Args:
            ends: ascending shares of the steps.
            at: steps of the trunk, each with the sizes that the model grows to before it.
        """
        start, done, grows = now(), 0, dict(at)
        self.keep(0, is_end=False)
        for length in (round(end * self.steps) for end in ends):
            fall = length - round(FALL * length)
            for step in range(done, fall):
                if step in grows:
                    self.grow(**grows[step])
                if step and step % (self.steps // EVALUATIONS) == 0:
                    self.keep(step, is_end=False)
                self.step(step)
            done = fall
            self.branch(fall, length, is_last=length == self.steps)
        return now() - start

    def branch(self, fall: int, length: int, *, is_last: bool) -> None:
        """The end of a run, in which the rate falls. Then all is as it was before."""
        if not is_last:
            parts = (self.model.state_dict(), self.optimizer.state_dict())
            before, flops = copy.deepcopy(parts), self.flops
        for step in range(fall, length):
            self.step(step, (length - step) / (length - fall))
        self.keep(length, is_end=True)
        if not is_last:
            self.model.load_state_dict(before[0])
            self.optimizer.load_state_dict(before[1])
            self.flops = flops

    def grow(self, **sizes: Any) -> None:
        """Grow the model inside its run, together with the optimizer's moments."""
        moments = self.optimizer.state_dict()
        self.took(self.place.grown(self.model, **sizes))
        growkern.grow_optimizer_into(self.model, self.optimizer, moments)
