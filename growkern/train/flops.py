"""Counts the FLOPs of training steps from the modules that run in them.

Per token, with N the weights of the linear maps of a layer, A = heads * head_dim and S tokens:

    forward of a layer            2 N + 4 S A                                (1)
    forward and backward          3 * (1)                                    (2)

Frozen layers and teachers cost (1), trained layers cost (2). With H the width and V the vocabulary
size, the output projection costs 2 H V per row forward and 6 H V when trained. It counts only for
the rows that reach it.

A multiply-add counts as two operations. Causal attention counts as the full square. Activations,
norms and the recomputation of checkpointed layers are not counted.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D


class ModelCost:
    """The FLOPs of a language model's passes.

    One tiny forward pass shows how often each linear map is used per token: shared layers are used
    many times, unused maps never.

    Args:
        model: of transformers, with `dummy_inputs`.
        stacks: its stacks of layers, from `growkern.train.sub_model.find_stacks`.
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
        """FLOPs of one forward pass of all layers without the output projection. (1)

        Args:
            batch: rows.
            length: tokens per row.
        """
        return batch * length * (self._layer_flops(length) + self._outside_flops(length))

    def train(
        self, batch: int, length: int, depth: int | None = None, trained_layers: int | None = None
    ) -> float:
        """FLOPs of one forward and backward pass without the output projection. (1), (2)

        Args:
            batch: rows.
            length: tokens per row.
            depth: layers that run, from the bottom; None runs all.
            trained_layers: how many of these train, from the top. The others run forward only.
        """
        run = self._layer_flops(length, depth)
        frozen = 0.0
        if depth is not None and trained_layers is not None:
            frozen = self._layer_flops(length, depth - trained_layers)
        return batch * length * (3 * (run - frozen + self._outside_flops(length)) + frozen)

    def head_row(self, *, train: bool) -> float:
        """FLOPs of the output projection for one row."""
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
    """How many rows each linear map of the model gets per input token."""
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
