"""Counts the tokens that each expert of a mixture gets in training."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from growkern.train.model import is_experts, unwrapped


class ExpertCounts:
    """Tokens of each expert since the last reset, without padding.

    Attributes:
        layers: for each mixture its block, and the tokens of its experts, (E,) int64.
    """

    def __init__(self) -> None:
        self.layers: list[tuple[nn.Module, Tensor]] = []
        self._hooks: list[Any] = []
        self._real_N: Tensor | None = None

    def watch(self, model: Any) -> None:
        """Count the tokens of a model's experts from now on, and no longer those of another one."""
        self.stop()
        model = unwrapped(model)
        for block in model.modules():
            for experts in filter(is_experts, block.children()):
                weight = next(p for p in experts.parameters(recurse=False) if p.ndim == 3)
                counts_E = torch.zeros(weight.shape[0], dtype=torch.int64, device=weight.device)
                self.layers.append((block, counts_E))
                count = partial(self._count, counts_E)
                self._hooks.append(experts.register_forward_pre_hook(count))
        if self.layers:
            self._hooks.append(model.register_forward_pre_hook(self._take_mask, with_kwargs=True))

    def _take_mask(self, _model: Any, _args: Any, inputs: dict[str, Any]) -> None:
        mask_BS = inputs.get("attention_mask")
        self._real_N = None if mask_BS is None or mask_BS.ndim != 2 else mask_BS.reshape(-1)

    def _count(self, counts_E: Tensor, experts: nn.Module, args: Any) -> None:
        # within a backward pass, activations are computed again
        if not experts.training or torch._C._current_graph_task_id() != -1:
            return
        # hidden states, then the numbers of the experts of each token; some mixtures pass others
        if len(args) < 2 or args[1] is None or args[1].is_floating_point():
            return
        chosen_NK = args[1]
        ones_NK = torch.ones_like(chosen_NK, dtype=counts_E.dtype)
        if self._real_N is not None:
            ones_NK = ones_NK * self._real_N.to(ones_NK)[:, None]
        counts_E.scatter_add_(0, chosen_NK.reshape(-1), ones_NK.reshape(-1))

    def reset(self) -> None:
        """Count from 0 again."""
        for _, counts_E in self.layers:
            counts_E.zero_()

    def stop(self) -> None:
        """Count no longer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.layers.clear()

    def drain(self, add_up: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """The load of the experts since the last call, over all processes; empty without mixtures.

        Returns:
            expert_entropy: of the shares of the tokens, a mean over layers. 1: all are equal.
            expert_largest_share: of the tokens of a layer, in the layer where it is largest.
        """
        if not self.layers:
            return {}
        sizes = [len(counts_E) for _, counts_E in self.layers]
        flat = torch.cat([counts_E.cpu() for _, counts_E in self.layers]).double()
        # layers that a stage leaves out got nothing
        layers = [x for x in add_up(flat).split(sizes) if x.any()]
        self.reset()
        if not layers:
            return {}
        shares = [counts_E / counts_E.sum() for counts_E in layers]
        entropies = [-torch.special.xlogy(x, x).sum().item() / math.log(len(x)) for x in shares]
        return {
            "expert_entropy": sum(entropies) / len(entropies),
            "expert_largest_share": max(x.max().item() for x in shares),
        }
