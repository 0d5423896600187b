"""Replaces the output projection of a language model by a function, so that no logits are made.

The fused loss needs the hidden states, the weight and the bias of the output projection. During one
call of the model, `head_swap` replaces the forward of the projection by a function of these three.
Its result takes the place of the logits.

The function runs inside the model's own call. Casts, hooks and wrappers apply, a sharded weight is
complete, and a transform before the projection (such as BERT's dense layer and norm) has run.

Some models change their logits to c * tanh(s * logits / c). This is switched off during the call:
the scale s is applied to the hidden states and the bias, and the loss applies the softcap c. A bias
that BART adds after the projection joins the bias of the projection.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from growkern.errors import GrowthError
from growkern.growth.sharded import free_gathered
from growkern.ops.loss.rows.options import IGNORE_INDEX
from growkern.train.model.load import positions_of
from growkern.train.model.projection import HeadInputs, is_linear, projected, why_not_linear

HeadFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Changes: TypeAlias = Sequence[tuple[Any, str, float]]

# attributes of models or configs that change the logits, each with the value that changes nothing
NEUTRAL = {"logit_scale": 1.0, "logits_scaling": 1.0, "final_logit_softcapping": None}

# buffer (1, V) of BART and its relatives, added to the logits
ADDED_BIAS = "final_logits_bias"


def _added_bias(model: Any) -> Tensor | None:
    return getattr(model, ADDED_BIAS, None)


def _changes(model: Any) -> Changes:
    """Owner, name and value of the attributes of NEUTRAL that are numbers.

    Some models keep a copy of their config's number.
    """
    return [
        (owner, name, value)
        for owner in (model.config, model)
        for name in NEUTRAL
        if isinstance(value := getattr(owner, name, None), (int, float))
    ]


def softcap_of(model: Any) -> float | None:
    """The c of the model's c * tanh(logits / c); None stands for a head without a model."""
    if model is None:
        return None
    values = {name: value for _, name, value in _changes(model)}
    return values.get("final_logit_softcapping")


def head_options(model: Any) -> dict[str, Any]:
    """The options of a loss that the student's head asks for; see `softcap_of`."""
    return {"softcap": softcap_of(model)}


def teacher_options(models: Iterable[Any]) -> dict[str, Any]:
    """The options of a loss that the heads of the teachers ask for; see `softcap_of`."""
    different = set(map(softcap_of, models)) or {None}
    if len(different) > 1:
        raise GrowthError(f"the teachers have different softcaps: {different}. They must be equal")
    return {"teacher_softcap": different.pop()}


def _scale_of(changes: Changes) -> float:
    values = {name: value for _, name, value in changes}
    return values.get("logit_scale", 1.0) / values.get("logits_scaling", 1.0)


@contextlib.contextmanager
def setting(owner: Any, name: str, value: Any) -> Iterator[None]:
    """While active, an attribute has this value."""
    had, before = hasattr(owner, name), getattr(owner, name, None)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before) if had else delattr(owner, name)


@contextlib.contextmanager
def _neutral(model: Any, changes: Changes) -> Iterator[None]:
    """While active, the model does not change its logits after the output projection."""
    added = _added_bias(model)
    with contextlib.ExitStack() as stack:
        for owner, name, _ in changes:
            stack.enter_context(setting(owner, name, NEUTRAL[name]))
        if added is not None:
            stack.enter_context(setting(model, ADDED_BIAS, added.new_zeros(())))
        yield


