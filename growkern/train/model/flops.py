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
from collections.abc import Mapping, Sequence
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
    """

    def __init__(self, model: Any, stacks: Sequence[nn.ModuleList]) -> None:
        head = model.get_output_embeddings()
        self._row = 0 if head is None else 2 * head.weight.numel()
        seen = _Uses(model, stacks)
        uses = seen.rows
        uses["all"].pop(head, None)
        config = model.config.get_text_config()
        # with each stack, whether it attends to the output of an encoder too
        self._stacks = [
            (any(layer in seen.crosses for layer in stack), _layer_costs(stack, config, uses))
            for stack in stacks
        ]
        self._per_sequence = _linear_flops(model, uses["sequence"])
        self._output_is_bare = seen.output_is_bare
        self._before = _linear_flops(model, uses["before"]) if stacks else 0.0
        inside = sum(layer.linear for _, layers in self._stacks for layer in layers)
        self._after = _linear_flops(model, uses["all"]) - inside - self._before
        # 0 where no layer attends to tokens
        heads = getattr(config, "num_attention_heads", 0)
        head_dim = _head_dim(config) or config.hidden_size // max(heads, 1)
        # of queries and keys, and of values
        widths = (getattr(config, name, None) or head_dim for name in ("qk_head_dim", "v_head_dim"))
        self._attention = 2 * heads * sum(widths)
        # blocks shared between depths are in no stack, but attend once per depth
        self._outside_attentions = 0 if stacks else config.num_hidden_layers
        # whether sequences that are packed into one row do not attend to each other
        self._keeps_apart = "flash" in (getattr(config, "_attn_implementation", None) or "")

    def forward(self, sizes: "TokenCounts") -> float:
        """FLOPs of one forward pass of all layers without the output projection. (1)"""
        outside = sizes.tokens * (self._before + self._after) + self._outside_attentions * (
            self._pairs(sizes) * self._attention
        )
        inside = sum(self._of_layers(sizes, *stack) for stack in self._stacks)
        return inside + outside + sizes.sequences * self._per_sequence

    def train(self, sizes: "TokenCounts", part: ModelPart | None = None) -> float:
        """FLOPs of one forward and backward pass without the output projection. (1), (2)

        `part` are the layers that run; the lower ones of these run forward only. None trains all.
        """
        if part is None:
            return 3 * self.forward(sizes)
        of_stacks = part.of([layers for _, layers in self._stacks])
        # the stacks whose lowest trained layer passes no gradient on to what it reads
        ends = [below > 0 or part.embeddings == "frozen" for _, below in of_stacks]
        before = 1 if all(ends) else 3
        flops = sizes.tokens * (before * self._before + 3 * self._after)
        flops += 3 * sizes.sequences * self._per_sequence
        # keys and values that are made of the output of a frozen encoder pass nothing on
        is_bare = self._output_is_bare and any(below == n for n, below in of_stacks)
        for (crosses, layers), (n, below), is_end in zip(
            self._stacks, of_stacks, ends, strict=True
        ):
            trained = layers[below:n]
            flops += self._of_layers(sizes, crosses, layers[:below])
            flops += 3 * self._of_layers(sizes, crosses, trained)
            if is_end and trained:
                flops -= self._tokens(sizes, crosses) * trained[0].first
            if is_bare:
                flops -= sizes.tokens * sum(layer.outer for layer in trained)
        return flops

    def head_row(self, *, train: bool) -> float:
        """FLOPs of the output projection for one row."""
        return self._row * (3 if train else 1)

    def _pairs(self, sizes: "TokenCounts") -> int:
        return sizes.pairs if sizes.apart is None or not self._keeps_apart else sizes.apart

    def _tokens(self, sizes: "TokenCounts", crosses: bool) -> int:
        return sizes.decoder_tokens if crosses else sizes.tokens

    def _of_layers(
        self, sizes: "TokenCounts", crosses: bool, layers: "Sequence[_LayerCost]"
    ) -> float:
        """Of a forward pass of layers of one stack."""
        tokens, flops = self._tokens(sizes, crosses), 0.0
        pairs = sizes.decoder_pairs + sizes.cross_pairs if crosses else self._pairs(sizes)
        for layer in layers:
            flops += tokens * (layer.linear - layer.outer) + sizes.tokens * layer.outer
            flops += pairs * self._attention if layer.state is None else tokens * layer.state
        return flops


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
    def of_rows(cls, batch: int, length: int, decoder_length: int | None = None) -> "TokenCounts":
        """The counts of equal rows; those of a decoder beside an encoder have `decoder_length`."""
        decoder_length = length if decoder_length is None else decoder_length
        return cls(
            sequences=batch,
            tokens=batch * length,
            decoder_tokens=batch * decoder_length,
            pairs=batch * length**2,
            decoder_pairs=batch * decoder_length**2,
            cross_pairs=batch * length * decoder_length,
        )


class _LayerCost(NamedTuple):
    """The FLOPs per token of a layer."""

    linear: float  # of its linear maps
    first: float  # of those that read its input directly
    outer: float  # of those that read the output of an encoder
    state: int | None  # of its convolution and its state; None: it attends to tokens


def _layer_costs(stack: nn.ModuleList, config: Any, uses: Mapping[str, Any]) -> list[_LayerCost]:
    return [
        _LayerCost(
            _linear_flops(layer, uses["all"]),
            _linear_flops(layer, uses["first"]),
            _linear_flops(layer, uses["outer"]),
            _state_flops(config, layer, number),
        )
        for number, layer in enumerate(stack)
    ]


def _head_dim(config: Any) -> float | None:
    """Entries of a head, or the mean over layers whose heads differ; None if no field says it."""
    try:
        return getattr(config, "head_dim", None)
    except RuntimeError:
        own = [layer.head_dim for layer in config.per_layer_config]
        return sum(own) / len(own)


def _linear_flops(module: nn.Module, uses: dict[nn.Module, float]) -> float:
    return sum(2 * uses.get(linear, 0) * _weights(linear) for linear in _linears(module))


def _state_flops(config: Any, layer: nn.Module, number: int) -> int | None:
    """The FLOPs per token of a layer's convolution and its state; None: it attends."""
    if config.model_type not in supported_families():
        return None
    products = load_family(config.model_type).state_products(config, number)
    weights = sum(m.weight.numel() for m in layer.modules() if isinstance(m, _ConvNd))
    return None if products is None else 2 * (products + weights)


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


