"""Balances the experts of routers that choose by score plus bias, without a loss.

After every optimizer step, the bias of an expert that got fewer tokens than the mean rises by a
fixed amount, and that of the others falls (Wang et al. 2024). The bias chooses experts, but does
not weigh them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback

from growkern.errors import GrowthError
from growkern.train.loss.models import unwrapped
from growkern.train.model.flops import is_experts


class ExpertBalancing(TrainerCallback):
    """Moves the biases with which routers such as DeepSeek-V3's choose their experts.

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
        # of each router: the owner of its bias, the bias's name, and the tokens of each expert
        self._routers: list[tuple[nn.Module, str, Tensor]] = []
        self._hooks: list[Any] = []
        self._real_N: Tensor | None = None

    def watch(self, model: Any) -> None:
        """Count the tokens of a model's experts from now on, and no longer those of another model.

        Args:
            model: whose routers have a bias that only chooses.

        Raises:
            GrowthError: it has no such router.
        """
        self.stop()
        model = unwrapped(model)
        for block in model.modules():
            for experts in filter(is_experts, block.children()):
                self._add_router(block, experts)
        if not self._routers:
            raise GrowthError(
                f"{type(model).__name__} has no router with a bias that only chooses experts: "
                "set config.output_router_logits=True, which balances by a loss"
            )
        self._hooks.append(model.register_forward_pre_hook(self._take_mask, with_kwargs=True))

    def _add_router(self, block: nn.Module, experts: nn.Module) -> None:
        number = next(p.shape[0] for p in experts.parameters(recurse=False) if p.ndim == 3)
        for owner in block.modules():
            for name, bias in [*owner.named_buffers(recurse=False)]:
                if bias.shape == (number,) and bias.is_floating_point():
                    # in bfloat16 the steps would be lost
                    wide = torch.promote_types(bias.dtype, torch.float32)
                    setattr(owner, name, bias.to(wide))
                    counts_E = torch.zeros(number, device=bias.device)
                    self._routers.append((owner, name, counts_E))
                    count = partial(self._count, counts_E)
                    self._hooks.append(experts.register_forward_pre_hook(count))

    def _take_mask(self, _model: Any, _args: Any, inputs: dict[str, Any]) -> None:
        mask_BS = inputs.get("attention_mask")
        self._real_N = None if mask_BS is None or mask_BS.ndim != 2 else mask_BS.reshape(-1)

    def _count(self, counts_E: Tensor, experts: nn.Module, args: Any) -> None:
        # within a backward pass, activations are computed again
        if not experts.training or torch._C._current_graph_task_id() != -1:
            return
        chosen_NK = args[1]
        ones_NK = torch.ones_like(chosen_NK, dtype=counts_E.dtype)
        if self._real_N is not None:
            ones_NK = ones_NK * self._real_N.to(ones_NK)[:, None]
        counts_E.scatter_add_(0, chosen_NK.reshape(-1), ones_NK.reshape(-1))

    @torch.no_grad()
    def update(self) -> None:
        """Move the biases by what was counted since the last call, over all processes."""
        for owner, name, counts_E in self._routers:
            if dist.is_initialized():
                dist.all_reduce(counts_E)
            getattr(owner, name).add_(torch.sign(counts_E.mean() - counts_E), alpha=self.speed)
            counts_E.zero_()

    def stop(self) -> None:
        """Count no longer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._routers.clear()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Watch the model in training."""
        self.watch(kwargs["model"])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Update the biases, unless the step was not taken because it was not finite."""
        if any(p.grad is not None for p in kwargs["model"].parameters()):
            self.update()
            return
        for _, _, counts_E in self._routers:
            counts_E.zero_()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Watch the model no longer."""
        self.stop()
