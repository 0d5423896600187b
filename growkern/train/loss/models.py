"""The models that `inherited_loss` takes: their kinds, their checks and their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as SEQ_TO_SEQ,
)

from growkern.errors import GrowthError
from growkern.growth.source.live import QUANTISED
from growkern.ops.loss.rows.inputs import check_columns
from growkern.ops.loss.rows.options import LossCall
from growkern.train.distributed.shard import check_sharding
from growkern.train.loss.context import as_known
from growkern.train.loss.inheritance import check_same_objective
from growkern.train.loss.router import check_router
from growkern.train.loss.vocabulary import GIVE_SIZE, check_vocabulary, columns_of, least
from growkern.train.model.head import (
    check_causal,
    check_head,
    evaluating,
    softcap_of,
    teacher_inputs,
)
from growkern.train.model.load import PRETRAINING, is_causal
from growkern.train.model.projection import HeadInputs, is_linear, projected

# models that passed the checks, by the part that they play
_checked: dict[str, WeakSet[Any]] = {"model": WeakSet(), "teacher": WeakSet()}
# teacher -> student with its vocabulary -> tokens that the teacher knows, None for all
_known: WeakKeyDictionary[Any, WeakKeyDictionary[Any, int | None]] = WeakKeyDictionary()


def is_pair(model: Any) -> bool:
    """Whether a model is given as a tuple of hidden states and output projection."""
    return isinstance(model, tuple) and len(model) == 2 and isinstance(model[0], Tensor)


def head_of_pair(pair: tuple[Tensor, Any]) -> HeadInputs:
    """The hidden states, the weight and the bias of a pair."""
    hidden, head = pair
    if isinstance(head, Tensor):
        return HeadInputs(hidden, head, None)
    if is_linear(head):
        return projected(head, hidden)
    return HeadInputs(hidden, head.weight, getattr(head, "bias", None))


def as_list(teacher: Any) -> list[Any]:
    """The teachers of a list or tuple; one model or pair becomes a list of one."""
    several = isinstance(teacher, list | tuple) and not is_pair(teacher)
    return list(teacher) if several else [teacher]


def unwrapped(model: Any) -> Any:
    """The model inside DistributedDataParallel.

    Raises:
        GrowthError: the whole model was compiled.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    if isinstance(model, OptimizedModule):
        raise GrowthError(
            "the whole model was compiled, which fails on the fused loss: compile its blocks "
            "instead, with `block.compile()` for each"
        )
    return model


def is_two_stacks(model: Any) -> bool:
    """Whether a model has an encoder and a decoder that predicts the labels, as T5 and BART do."""
    if is_pair(model):
        return False
    inner = unwrapped(model)
    names = {cls.__name__ for cls in type(inner).__mro__}
    return inner.config.is_encoder_decoder and bool(names & set(SEQ_TO_SEQ.values()))


def shifts_labels(model: Any, causal: bool | None) -> bool:
    """Whether labels move one place to the left to the position that predicts them.

    Args:
        model: in training.
        causal: for a pair: whether it predicts the next token.
    """
    if is_pair(model):
        return bool(causal)
    # a decoder beside an encoder reads its labels moved to the right
    return not is_two_stacks(model) and is_causal(unwrapped(model))


def softcap(model: Any) -> float | None:
    """The softcap of a model's logits; None without one and for a pair."""
    return None if is_pair(model) else softcap_of(unwrapped(model))


def inputs_of(model: Any, inputs: dict[str, Any], labels_BS: Tensor) -> dict[str, Any]:
    """The inputs of a model, with the decoder's tokens if it has an encoder too.

    Args:
        model: in training, or a teacher.
        inputs: of the batch, without labels.
        labels_BS: (B, S) int64, aligned.
    """
    given = {"decoder_input_ids", "decoder_inputs_embeds"} & set(inputs)
    if given or not is_two_stacks(model):
        return inputs
    # each model has its own start token
    ids_BS = unwrapped(model).prepare_decoder_input_ids_from_labels(labels=labels_BS)
    return {**inputs, "decoder_input_ids": ids_BS}


@torch.no_grad()
def predict(
    teacher: Any, inputs: dict[str, Any], labels_BS: Tensor, known: int | None = None
) -> HeadInputs:
    """Run a teacher up to its output projection, in evaluation mode.

    Args:
        teacher: a model or a pair.
        inputs, labels_BS: as in `inputs_of`.
        known: tokens that the teachers know; None: all.
    """
    if is_pair(teacher):
        hidden, weight, bias = head_of_pair(teacher)
        return HeadInputs(hidden.detach(), weight.detach(), None if bias is None else bias.detach())
    inner = unwrapped(teacher)
    # the teacher may be the model in training
    with evaluating(inner):
        return teacher_inputs(inner, as_known(inputs_of(inner, inputs, labels_BS), known))


