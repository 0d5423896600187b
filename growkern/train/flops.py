"""Counts the FLOPs of training steps from the modules that run in them.

Per token, with N the weights of the linear maps of a layer, A = heads * head_dim and S tokens:

    forward of a layer            2 N + 4 S A                                (1)
    forward and backward          3 * (1)                                    (2)

Frozen layers and teachers cost (1), trained layers cost (2). Maps that read the input of the lowest
trained layer directly have no gradient of their input to compute, so they cost 2 * (1). With H the
width and V the vocabulary size, the output projection costs 2 H V per row forward and 6 H V when
trained. It counts only for the rows that reach it.

A multiply-add counts as two operations. Causal attention counts as the full square. Sequences that
are packed into one row count as one long sequence, unless the attention keeps them apart
(FlashAttention). A decoder layer beside an encoder attends twice; both are taken to be equally
long. Activations, norms, and the recomputation of checkpointed layers and of FlashAttention's
backward pass are not counted.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from growkern.train.head import probing
from growkern.train.sub_model import Part


class ModelCost:
    """The FLOPs of a language model's passes.

    One tiny forward pass shows how often each linear map is used per token: shared layers are used
    many times, unused maps never.

    Args:
        model: of transformers, with `dummy_inputs`.
        stacks: its stacks of layers, from `growkern.train.sub_model.find_stacks`.
        attention: implementation, as transformers calls it; None takes the one of the model.
    """

    def __init__(
        self, model: Any, stacks: Sequence[nn.ModuleList], attention: str | None = None
    ) -> None:
        head = model.get_output_embeddings()
        self._row = 2 * head.weight.numel()
        uses = _uses_per_token(model, stacks)
        uses.rows.pop(head, None)
        self._layers = [[_linear_flops(layer, uses.rows) for layer in stack] for stack in stacks]
        first = {layer: uses.at_input.get(layer, {}) for stack in stacks for layer in stack}
        self._at_input = [
            [_linear_flops(layer, first[layer]) for layer in stack] for stack in stacks
        ]
        self._attentions = [[1 + (layer in uses.crosses) for layer in stack] for stack in stacks]
        outside = _linear_flops(model, uses.rows) - sum(map(sum, self._layers))
        self._before = _linear_flops(model, uses.before) if stacks else 0.0
        self._after = outside - self._before
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self._attention = 4 * heads * head_dim
        # blocks shared between depths are in no stack, but attend once per depth
        self._outside_attentions = 0 if stacks else config.num_hidden_layers
        attention = attention or getattr(config, "_attn_implementation", None) or ""
        self._keeps_apart = "flash" in attention

    def forward(self, batch: int, length: int, pairs: int | None = None) -> float:
        """FLOPs of one forward pass of all layers without the output projection. (1)

        Args:
            batch: rows.
            length: tokens per row.
            pairs: pairs of tokens of the same sequence, if several are packed into a row; else
                None.
        """
        tokens, pairs = batch * length, self._pairs(batch, length, pairs)
        outside = tokens * (self._before + self._after) + self._outside_attentions * (
            pairs * self._attention
        )
        return self._layer_flops(tokens, pairs) + outside

    def train(
        self,
        batch: int,
        length: int,
        part: Part | None = None,
        *,
        pairs: int | None = None,
    ) -> float:
        """FLOPs of one forward and backward pass without the output projection. (1), (2)

        Args:
            batch: rows.
            length: tokens per row.
            part: layers that run; the lower ones of these run forward only. None trains all.
            pairs: as in `forward`.
        """
        if part is None:
            return 3 * self.forward(batch, length, pairs)
        tokens, pairs = batch * length, self._pairs(batch, length, pairs)
        below = max(0, part.depth - part.trained)
        frozen = self._layer_flops(tokens, pairs, below)
        trained = self._layer_flops(tokens, pairs, part.depth) - frozen
        if not part.input_is_frozen:
            return frozen + 3 * (trained + tokens * (self._before + self._after))
        lowest = [max(0, min(part.depth, len(stack)) - part.trained) for stack in self._at_input]
        saved = sum(stack[i] for stack, i in zip(self._at_input, lowest, strict=True))
        return frozen + 3 * trained + tokens * (self._before + 3 * self._after - saved)

    def head_row(self, *, train: bool) -> float:
        """FLOPs of the output projection for one row."""
        return self._row * (3 if train else 1)

    def _pairs(self, batch: int, length: int, pairs: int | None) -> int:
        return batch * length**2 if pairs is None or not self._keeps_apart else pairs

    def _layer_flops(self, tokens: int, pairs: int, depth: int | None = None) -> float:
        linear = sum(sum(stack[:depth]) for stack in self._layers)
        attentions = sum(sum(stack[:depth]) for stack in self._attentions)
        return tokens * linear + attentions * pairs * self._attention


class _Uses(NamedTuple):
    """How many rows each linear map of a model gets per input token."""

    rows: dict[nn.Module, float]  # in all
    before: dict[nn.Module, float]  # of the maps that run before the first layer
    at_input: dict[nn.Module, dict[nn.Module, float]]  # by layer: maps that read its input directly
    crosses: set[nn.Module]  # layers that attend to the output of an encoder too


def _linear_flops(module: nn.Module, uses: dict[nn.Module, float]) -> float:
    return sum(2 * uses.get(linear, 0) * linear.weight.numel() for linear in _linears(module))


def _linears(module: nn.Module) -> list[Any]:
    return [m for m in module.modules() if isinstance(m, nn.Linear | Conv1D)]


def _uses_per_token(model: Any, stacks: Sequence[nn.ModuleList]) -> _Uses:
    rows: Counter[nn.Module] = Counter()
    before: Counter[nn.Module] = Counter()
    at_input: dict[nn.Module, Counter[nn.Module]] = {}
    entered: list[tuple[nn.Module, Tensor]] = []
    beside: list[Any] = []  # what the current layer gets besides its input
    crosses: set[nn.Module] = set()

    def enter(layer: nn.Module, args: Any, kwargs: Any) -> None:
        entered.append((layer, args[0] if args else kwargs["hidden_states"]))
        beside[:] = [x for x in (*args, *kwargs.values()) if x is not entered[-1][1]]

    def count(linear: nn.Module, args: Any, output: Tensor) -> None:
        uses = math.prod(output.shape[:-1])
        rows[linear] += uses
        if not entered:
            before[linear] += uses
        elif args[0] is entered[-1][1]:
            at_input.setdefault(entered[-1][0], Counter())[linear] += uses
        elif any(args[0] is x for x in beside):
            # the keys and values of an attention over the output of the encoder
            crosses.add(entered[-1][0])

    hooks = [linear.register_forward_hook(count) for linear in _linears(model)]
    hooks += [
        layer.register_forward_pre_hook(enter, with_kwargs=True)
        for stack in stacks
        for layer in stack
    ]
    inputs = {key: value.to(model.device) for key, value in model.dummy_inputs.items()}
    try:
        with probing(model):
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    tokens = inputs[model.main_input_name].numel()

    def per_token(counts: Counter[nn.Module]) -> dict[nn.Module, float]:
        return {module: count / tokens for module, count in counts.items()}

    first = {layer: per_token(counts) for layer, counts in at_input.items()}
    return _Uses(per_token(rows), per_token(before), first, crosses)