class _Uses:
    """How many rows each linear map of a model gets per input token, seen in a tiny forward pass.

    Attributes:
        rows: of "all" maps, and of some kinds of them: those "before" the first layer, the "first"
            of a layer, which read its input directly, and its "outer" ones, which read the output
            of an encoder. Those of "sequence" run once per sequence, and their rows are per one.
        crosses: layers that attend to the output of an encoder too.
        output_is_bare: whether the last layer of an encoder gives its output, and not a norm.
    """

    def __init__(self, model: Any, stacks: Sequence[nn.ModuleList]) -> None:
        self.rows: dict[str, dict[Any, float]] = defaultdict(lambda: defaultdict(float))
        self.crosses: set[nn.Module] = set()
        self.output_is_bare = False
        # the current layer and its input, what it gets besides, and the output of the last layer
        self._entered: tuple[nn.Module, Tensor] | None = None
        self._beside: list[Any] = []
        self._left: Any = None
        inputs = probe_inputs(model)
        self._ids = inputs[model.main_input_name]
        # tokens as the current layer gets them: Longformer fills up its windows
        self._given = self._ids.numel()
        hooks = [linear.register_forward_hook(self._count) for linear in _linears(model)]
        for layer in (layer for stack in stacks for layer in stack):
            hooks.append(layer.register_forward_pre_hook(self._enter, with_kwargs=True))
            hooks.append(layer.register_forward_hook(self._leave))
        try:
            with probing(model):
                model(**inputs)
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        first = args[0] if args else kwargs["hidden_states"]
        self._entered, self._given = (layer, first), math.prod(first.shape[-3:-1])
        self._beside = [x for x in (*args, *kwargs.values()) if x is not first]
        last = self._left
        self.output_is_bare |= last is not None and any(x is last for x in self._beside)

    def _leave(self, layer: nn.Module, args: Any, output: Any) -> None:
        self._given = self._ids.numel()
        self._left = output[0] if isinstance(output, tuple) else output

    def _count(self, linear: nn.Module, args: Any, output: Any) -> None:
        # experts take their inputs, and the numbers of those that are chosen for each; experts that
        # all run for all tokens take their inputs alone
        is_routed = is_experts(linear) and len(args) > 1
        uses = (args[1].numel() if is_routed else math.prod(args[0].shape[:-1])) / self._given
        is_pooled = isinstance(linear, nn.Linear | Conv1D) and args[0].ndim == 2
        if is_pooled and len(args[0]) == len(self._ids):
            self.rows["sequence"][linear] += 1
            return
        self.rows["all"][linear] += uses
        if self._entered is None:
            self.rows["before"][linear] += uses
        elif args[0] is self._entered[1]:
            self.rows["first"][linear] += uses
        elif any(args[0] is x for x in self._beside):
            # the keys and values of an attention over the output of the encoder
            self.crosses.add(self._entered[0])
            self.rows["outer"][linear] += uses
