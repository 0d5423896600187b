"""FLOPs of a training step, counted from the modules that run.

Per token, with N the weights of the linear maps of a layer, A = heads * head_dim and S tokens:

    forward of a layer            2 N + 4 S A                                (1)
    forward and backward          3 * (1)                                    (2)

A frozen prefix and a teacher cost (1), updated layers (2). The output projection costs 2 H V per
row forward and 6 H V trained, for the rows that reach it only. A multiply-add is two operations;
causal attention counts the full square, activations and norms and recomputation count nothing.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D


class ModelCost:
    """Counts what a call of a language model costs; built once, from one tiny forward pass.

    The pass tells how often each linear map is used per token (shared layers: many times; a map
    that is not used: never).
    """

    def __init__(self, model: Any, stacks: Sequence[nn.ModuleList]) -> None:
        head = model.get_output_embeddings()
        self._row = 2 * head.weight.numel()
        uses = _uses_per_token(model)
        uses.pop(head, None)
        total = _linear_flops(model, uses)
        self._layers = [[_linear_flops(layer, uses) for layer in stack] for stack in stacks]
        self._outside = total - sum(map(sum, self._layers))
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self._attention = 4 * heads * head_dim
        # blocks shared between depths are in no stack, but attend once per depth
        self._outside_attention = 0 if stacks else self._attention * config.num_hidden_layers

    def forward(self, batch: int, length: int) -> float:
        """One forward pass of all layers, output projection excluded. (1)"""
        return batch * length * (self._layer_flops(length) + self._outside_flops(length))

    def train(
        self, batch: int, length: int, depth: int | None = None, trained_layers: int | None = None
    ) -> float:
        """Forward and backward of the sub-model of `depth`, or of all, output projection excluded.

        Layers below the top `trained_layers` run forward only. (1), (2)
        """
        run = self._layer_flops(length, depth)
        frozen = 0.0
        if depth is not None and trained_layers is not None:
            frozen = self._layer_flops(length, depth - trained_layers)
        return batch * length * (3 * (run - frozen + self._outside_flops(length)) + frozen)

    def head_row(self, *, train: bool) -> float:
        """The output projection of one row."""
        return self._row * (3 if train else 1)

    def _layer_flops(self, length: int, depth: int | None = None) -> float:
        shown = [layer for stack in self._layers for layer in stack[:depth]]
        return sum(shown) + len(shown) * self._attention * length

    def _outside_flops(self, length: int) -> float:
        return self._outside + self._outside_attention * length


def _linear_flops(module: nn.Module, uses: dict[nn.Module, float]) -> float:
    return sum(2 * uses.get(linear, 0) * linear.weight.numel() for linear in _linears(module))


def _linears(module: nn.Module) -> list[Any]:
    return [m for m in module.modules() if isinstance(m, nn.Linear | Conv1D)]


@torch.no_grad()
def _uses_per_token(model: Any) -> dict[nn.Module, float]:
    """Rows that each linear map of the model gets per input token."""
    rows: Counter[nn.Module] = Counter()

    def count(module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        rows[module] += math.prod(output.shape[:-1])

    hooks = [linear.register_forward_hook(count) for linear in _linears(model)]
    inputs = {key: value.to(model.device) for key, value in model.dummy_inputs.items()}
    training = model.training
    model.eval()
    try:
        model(**inputs)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    tokens = inputs[model.main_input_name].numel()
    return {module: count / tokens for module, count in rows.items()}