# ------------------------------------------------------------------- checks


def check_model(model: Any, causal: bool, *, tensor_parallel: bool = False) -> None:
    """Refuse a model that would be trained wrongly.

    Args:
        model: a ...ForMaskedLM or ...ForCausalLM model.
        causal: whether it predicts the next token.
        tensor_parallel: whether the processes of a group see the same batches.

    Raises:
        GrowthError: the model is quantised or without memory; it was sharded in a way that does
            not train right; its tokens see the tokens that they predict; or its router has a loss
            of another kind.
    """
    name = type(model).__name__
    check_sharding(model, "model", tensor_parallel=tensor_parallel)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise GrowthError(f"{name} is on the meta device: load its weights before training")
    converted = any(type(module).__module__.startswith(QUANTISED) for module in model.modules())
    if converted or getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None):
        raise GrowthError(
            f"{name} is quantised: its weights cannot be trained. Load it without "
            "quantization_config, or use it as the teacher"
        )
    check_router(model)
    if causal:
        check_causal(model)


def check_models(
    model: Any,
    teachers: Sequence[Any],
    *,
    vocab_size: int | None = None,
    known: int | None = None,
) -> int | None:
    """Check each model once, when it is first seen.

    Args:
        model: in training.
        teachers: models and pairs.
        vocab_size: columns that mean the same token in all; None compares the vocabularies.
        known: the tokens that all teachers know, if the caller says it.

    Returns:
        The tokens that all teachers know; None if these are all of the student's, as far as known.

    Raises:
        GrowthError: something is not a model; the student would be trained wrongly; or a teacher
            has another objective or vocabulary than the student, or fewer tokens than are said.
    """
    _check_type("model", model)
    if not is_pair(model):
        _check_student(unwrapped(model))
    found = []
    for teacher in teachers:
        _check_type("teacher", teacher)
        if not is_pair(teacher):
            _check_teacher(unwrapped(teacher), model)
            if vocab_size is None and not is_pair(model):
                found.append(_known_tokens(unwrapped(teacher), unwrapped(model)))
    known = least(found) if known is None else known
    if not any(is_pair(one) for one in (model, *teachers)):
        # before a teacher runs, and meets a token that it does not have
        width, *widths = [columns_of(unwrapped(one)) for one in (model, *teachers)]
        check_columns(LossCall(vocab_size=vocab_size, teacher_vocab_size=known), width, widths)
    return known


def _check_type(name: str, model: Any) -> None:
    if is_pair(model):
        head = model[1]
        if isinstance(head, Tensor) or isinstance(getattr(head, "weight", None), Tensor):
            return
        found = f"a pair with a {type(head).__name__}"
    elif isinstance(unwrapped(model), PreTrainedModel):
        return
    else:
        found = f"a {type(unwrapped(model)).__name__}"
    if isinstance(model, str):
        found += " (load it first: AutoModelForCausalLM.from_pretrained(...))"
    raise GrowthError(
        f"{name} is {found}: give a language model of transformers itself, without a module "
        "around it but DistributedDataParallel (of a PeftModel its base_model.model), or a tuple "
        "(hidden states, output projection)"
    )


def _check_student(inner: Any) -> None:
    if inner in _checked["model"]:
        return
    if {cls.__name__ for cls in type(inner).__mro__} & set(PRETRAINING):
        raise GrowthError(
            f"{type(inner).__name__} has a second loss, which inherited_loss would leave out: "
            "train it with TwoStageTrainer, or give a ...ForMaskedLM model"
        )
    causal = not is_two_stacks(inner) and is_causal(inner)
    check_model(inner, causal, tensor_parallel=True)
    check_head(inner)
    _checked["model"].add(inner)


def _check_teacher(inner: Any, model: Any) -> None:
    if not is_pair(model):
        name = f"the teacher ({type(inner).__name__})"
        if is_two_stacks(inner) != is_two_stacks(model):
            raise GrowthError(
                f"{name} and the student ({type(unwrapped(model)).__name__}) differ: one of them "
                "has an encoder beside its decoder. Choose a teacher with the student's objective"
            )
        if not is_two_stacks(inner):
            check_same_objective(name, inner, is_causal(unwrapped(model)))
    if inner in _checked["teacher"]:
        return
    check_head(inner)
    if not is_two_stacks(inner) and is_causal(inner):
        check_causal(inner)
    _checked["teacher"].add(inner)


def _known_tokens(teacher: Any, student: Any) -> int | None:
    students = _known.setdefault(teacher, WeakKeyDictionary())
    if student not in students:
        name = f"the teacher ({type(teacher).__name__})"
        students[student] = check_vocabulary(name, student, teacher, None, GIVE_SIZE)
    return students[student]
