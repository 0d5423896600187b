"""Runs language models: students and teachers, in training, evaluation and probes, in one way.

A row may hold several documents. Their `position_ids` begin anew, and no token may see another
document. transformers masks the others only if the model keeps no cache of keys and values, and
some models have parts that no mask reaches. So `run_model` switches the cache off, and refuses
packed rows if a probe of the model shows that its documents see each other.

Shape letters used in this file: B examples, S positions, P of these, A axes of positions, H width.
"""

import contextlib
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.parallel import DistributedDataParallel
from transformers import DataCollatorWithFlattening

from growkern.errors import GrowthError
from growkern.train.model.head import HeadInputs, head_swap, take_logits, tokens_to_try
from growkern.train.model.language_model import (
    evaluating,
    no_zeros,
    parts_of,
    positions_of,
    probing,
    without_cache,
)

# model -> what a probe found out: whether documents of a packed row stay apart
_apart: WeakKeyDictionary[Any, dict[tuple[Any, ...], bool]] = WeakKeyDictionary()
# what models of transformers call the state after earlier tokens
CACHES = ("past_key_values", "cache_params", "mems", "state")


def inside_ddp(model: Any) -> Any:
    """The model inside DistributedDataParallel. One that was compiled as a whole is refused."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    if isinstance(model, OptimizedModule):
        raise GrowthError(
            "the whole model was compiled, which fails on the fused loss: compile its blocks "
            "instead, with `block.compile()` for each"
        )
    return model


def run_model(
    role: str,
    model: Any,
    inputs: Mapping[str, Any],
    *within: contextlib.AbstractContextManager[Any],
) -> Any:
    """The outputs of a model, which makes no cache and keeps the documents of a row apart.

    Args:
        role: "model" or "teacher", for messages.
        model: of transformers, maybe in DistributedDataParallel. Its config is as before
            afterwards.
        inputs: {input_ids, ...}. Rows that are longer than the model's positions are refused, and
            packed rows whose documents would see each other, and caches. `use_cache` is left out.
        within: contexts of the call. The checks are made before, on the model as it is.
    """
    inner = inside_ddp(model)
    # it would count for more than the model's config
    inputs = {name: x for name, x in inputs.items() if name != "use_cache"}
    for name in CACHES:
        if inputs.pop(name, None) is not None:
            raise GrowthError(
                f"a batch has {name}, whose tokens every row and document would see: leave it out, "
                "and put the tokens before the row's own"
            )
    if getattr(inputs.get("position_ids"), "ndim", None) == 1:
        inputs["position_ids"] = inputs["position_ids"][None]
    check_row_length(role, inner, inputs)
    check_documents(role, inner, inputs)
    with contextlib.ExitStack() as stack:
        for context in (without_cache(inner), *within):
            stack.enter_context(context)
        return model(**inputs)


def head_inputs(model: Any, inputs: dict[str, Any]) -> HeadInputs:
    """Run a teacher up to its output projection, in evaluation mode and without making logits."""
    seen: list[HeadInputs] = []

    def keep(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(HeadInputs(hidden, weight, bias))
        return hidden.new_zeros(())

    # the teacher may be the model in training
    run_model("teacher", model, inputs, evaluating(model), head_swap(model, keep))
    return seen[0]


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


# ------------------------------------------------------------------- checks


def check_row_length(role: str, model: Any, inputs: Mapping[str, Any]) -> None:
    """Refuse rows longer than a model has positions for, unless they bring their own positions."""
    most = None if "position_ids" in inputs else positions_of(model.config)
    for name in ("input_ids", "decoder_input_ids", "inputs_embeds", "decoder_inputs_embeds"):
        length = 0 if inputs.get(name) is None else inputs[name].shape[1]
        if most is not None and length > most:
            raise GrowthError(
                f"a row has {length} tokens ({name}), but the {role} ({type(model).__name__}) has "
                f"{most} positions: cut the rows, or give a {role} that reads longer ones"
            )


def batch_positions(batch: Mapping[str, Any]) -> Tensor | None:
    """The positions of a batch, (A, B, S) or (A, 1, S). None if it has none.

    A is 1, unless a token stands in an image too. Then the first axis counts text or time, which
    never falls within a document.
    """
    positions = batch.get("position_ids")
    if not isinstance(positions, Tensor) or positions.ndim not in (1, 2, 3):
        return None
    return positions if positions.ndim == 3 else positions.view(1, -1, positions.shape[-1])


def document_starts(batch: Mapping[str, Any]) -> Tensor | None:
    """Where the documents of a packed batch start, (B, S) bool. None if it is not packed.

    As transformers reads it: an attention mask counts alone. Of several axes, one at least rises
    within a document.
    """
    positions_ABS = batch_positions(batch)
    if positions_ABS is None or batch.get("attention_mask") is not None:
        return None
    starts_BS = torch.ones_like(positions_ABS[0], dtype=torch.bool)
    steps_ABT = positions_ABS.diff(dim=2)
    starts_BS[:, 1:] = steps_ABT[0] != 1 if len(positions_ABS) == 1 else (steps_ABT <= 0).all(0)
    return starts_BS


def check_documents(role: str, model: Any, inputs: Mapping[str, Any]) -> None:
    """Refuse packed rows whose documents see each other in this model.

    The model is probed once for each kind of input. Only if its documents see each other, or the
    batch has a mask, a GPU is asked whether the rows are packed at all.
    """
    tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
    positions_ABS, mask = batch_positions(inputs), inputs.get("attention_mask")
    if tokens is None or positions_ABS is None or model.config.is_encoder_decoder:
        return
    if mask is not None:
        if _mask_joins(positions_ABS, mask):
            raise GrowthError(
                "position_ids begin anew within a row, but its documents would see each other: "
                "transformers does not look at position_ids if there is an attention_mask. Leave "
                "attention_mask out, also for padding at the end of a row. Or leave position_ids "
                "out, if the documents may see each other"
            )
        return
    attention = (part.config._attn_implementation for part in parts_of(model))
    several = (len(positions_ABS), *attention, *sorted(inputs))
    known, kind = _apart.setdefault(model, {}), (min(2, len(tokens)), *several)
    if kind not in known:
        # one row and two, on every rank: a rank whose last batch is shorter would wait for the
        # others, which gather a sharded model's parameters with it. Ends of documents for flash
        # attention lie in one row, and two rows of them would be no batch
        for rows in (kind[0],) if "cu_seq_lens_q" in inputs else (1, 2):
            meet = _documents_meet(model, inputs, tokens.device, rows, len(positions_ABS))
            if meet is not None:
                shown = (rows, *several)
                known[shown] = not meet
    starts_BS = None if known.get(kind) else document_starts(inputs)
    if starts_BS is None or int(starts_BS.sum()) == len(starts_BS):
        return
    if kind not in known:
        raise GrowthError(
            f"position_ids begin anew within a row, but the {role} ({type(model).__name__}) gives "
            "NaN, so that its documents cannot be shown to stay apart: look for NaN in its weights"
        )
    raise GrowthError(
        f"position_ids begin anew within a row, but in the {role} ({type(model).__name__}) its "
        "documents would see each other: transformers does not keep them apart for this model and "
        "these inputs. Give each document a row of its own, with padding and an attention_mask. Or "
        "leave position_ids out, if the documents may see each other"
    )


def _mask_joins(positions_ABS: Tensor, mask: Any) -> bool:
    """Whether the positions of a row's real tokens begin anew, so that its mask joins documents.

    A mask of other dimensions says itself which tokens see each other.
    """
    if getattr(mask, "ndim", 0) != 2 or mask.shape[1] != positions_ABS.shape[2]:
        return False
    real_BS, positions_BS = torch.broadcast_tensors(mask != 0, positions_ABS[0])
    before_BS = positions_BS.masked_fill(~real_BS, -1).cummax(1).values
    # the tokens of an image stand at one time
    same = len(positions_ABS) > 1
    anew_BS = positions_BS[:, 1:] + same <= before_BS[:, :-1]
    return bool((real_BS[:, 1:] & anew_BS).any())


def _documents_meet(
    model: Any, inputs: Mapping[str, Any], device: torch.device, rows: int, axes: int
) -> bool | None:
    """Whether a document of a packed row sees the tokens of another one, in a small batch.

    None if NaN hides it. A part that adds nothing yet, as in a grown layer, counts as trained.
    """
    texts = [5, 4, 3, 2, 1, 2, 3], [1, 2, 3, 4, 5, 4, 3, 2]
    packer = DataCollatorWithFlattening(
        return_flash_attn_kwargs="cu_seq_lens_q" in inputs, return_seq_idx="seq_idx" in inputs
    )
    packed = packer([{"input_ids": text} for text in texts], return_tensors="pt")
    packed = {
        name: x.to(device).repeat(*(rows, 1)[: x.ndim]) if isinstance(x, Tensor) else x
        for name, x in packed.items()
        if name != "labels"
    }
    if axes > 1:
        packed["position_ids"] = packed["position_ids"].expand(axes, -1, -1)
    first_S = torch.arange(sum(map(len, texts))) < len(texts[0])
    with no_zeros(model):
        found = [sees(model, packed, at_S, ~at_S) for at_S in (first_S, ~first_S)]
    return None if None in found else any(found)


def check_causal(model: Any) -> None:
    """Check that no token of a causal model sees the tokens after it.

    An encoder that was loaded in its ...LMHeadModel class with is_decoder=False sees them. It would
    learn to copy the labels.
    """
    inputs = tokens_to_try(model)
    first_S = torch.arange(inputs["input_ids"].shape[1]) == 0
    if sees(model, inputs, first_S, ~first_S):
        raise GrowthError(
            f"{type(model).__name__} is trained to predict the next token, but its tokens see the "
            "tokens after them: set config.is_decoder=True, or use the ...ForMaskedLM class"
        )


# ------------------------------------------------------------------- probes


def sees(model: Any, inputs: dict[str, Any], at_S: Tensor, others_S: Tensor) -> bool | None:
    """Whether what a model computes at some positions depends on tokens at others, (S,) bool each.

    None if NaN hides it.
    """
    try:
        return _gradient_reaches(model, inputs, at_S, others_S)
    except RuntimeError:
        # weights loaded in inference mode, or quantised ones whose kernels have no gradient
        return _tokens_change(model, inputs, at_S, others_S)


def _hidden(model: Any, inputs: dict[str, Any], at_S: Tensor) -> Tensor:
    """The hidden states before the output projection at some positions, (B, P, H)."""
    # a copy: the model gives its head a slice, and FSDP2 warns of outputs that are views
    with head_swap(model, lambda hidden, _weight, _bias: hidden.clone()):
        # as logits: a sharded model gathers its parameters when its outputs get gradients
        return take_logits(model(**inputs))[:, at_S]


def _gradient_reaches(
    model: Any, inputs: dict[str, Any], at_S: Tensor, others_S: Tensor
) -> bool | None:
    """Whether hidden states depend on the embeddings of other tokens.

    The gradient is exactly 0 if they do not, in any dtype. Two runs differ by rounding in a mixture
    of experts: an expert's matrix product rounds by the number of tokens that it gets.
    """
    seen: list[Tensor] = []

    def watch(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        seen.append(output.detach().requires_grad_())
        # a model may scale its embeddings in place, which a leaf refuses
        return seen[0].clone()

    with probing(model), torch.inference_mode(False), torch.enable_grad():
        with model.get_input_embeddings().register_forward_hook(watch):
            hidden_BPH = _hidden(model, inputs, at_S).float()
        # random directions: the sum over a LayerNorm's output does not depend on its input
        rng = torch.Generator().manual_seed(0)
        way_PH = torch.randn(hidden_BPH.shape[1:], generator=rng).to(hidden_BPH.device)
        (gradient,) = torch.autograd.grad((hidden_BPH * way_PH).sum(), seen[0])
    # Longformer adds padding to whole windows
    gradient = gradient[:, : len(others_S)][:, others_S]
    return None if gradient.isnan().any() else bool(gradient.any())


def _tokens_change(
    model: Any, inputs: dict[str, Any], at_S: Tensor, others_S: Tensor
) -> bool | None:
    """Whether hidden states change with other tokens."""
    ids_BS = inputs["input_ids"]
    changed_BS = ids_BS + others_S.to(ids_BS.device)
    with probing(model):
        first, second = (
            _hidden(model, {**inputs, "input_ids": x_BS}, at_S) for x_BS in (ids_BS, changed_BS)
        )
    return None if first.isnan().any() else not torch.equal(first, second)