@contextlib.contextmanager
def _shadowed(head: Any, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    head.forward = forward  # shadows the method of the class
    try:
        yield
    finally:
        del head.forward


@contextlib.contextmanager
def head_swap(model: Any, function: HeadFunction) -> Iterator[None]:
    """While active, `model(...)` returns function(hidden, weight, bias) as its logits.

    A softcap of the model is not applied while active. Call `softcap_of` before, and give the
    softcap to the loss.

    Args:
        model: a model that passed `check_head`.
        function: gets hidden states (..., H), the weight (V, H), and the bias (V,) or None.
    """
    # a config searches long for an attribute that it lacks
    changes = _changes(model)
    head, scale, added = model.get_output_embeddings(), _scale_of(changes), _added_bias(model)

    def forward(hidden: Tensor) -> Tensor:
        hidden, weight, bias = projected(head, hidden)
        if added is not None:
            bias = added[0] if bias is None else bias + added[0]
        if scale != 1:
            hidden, bias = hidden * scale, None if bias is None else bias * scale
        return function(hidden, weight, bias)

    with _neutral(model, changes), _shadowed(head, forward):
        yield


def take_logits(outputs: Any) -> Tensor:
    """Remove the logits of the output projection from the outputs of a model."""
    # BertForPreTraining has logits of two heads
    name = "logits" if hasattr(outputs, "logits") else "prediction_logits"
    logits: Tensor = getattr(outputs, name)
    setattr(outputs, name, None)
    return logits


def head_inputs(model: Any, inputs: dict[str, Any]) -> HeadInputs:
    """Run a model up to its output projection, without making logits."""
    check_row_length("teacher", model, inputs)
    seen: list[HeadInputs] = []

    def keep(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(HeadInputs(hidden, weight, bias))
        return hidden.new_zeros(())

    with head_swap(model, keep):
        model(**inputs)
    return seen[0]


def check_row_length(role: str, model: Any, inputs: dict[str, Any]) -> None:
    """Refuse rows longer than a model has positions for, unless they bring their own positions."""
    most = None if "position_ids" in inputs else positions_of(model.config)
    for name in ("input_ids", "decoder_input_ids", "inputs_embeds", "decoder_inputs_embeds"):
        length = 0 if inputs.get(name) is None else inputs[name].shape[1]
        if most is not None and length > most:
            raise GrowthError(
                f"a row has {length} tokens ({name}), but the {role} ({type(model).__name__}) has "
                f"{most} positions: cut the rows, or give a {role} that reads longer ones"
            )


@torch.no_grad()
def teacher_inputs(model: Any, inputs: dict[str, Any]) -> HeadInputs:
    """Like `head_inputs`, of a frozen model."""
    hidden, weight, bias = head_inputs(model, inputs)
    if weight.untyped_storage().size() == 0:
        raise GrowthError(
            "the teacher's output projection is gone after its forward pass: call fully_shard on "
            "the teacher with reshard_after_forward=False (or unset) for the root"
        )
    # the gathered copy of a sharded weight may ask for a gradient
    return HeadInputs(hidden, weight.detach(), None if bias is None else bias.detach())


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """While active, a model is in evaluation mode. Afterwards each module has its own mode."""
    training = [module for module in model.modules() if module.training]
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def reading(model: Any) -> Iterator[None]:
    """While active, a model is in evaluation mode and keeps no cache of keys and values."""
    with setting(model.config, "use_cache", False), evaluating(model):
        yield


@contextlib.contextmanager
def probing(model: Any) -> Iterator[None]:
    """While active, a model runs without dropout, gradients, compiled code and loss of routers.

    Compiled code would be compiled again for a probe, and would not call new hooks. The loss of
    routers fails where no layer that runs has one. The parameters of a sharded model are shards
    again afterwards.
    """
    no_loss = setting(model.config.get_text_config(), "output_router_logits", False)
    try:
        with evaluating(model), no_loss, torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        free_gathered(model)


def check_head(model: Any) -> None:
    """Check that the fused loss computes the same function as the model's own logits.

    The logits must be head(hidden), or c * tanh(s * head(hidden) / c); a constant bias may be
    added. To test this, the head is replaced by one that returns a ramp of large numbers. With the
    small logits of a new model, other changes would not be visible. The model runs on its own tiny
    dummy inputs, without dropout and without gradients.
    """
    name = type(model).__name__
    head = model.get_output_embeddings()
    if not is_linear(head):
        raise GrowthError(f"{name} {why_not_linear(head)}")
    ramps: list[Tensor] = []

    def ramp(hidden: Tensor) -> Tensor:
        shape = (*hidden.shape[:-1], head.weight.shape[0])
        ramps.append(torch.linspace(-300, 300, math.prod(shape), device=hidden.device).view(shape))
        return ramps[-1]

    inputs = {name: x.to(head.weight.device) for name, x in _tokens_to_try(model).items()}
    changes = _changes(model)
    with probing(model), _shadowed(head, ramp):
        changed = take_logits(model(**inputs))
        with _neutral(model, changes):
            bare = take_logits(model(**inputs))
    is_known = False
    if len(ramps) == 2:
        scaled, cap, added = ramps[0] * _scale_of(changes), softcap_of(model), _added_bias(model)
        scaled = scaled if added is None else scaled + added
        expected = cap * torch.tanh(scaled / cap) if cap else scaled
        is_known = torch.equal(bare.to(ramps[1].dtype), ramps[1]) and torch.allclose(
            changed.to(expected.dtype), expected, rtol=1e-3
        )
    if not is_known:
        raise GrowthError(
            f"{name} changes its logits after the output projection in a way that is not "
            f"supported (supported: {', '.join(NEUTRAL)}). The fused loss would ignore the change: "
            "use kl_mlm_loss on the model's own logits instead"
        )


def check_causal(model: Any) -> None:
    """Check that no token of a causal model sees the tokens after it.

    An encoder that was loaded in its ...LMHeadModel class with is_decoder=False sees them. It would
    learn to copy the labels.
    """
    inputs = {name: x.to(model.device) for name, x in _tokens_to_try(model).items()}
    try:
        sees = _gradient_reaches_later_tokens(model, inputs)
    except RuntimeError:
        # weights loaded in inference mode, or quantised ones whose kernels have no gradient
        sees = _later_tokens_change_the_first(model, inputs)
    if sees:
        raise GrowthError(
            f"{type(model).__name__} is trained to predict the next token, but its tokens see the "
            "tokens after them: set config.is_decoder=True, or use the ...ForMaskedLM class"
        )


def _gradient_reaches_later_tokens(model: Any, inputs: dict[str, Tensor]) -> bool:
    """Whether the first token's hidden state depends on the embeddings of later tokens.

    The gradient is exactly 0 if it does not, in any dtype. Two runs differ by rounding in a mixture
    of experts: an expert's matrix product rounds by the number of tokens that it gets.
    """
    seen: list[Tensor] = []

    def watch(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        seen.append(output.detach().requires_grad_())
        # a model may scale its embeddings in place, which a leaf refuses
        return seen[0].clone()

    def hidden_states(hidden: Tensor, _weight: Tensor, _bias: Tensor | None) -> Tensor:
        return hidden

    with probing(model), torch.inference_mode(False), torch.enable_grad():
        with (
            model.get_input_embeddings().register_forward_hook(watch),
            head_swap(model, hidden_states),
        ):
            # as logits: a sharded model gathers its parameters when its outputs get gradients
            hidden_BSH = take_logits(model(**inputs))
        first_BH = hidden_BSH[:, 0].float()
        # a random direction: the sum over a LayerNorm's output does not depend on its input
        way_H = torch.randn(first_BH.shape[-1], generator=torch.Generator().manual_seed(0))
        (gradient,) = torch.autograd.grad((first_BH * way_H.to(first_BH.device)).sum(), seen[0])
    # NaN tells nothing
    return bool((gradient[:, 1:].abs() > 0).any())


def _later_tokens_change_the_first(model: Any, inputs: dict[str, Tensor]) -> bool:
    """Whether the first token's hidden state changes with the last token."""
    changed_BS = inputs["input_ids"].clone()
    changed_BS[:, -1] += 1
    with probing(model):
        first, second = (
            head_inputs(model, {**inputs, "input_ids": ids_BS}).hidden[:, 0].nan_to_num()
            for ids_BS in (inputs["input_ids"], changed_BS)
        )
    return not torch.equal(first, second)


def _tokens_to_try(model: Any) -> dict[str, Tensor]:
    """A small input. Some of its tokens may be padding by their ids; the mask says they are not."""
    inputs = dict(model.dummy_inputs)
    return {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}


def align_labels(x_BS: Tensor, *, causal: bool, filler: float = IGNORE_INDEX) -> Tensor:
    """Move labels or their weights (B, S) to the positions that predict them.

    That is one to the left for causal models, whose last position gets the filler.
    """
    return _shift(x_BS, filler) if causal else x_BS


def align_rows(mask_BS: Tensor, *, causal: bool) -> Tensor:
    """Move a mask of real tokens (B, S) to the positions that predict these tokens.

    The last position of a causal model is False.
    """
    return _shift(mask_BS.bool(), False) if causal else mask_BS.bool()


def _shift(x_BS: Tensor, filler: float) -> Tensor:
    return torch.cat([x_BS[:, 1:], x_BS.new_full((x_BS.shape[0], 1), filler)], dim=1)
