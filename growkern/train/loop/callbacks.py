"""The callbacks of a trainer that follow the training loop, and balance experts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback

from growkern.errors import GrowthError, warn
from growkern.train.distributed import create_optimizer_state
from growkern.train.loop.growing import GrowthInRun
from growkern.train.loop.meter import ExpertCounts, Meter
from growkern.train.loss import Batches
from growkern.train.model import inside_ddp, is_experts
from growkern.train.objectives import EpochCollator
from growkern.train.optimizer import bare
from growkern.train.safety import Saver, StepWatch
from growkern.train.sections import InheritanceSchedule
from growkern.train.topk_teacher import TopKCollator


class LoopCallback(TrainerCallback):
    """Tells the collaborators of events of the loop, and chooses what Trainer does after a step."""

    def __init__(
        self,
        batches: Batches,
        meter: Meter,
        growths: GrowthInRun,
        steps: StepWatch,
        saver: Saver,
        schedule: InheritanceSchedule | None = None,
    ) -> None:
        self.batches, self.meter, self.growths = batches, meter, growths
        self.steps, self.saver, self.schedule = steps, saver, schedule
        self._taught = 0  # steps up to the last one with a teacher

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give every parameter its optimizer state, and the schedule its growths.

        Batches of a cached teacher have its rows again, which a run before may have left out.
        """
        self.steps.start()
        shares = map(self.schedule.alpha_at, range(state.max_steps)) if self.schedule else ()
        self._taught = max((step + 1 for step, share in enumerate(shares) if share > 0), default=0)
        self._leave_out_teacher(state.global_step)
        self.meter.flops = state.total_flos
        if not any(module._compiled_call_impl for module in kwargs["model"].modules()):
            # hooks would cut compiled blocks into pieces
            self.meter.experts.watch(kwargs["model"])
        self.growths.rewarm(kwargs["lr_scheduler"], args.lr_scheduler_type)
        create_optimizer_state(bare(kwargs["optimizer"]))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the tokens of experts no longer."""
        self.meter.experts.stop()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell the collator which epoch begins."""
        collator = self.batches.source
        if isinstance(collator, EpochCollator):
            collator.set_epoch(int(state.epoch or 0))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the epoch as a whole one: Trainer has no length for some data sets."""
        if state.global_step < state.max_steps and not control.should_training_stop:
            state.epoch = float(math.ceil(state.epoch or 0))
            self.batches.done = 0
        self._count_passes(state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock; stop reading the cached teacher once alpha is 0 for good."""
        self.meter.start_step()
        self._leave_out_teacher(state.global_step)

    def _leave_out_teacher(self, step: int) -> None:
        # batches are read before their step begins: one whose alpha rises from 0 needs its rows
        if isinstance(self.batches.source, TopKCollator):
            self.batches.source.leave_out(step >= self._taught)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock. Save before a stop and before a growth, and when the clock says so."""
        self.meter.end_step()
        if self.steps.take_report():
            # all processes report an error at the same step, and none waits for another
            self.saver.wait(state.global_step)
        evaluates = args.eval_strategy == "steps" and state.global_step >= args.eval_delay
        self.growths.end_part(control, state.global_step, evaluates=evaluates)
        self.steps.choose_work(control, state, args)
        self._count_passes(state)

    def _count_passes(self, state: Any) -> None:
        """Count the passes through a stream by its steps."""
        if self.batches.stream is not None:
            state.epoch = state.global_step / state.max_steps


class ExpertBalancing(TrainerCallback):
    """Moves the biases with which routers such as DeepSeek-V3's choose their experts.

    After every optimizer step, the bias of an expert that got fewer tokens than the mean rises by a
    fixed amount, and that of the others falls. The bias chooses experts, but does not weigh them.

    Give it to a trainer: `TwoStageTrainer(..., callbacks=[ExpertBalancing()])`. In a loop of your
    own, call `watch` once, and `update` after each step of the optimizer. All processes must call
    it. Tokens count once, over all micro-batches and processes, without padding. The biases are
    buffers in float32 that are saved with the model, so a resumed run needs nothing else.

    Args:
        speed: how far a bias moves in a step.

    Raises:
        GrowthError: `speed` is not positive.

    Source: Wang et al. 2024, arXiv 2408.15664, with the sign of the error.
    """

    def __init__(self, speed: float = 1e-3) -> None:
        if not speed > 0:
            raise GrowthError(f"speed is {speed}: it must be positive")
        self.speed = speed
        self._counts = ExpertCounts()
        # of each router: the owner of its bias, the bias's name, and the tokens of each expert
        self._routers: list[tuple[nn.Module, str, Tensor]] = []

    def watch(self, model: Any) -> None:
        """Count the tokens of a model's experts from now on, and no longer those of another model.

        Args:
            model: whose routers have a bias that only chooses.

        Raises:
            GrowthError: it has no such router.
        """
        self.stop()
        self._counts.watch(model)
        for block, counts_E in self._counts.layers:
            self._add_router(block, counts_E)
        if not self._routers:
            self.stop()
            raise GrowthError(
                f"{type(inside_ddp(model)).__name__} has no router with a bias that only chooses "
                "experts: set config.output_router_logits=True, which balances by a loss"
            )

    def _add_router(self, block: nn.Module, counts_E: Tensor) -> None:
        for owner in block.modules():
            for name, bias in [*owner.named_buffers(recurse=False)]:
                if bias.shape == counts_E.shape and bias.is_floating_point():
                    # in bfloat16 the steps would be lost
                    setattr(owner, name, bias.to(torch.promote_types(bias.dtype, torch.float32)))
                    self._routers.append((owner, name, counts_E))

    @torch.no_grad()
    def update(self) -> None:
        """Move the biases by what was counted since the last call, over all processes."""
        for owner, name, counts_E in self._routers:
            if dist.is_initialized():
                dist.all_reduce(counts_E)
            below_E = torch.sign(counts_E.float().mean() - counts_E)
            getattr(owner, name).add_(below_E, alpha=self.speed)
        self._counts.reset()

    def stop(self) -> None:
        """Count no longer."""
        self._counts.stop()
        self._routers.clear()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Watch the model in training."""
        self.watch(kwargs["model"])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Update the biases, unless the step was not taken because it was not finite."""
        if any(p.grad is not None for p in kwargs["model"].parameters()):
            self.update()
            return
        self._counts.reset()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Watch the model no longer."""
        self.stop()


def warn_of_imbalance(model: Any, callbacks: Iterable[Any]) -> None:
    """Warn of a mixture whose experts nothing balances, though its class has a loss for that."""
    config = model.config.get_text_config()
    has_loss = hasattr(config, "router_aux_loss_coef")
    is_off = has_loss and getattr(config, "output_router_logits", True) is False
    balances = any(isinstance(callback, ExpertBalancing) for callback in callbacks)
    if is_off and not balances and any(map(is_experts, model.modules())):
        warn(
            "the experts train without a balance loss, so a few may get all tokens: set "
            "output_router_logits to true in its config.json, which `growkern grow` writes"
        )
