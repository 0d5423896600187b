"""Counts the FLOPs of training steps from the modules that run in them.

Per token, with N the weights of the linear maps of a layer, A = heads * head_dim and S tokens:

    forward of a layer            2 N + 4 S A                                (1)
    forward and backward          3 * (1)                                    (2)

Frozen layers and teachers cost (1), trained layers cost (2). Maps that read the input of the lowest
trained layer directly have no gradient of their input to compute, so they cost 2 * (1). With H the
width and V the vocabulary size, the output projection costs 2 H V per row forward and 6 H V when
trained. It counts only for the rows that reach it.

A layer with a gated delta net has a state of D numbers, key dimension x value dimension in every
value head, and S does not matter to it. The recurrence S' = S (a (I - b k k^T)) + b v k^T and its
output S' q count as four products with the state, 8 D per token forward, as Megatron-LM and MaxText
count them. Kernels that compute in chunks multiply more. Its convolution adds 2 per weight.

Padding is not counted: in training, S is the number of real tokens of a row. The count then does
not depend on the rows that share a batch, and so not on the number of processes.

A multiply-add counts as two operations. Causal attention and attention in windows count as the full
square. DeBERTa's products with positions and the choice of tokens in DeepSeek-V3.2 do not count.
Sequences that are packed into one row count as one long sequence, unless the attention keeps them
apart (FlashAttention). A decoder layer beside an encoder attends twice, and its keys and values for
the second time are computed from the encoder's tokens. Maps that run once per sequence (BERT's
pooler) count once per sequence. Activations, norms, and the recomputation of checkpointed layers
and of FlashAttention's backward pass are not counted.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D

from growkern.families import load_family, supported_families
from growkern.train.model.language_model import probe_inputs, probing
from growkern.train.model.sub_model import ModelPart


class ModelCost:
    """The FLOPs of a language model's passes.

    One tiny forward pass shows how often each linear map is used per token: shared layers are used
    many times, unused maps never.

    Args:
        stacks: its stacks of layers, from `growkern.train.model.sub_model.find_stacks`.
        attention: implementation, as transformers calls it; None takes the one of the model.
    """

    def __init__(
        self, model: Any, stacks: Sequence[nn.ModuleList], attention: str | None = None
    ) -> None:
        head = model.get_output_embeddings()
        self._row = 0 if head is None else 2 * head.weight.numel()
        uses = _uses_per_token(model, stacks)
        uses.rows.pop(head, None)
        linear = [[_linear_flops(layer, uses.rows) for layer in stack] for stack in stacks]
        self._of_encoder = [
            [_linear_flops(layer, uses.of_encoder) for layer in stack] for stack in stacks
        ]
        self._per_sequence = _linear_flops(model, uses.per_sequence)
        first = {layer: uses.at_input.get(layer, {}) for stack in stacks for layer in stack}
        self._at_input = [
            [_linear_flops(layer, first[layer]) for layer in stack] for stack in stacks
        ]
        self._output_is_bare = uses.output_is_bare
        # a decoder beside an encoder
        self._crosses = [any(layer in uses.crosses for layer in stack) for stack in stacks]
        outside = _linear_flops(model, uses.rows) - sum(map(sum, linear))
        self._before = _linear_flops(model, uses.before) if stacks else 0.0
        self._after = outside - self._before
        config = model.config.get_text_config()
        states = [_state_flops(config, stack) for stack in stacks]
        self._attends = [[state is None for state in stack] for stack in states]
        self._layers = [
            [flops + (state or 0) for flops, state in zip(*both, strict=True)]
            for both in zip(linear, states, strict=True)
        ]
        # 0 where no layer attends to tokens
        heads = getattr(config, "num_attention_heads", 0)
        head_dim = _head_dim(config) or config.hidden_size // max(heads, 1)
        # of queries and keys, and of values
        widths = (getattr(config, name, None) or head_dim for name in ("qk_head_dim", "v_head_dim"))
        self._attention = 2 * heads * sum(widths)
        # blocks shared between depths are in no stack, but attend once per depth
        self._outside_attentions = 0 if stacks else config.num_hidden_layers
        attention = attention or getattr(config, "_attn_implementation", None) or ""
        self._keeps_apart = "flash" in attention

    def forward(
        self,
        batch: int,
        length: int,
        pairs: int | None = None,
        *,
        decoder_length: int | None = None,
    ) -> float:
        """FLOPs of one forward pass of all layers without the output projection. (1)

        Args:
            pairs: pairs of tokens of the same sequence, if several are packed into a row; else
                None.
            decoder_length: tokens per row of a decoder beside an encoder; None takes `length`.
        """
        return self.forward_of(TokenCounts.of_rows(batch, length, pairs, decoder_length))

    def forward_of(self, sizes: "TokenCounts") -> float:
        """As `forward`, of a batch whose rows may be unequal."""
        outside = sizes.tokens * (self._before + self._after) + self._outside_attentions * (
            self._pairs(sizes) * self._attention
        )
        return self._layer_flops(sizes) + outside + sizes.sequences * self._per_sequence

    def train(
        self,
        batch: int,
        length: int,
        part: ModelPart | None = None,
        *,
        pairs: int | None = None,
        decoder_length: int | None = None,
    ) -> float:
        """FLOPs of one forward and backward pass without the output projection. (1), (2)

        Args:
            part: layers that run; the lower ones of these run forward only. None trains all.
            pairs, decoder_length: as in `forward`.
        """
        return self.train_of(TokenCounts.of_rows(batch, length, pairs, decoder_length), part)

    def train_of(self, sizes: "TokenCounts", part: ModelPart | None = None) -> float:
        """As `train`, of a batch whose rows may be unequal."""
        if part is None:
            return 3 * self.forward_of(sizes)
        of_stacks = part.of(self._layers)
        frozen = self._layer_flops(sizes, [below for _, below in of_stacks])
        trained = self._layer_flops(sizes, [n for n, _ in of_stacks]) - frozen
        once = 3 * sizes.sequences * self._per_sequence
        # the stacks whose lowest trained layer passes no gradient on to what it reads
        ends = [below > 0 or part.embeddings == "frozen" for _, below in of_stacks]
        saved = sum(
            self._tokens(sizes, crosses) * stack[below]
            for stack, (n, below), crosses, is_end in zip(
                self._at_input, of_stacks, self._crosses, ends, strict=True
            )
            if is_end and below < n
        )
        if self._output_is_bare and any(below == n for n, below in of_stacks):
            # keys and values that are made of the output of a frozen encoder pass nothing on
            saved += sum(
                sizes.tokens * sum(stack[below:n])
                for stack, (n, below) in zip(self._of_encoder, of_stacks, strict=True)
            )
        before = 1 if all(ends) else 3
        outside = sizes.tokens * (before * self._before + 3 * self._after)
        return frozen + once + 3 * trained + outside - saved

    def head_row(self, *, train: bool) -> float:
        """FLOPs of the output projection for one row."""
        return self._row * (3 if train else 1)

    def _pairs(self, sizes: "TokenCounts") -> int:
        return sizes.pairs if sizes.apart is None or not self._keeps_apart else sizes.apart

    def _tokens(self, sizes: "TokenCounts", crosses: bool) -> int:
        return sizes.decoder_tokens if crosses else sizes.tokens

    def _layer_flops(self, sizes: "TokenCounts", depths: Sequence[int] | None = None) -> float:
        """Of the bottom layers of each stack; None: of all layers."""
        total, depths = 0.0, [len(stack) for stack in self._layers] if depths is None else depths
        for layers, of_encoder, attends, crosses, depth in zip(
            self._layers, self._of_encoder, self._attends, self._crosses, depths, strict=True
        ):
            linear, outer, count = (sum(x[:depth]) for x in (layers, of_encoder, attends))
            pairs = sizes.decoder_pairs + sizes.cross_pairs if crosses else self._pairs(sizes)
            total += self._tokens(sizes, crosses) * (linear - outer) + sizes.tokens * outer
            total += count * pairs * self._attention
        return total


class TokenCounts(NamedTuple):
    """The numbers of sequences, of tokens, and of pairs of tokens that attend to each other.

    `apart` counts the pairs within the same sequence if several are packed into a row; else None.
    """

    sequences: int
    tokens: int
    decoder_tokens: int
    pairs: int
    decoder_pairs: int
    cross_pairs: int
    apart: int | None = None

    @classmethod
    def of_rows(
        cls, batch: int, length: int, apart: int | None, decoder_length: int | None
    ) -> "TokenCounts":
        """The sizes of equal rows; `decoder_length` None takes `length`."""
        decoder_length = length if decoder_length is None else decoder_length
        return cls(
            sequences=batch,
            tokens=batch * length,
            decoder_tokens=batch * decoder_length,
            pairs=batch * length**2,
            decoder_pairs=batch * decoder_length**2,
            cross_pairs=batch * length * decoder_length,
            apart=apart,
        )


class _Uses(NamedTuple):
    """How many rows each linear map of a model gets per input token."""

    rows: dict[nn.Module, float]  # in all
    before: dict[nn.Module, float]  # of the maps that run before the first layer
    at_input: dict[nn.Module, dict[nn.Module, float]]  # by layer: maps that read its input directly
    crosses: set[nn.Module]  # layers that attend to the output of an encoder too
    of_encoder: dict[nn.Module, float]  # of the maps of these that read that output
    per_sequence: dict[nn.Module, float]  # of maps that run once per sequence, rows per sequence
    output_is_bare: bool  # whether the last layer of an encoder gives its output, and not a norm


def _head_dim(config: Any) -> float | None:
    """Entries of a head, or the mean over layers whose heads differ; None if no field says it."""
    try:
        return getattr(config, "head_dim", None)
    except RuntimeError:
        own = [layer.head_dim for layer in config.per_layer_config]
        return sum(own) / len(own)


def _linear_flops(module: nn.Module, uses: dict[nn.Module, float]) -> float:
    return sum(2 * uses.get(linear, 0) * _weights(linear) for linear in _linears(module))


def _state_flops(config: Any, layers: nn.ModuleList) -> list[int | None]:
    """Of every layer: the FLOPs per token of its convolution and its state; None: it attends."""
    if config.model_type not in supported_families():
        return [None] * len(layers)
    flops: list[int | None] = []
    for number, layer in enumerate(layers):
        products = load_family(config.model_type).state_products(config, number)
        weights = sum(m.weight.numel() for m in layer.modules() if isinstance(m, _ConvNd))
        flops.append(None if products is None else 2 * (products + weights))
    return flops


def _linears(module: nn.Module) -> list[Any]:
    """All linear maps: also the experts of a mixture, as one, and their routers."""
    linears: list[nn.Module] = [m for m in module.modules() if isinstance(m, nn.Linear | Conv1D)]
    for above in module.modules():
        children = [*above.children()]
        if any(map(is_experts, children)):
            linears += [m for m in children if is_experts(m) or _is_router(m)]
    return linears


def is_experts(module: nn.Module) -> bool:
    """True if a module holds one matrix per expert."""
    own = [p.ndim for p in module.parameters(recurse=False)]
    return 3 in own and len(own) > 1 and not isinstance(module, _ConvNd)


def _is_router(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 2 and not isinstance(module, nn.Linear)


def _weights(module: Any) -> int:
    """The weights of a linear map, or of one expert; without biases."""
    if not is_experts(module):
        return int(module.weight.numel())
    return sum(p[0].numel() for p in module.parameters(recurse=False) if p.ndim == 3)


def _uses(linear: nn.Module, args: Any) -> int:
    """How many rows a linear map gets, or all experts together."""
    # experts take their inputs, and the numbers of those that are chosen for each; experts that all
    # run for all tokens take their inputs alone
    is_routed = is_experts(linear) and len(args) > 1
    return int(args[1].numel()) if is_routed else math.prod(args[0].shape[:-1])


def _uses_per_token(model: Any, stacks: Sequence[nn.ModuleList]) -> _Uses:
    rows: dict[nn.Module, float] = defaultdict(float)
    before: dict[nn.Module, float] = defaultdict(float)
    at_input: dict[nn.Module, dict[nn.Module, float]] = {}
    entered: list[tuple[nn.Module, Tensor]] = []
    beside: list[Any] = []  # what the current layer gets besides its input
    crosses: set[nn.Module] = set()
    of_encoder: dict[nn.Module, float] = defaultdict(float)
    per_sequence: dict[nn.Module, float] = {}
    left: list[Any] = []  # the output of the layer that ran last
    bare: list[bool] = []
    inputs = probe_inputs(model)
    tokens = inputs[model.main_input_name].numel()
    # as the current layer gets them: Longformer fills up its windows
    given = tokens

    def leave(layer: nn.Module, args: Any, output: Any) -> None:
        nonlocal given
        given = tokens
        left[:] = output[:1] if isinstance(output, tuple) else [output]

    def enter(layer: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal given
        entered.append((layer, args[0] if args else kwargs["hidden_states"]))
        given = math.prod(entered[-1][1].shape[-3:-1])
        beside[:] = [x for x in (*args, *kwargs.values()) if x is not entered[-1][1]]
        bare.append(any(x is y for x in beside for y in left))

    def count(linear: nn.Module, args: Any, output: Any) -> None:
        uses = _uses(linear, args) / given
        is_pooled = isinstance(linear, nn.Linear | Conv1D) and args[0].ndim == 2
        if is_pooled and len(args[0]) == len(inputs[model.main_input_name]):
            per_sequence[linear] = per_sequence.get(linear, 0) + 1
            return
        rows[linear] += uses
        if not entered:
            before[linear] += uses
        elif args[0] is entered[-1][1]:
            at_input.setdefault(entered[-1][0], defaultdict(float))[linear] += uses
        elif any(args[0] is x for x in beside):
            # the keys and values of an attention over the output of the encoder
            crosses.add(entered[-1][0])
            of_encoder[linear] += uses

    hooks = [linear.register_forward_hook(count) for linear in _linears(model)]
    for layer in (layer for stack in stacks for layer in stack):
        hooks.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(layer.register_forward_hook(leave))
    try:
        with probing(model):
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return _Uses(rows, before, at_input, crosses, of_encoder, per_sequence, any(bare))
