"""The loss of one batch with teachers, in one call, for any training loop, and its models.

The auxiliary loss of a mixture of experts asks that all experts be used alike. Over the N real
tokens of all layers, with f_e the share of them that chose expert e and P_e the mean probability of
e, a mixture of E experts adds

    E sum_e f_e P_e                                                                        (1)

f_e has no gradient. Processes that share out a batch add up their f_e first. The sum of their terms
is then the term of one process with all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as SEQ_TO_SEQ,
)

from growkern.arguments import as_list, check_kind
from growkern.errors import GrowthError
from growkern.growth.models import QUANTISED
from growkern.ops.loss import (
    LABEL_OPTIONS,
    InheritedKeywords,
    LossCall,
    LossParts,
    check_columns,
    public,
)
from growkern.train.distributed import check_sharding, check_split_teacher
from growkern.train.loss.batch_rows import ROW_OPTIONS, LossRows, as_known, real_rows, take_rows
from growkern.train.loss.inheritance import (
    GIVE_SIZE,
    check_same_objective,
    check_vocabulary,
    columns_of,
    least,
    loss_beside,
)
from growkern.train.model import (
    IGNORE_INDEX,
    PRETRAINING,
    HeadInputs,
    align_labels,
    check_causal,
    check_head,
    head_options,
    head_swap,
    inside_ddp,
    is_causal,
    is_experts,
    is_linear,
    probe_inputs,
    probing,
    projected,
    run_model,
    take_logits,
    teacher_inputs,
    teacher_options,
)
from growkern.train.rules import check

if TYPE_CHECKING:
    from typing_extensions import Unpack

# models that passed the checks, by the part that they play
_checked: dict[str, WeakSet[Any]] = {"model": WeakSet(), "teacher": WeakSet()}
# teacher -> student with its vocabulary -> tokens that the teacher knows, None for all
_known: WeakKeyDictionary[Any, WeakKeyDictionary[Any, int | None]] = WeakKeyDictionary()


@overload
def inherited_loss(
    model: Any, teacher: Any, batch: Mapping[str, Any], *,
    return_parts: Literal[False] = False, **options: Unpack[InheritedKeywords],
) -> Tensor: ...  # fmt: skip


@overload
def inherited_loss(
    model: Any, teacher: Any, batch: Mapping[str, Any], *,
    return_parts: Literal[True], **options: Unpack[InheritedKeywords],
) -> tuple[Tensor, LossParts]: ...  # fmt: skip


@public(InheritedKeywords, explained=LABEL_OPTIONS)
def inherited_loss(
    model: Any,
    teacher: Any,
    batch: Mapping[str, Any],
    *,
    causal: bool | None = None,
    return_parts: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, LossParts]:
    """(1 - alpha) times the cross-entropy of the labels, plus alpha times the KL from the teachers.

    Runs the models and `linear_kl_mlm_loss`. No logits are made: while the model runs, the loss
    takes the place of its output projection. Call it where you would call the model: under
    autocast, on a model that DistributedDataParallel or accelerate wrapped, that `fully_shard`
    sharded, or whose blocks are compiled. All processes of a tensor-parallel group
    (`from_pretrained(..., tp_plan="auto")`) pass the same batch and get the same loss.

    A mixture of experts whose config has `output_router_logits=True` adds `router_aux_loss_coef`
    times the auxiliary loss of its routers, as in transformers. With `num_items` this term counts
    by the batch's share of the labels. Teachers add none.

    Args:
        model: a ...ForMaskedLM or ...ForCausalLM model; a model of an encoder and a decoder such
            as T5ForConditionalGeneration; or a tuple (hidden states (B, S, H), output projection).
            The projection is a linear module or its weight (V, H). It runs without a cache of keys
            and values, and its config is not changed.
        teacher: the same; a list of them; or None to train on the labels alone. Teachers run
            without gradients and in evaluation mode. One that is tensor-parallel beside a whole
            model has its head gathered for each batch. The root of a sharded teacher must keep its
            parameters after its forward pass (`reshard_after_forward` unset).
        batch: {input_ids, labels, ...}, (B, S) each. Labels of causal models are not shifted. With
            an encoder and a decoder the labels belong to the decoder, and each model makes its
            decoder_input_ids of them if the batch has none. A row may hold several documents whose
            position_ids begin anew, without an attention_mask; a model in which they see each other
            is refused.
        alpha: share of the KL term, in [0, 1]. No teacher runs if it is the number 0.
        temperature: of the softmax in the KL term.
        num_items: the number by which the sum over rows is divided: the labels of the whole
            accumulated batch, of all processes (`count_labels`). Multiply the loss by the number of
            processes then, because DistributedDataParallel and FSDP average the gradients. A pair
            holds the rows of either term. None takes the rows of this batch.
        divergence, beta: as in `InheritanceSchedule`.
        kl_rows: rows with a KL term: "labels", or "all" for every real token. A decoder beside an
            encoder needs a decoder_attention_mask for "all".
        teacher_weights: one per teacher, with sum 1; None weighs all alike.
        row_weights: (B, S) float, the weight of each label. Not shifted. A label of weight 0 still
            counts in the number that the loss is divided by; a masked label does not.
        vocab_size: columns that mean the same token in all models; later columns are padding. None:
            the tokenizers beside the models, or else their special ids and
            families, must agree.
        teacher_vocab_size: tokens that the teachers know, if the student has more. A row whose
            label or context holds a later token has no KL term, and the KL of other rows is over
            the teachers' tokens alone. None: the tokenizers beside the models tell it.
        max_rows: at least the number of rows with a term, counted on the CPU. A GPU then spends
            nothing on the others.
        causal: for a pair only: whether it predicts the next token. None: its labels are aligned
            with its hidden states already.
        return_parts: whether to return the parts of the loss too.
        **options: those of `LossCall`.

    Returns:
        The loss, 0-d; with `return_parts` also the parts. A batch without a single row with a term
        gives 0 and zero gradients, so that a loop may add it to others. Leave such batches out of
        the mean that you print.

    Raises:
        GrowthError: models, batch or options that do not fit together, or a model that would be
            trained wrongly.
    """
    teachers = [teacher] if is_pair(teacher) else as_list(teacher)
    teachers = [] if teacher is None else teachers
    width, known = options["vocab_size"], options["teacher_vocab_size"]
    known = check_models(model, teachers, vocab_size=width, known=known)
    check_kind("batch", batch, Mapping, "a mapping with input_ids and labels")
    causal = shifts_labels(model, causal)
    alpha = options["alpha"] if teachers else 0.0
    inputs = dict(batch)
    runs = isinstance(alpha, Tensor) or alpha != 0
    known = known if runs else None
    of_rows = {name: options[name] for name in ROW_OPTIONS}
    rows = take_rows(inputs, **of_rows, causal=causal, decoder=is_two_stacks(model), known=known)
    # without a KL term no teacher runs
    read = [predict(x, inputs, rows.labels_BS, known) for x in teachers] if runs else []
    loss_function = loss_beside(read, teacher_options(map(_inner, teachers)))
    options |= {
        **rows.options(),
        **head_options(_inner(model)),
        **{"alpha": alpha, "teacher_vocab_size": known, "return_parts": True},
    }
    seen: list[LossParts] = []

    def loss_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        loss, parts = loss_function(hidden, weight, student_bias=bias, **options)
        seen.append(parts)
        return loss

    if is_pair(model):
        loss = loss_of(*head_of_pair(model))
    else:
        inputs = inputs_of(model, inputs, rows.labels_BS)
        inner = inside_ddp(model)
        swap = head_swap(inner, loss_of)
        outputs = run_model("model", model, inputs | router_inputs(inner), swap)
        loss, aux = _with_router(take_logits(outputs), inner, outputs, batch, rows, options)
        seen[0] = seen[0]._replace(aux_loss=aux)
    return (loss, seen[0]) if return_parts else loss


def _with_router(
    loss: Tensor,
    model: Any,
    outputs: Any,
    batch: Mapping[str, Any],
    rows: LossRows,
    options: Mapping[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """The loss with that of a mixture's routers; and that one, None if there is none."""
    if not (weight := router_weight(model)):
        return loss, None
    of_batch = router_term(model, outputs, real_rows(batch, rows.labels_BS, causal=False))
    if of_batch is None:
        return loss, None
    aux = of_batch.mean()
    term, num_items = weight * aux, options["num_items"]
    if num_items is not None:
        # by the share of the labels of the whole accumulated batch
        every = num_items[0] if isinstance(num_items, tuple) else num_items
        term = term * (rows.labels_BS != IGNORE_INDEX).sum() / every
    return loss + term, aux.detach()


def count_labels(
    batches: Iterable[Mapping[str, Any]], model: Any = None, *, causal: bool | None = None
) -> Tensor:
    """The number of labels of an accumulated batch, by which its loss is divided.

    Args:
        batches: {labels, ...}, of this process.
        model: the model in training; a causal one does not predict the first label of a row.
        causal: whether the model predicts the next token, if no model is given.

    Returns:
        0-d int64, on the device of the labels. Add it up over all processes.
    """
    check_kind("batches", batches, Iterable, "the batches of a step, in a list")
    causal = bool(causal) if model is None else shifts_labels(model, causal)
    counts = [(align_labels(b["labels"], causal=causal) != IGNORE_INDEX).sum() for b in batches]
    return torch.stack(counts).sum()


# ------------------------------------------------------------------- models


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


def is_two_stacks(model: Any) -> bool:
    """Whether a model has an encoder and a decoder that predicts the labels, as T5 and BART do."""
    if is_pair(model):
        return False
    inner = inside_ddp(model)
    names = {cls.__name__ for cls in type(inner).__mro__}
    return inner.config.is_encoder_decoder and bool(names & set(SEQ_TO_SEQ.values()))


def shifts_labels(model: Any, causal: bool | None) -> bool:
    """Whether labels move one place to the left to the position that predicts them.

    Of a pair it has to be said, by `causal`.
    """
    if is_pair(model):
        return bool(causal)
    # a decoder beside an encoder reads its labels moved to the right
    return not is_two_stacks(model) and is_causal(inside_ddp(model))


def _inner(model: Any) -> Any | None:
    """The model inside; None for a pair."""
    return None if is_pair(model) else inside_ddp(model)


def inputs_of(model: Any, inputs: dict[str, Any], labels_BS: Tensor) -> dict[str, Any]:
    """The inputs of a model, with the decoder's tokens if it has an encoder too.

    The labels (B, S) are aligned.
    """
    given = {"decoder_input_ids", "decoder_inputs_embeds"} & set(inputs)
    if given or not is_two_stacks(model):
        return inputs
    # each model has its own start token
    ids_BS = inside_ddp(model).prepare_decoder_input_ids_from_labels(labels=labels_BS)
    return {**inputs, "decoder_input_ids": ids_BS}


@torch.no_grad()
def predict(
    teacher: Any, inputs: dict[str, Any], labels_BS: Tensor, known: int | None = None
) -> HeadInputs:
    """Run a teacher, a model or a pair, up to its output projection, in evaluation mode."""
    if is_pair(teacher):
        hidden, weight, bias = head_of_pair(teacher)
        return HeadInputs(hidden.detach(), weight.detach(), None if bias is None else bias.detach())
    inner = inside_ddp(teacher)
    return teacher_inputs(inner, as_known(inputs_of(inner, inputs, labels_BS), known))


# ------------------------------------------------------------------- checks


def check_model(model: Any, causal: bool, *, tensor_parallel: bool = False) -> None:
    """Refuse a model that would be trained wrongly.

    It is quantised or without memory; it was sharded in a way that does not train right; its tokens
    see the tokens that they predict; it has a second head with a loss of its own; or its router
    has a loss of another kind. With
    `tensor_parallel` the processes of a group see the same batches.
    """
    name = type(model).__name__
    if {cls.__name__ for cls in type(model).__mro__} & set(PRETRAINING):
        raise GrowthError(
            f"{name} has a second loss, which this training would leave out: give a "
            "...ForMaskedLM model"
        )
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
    """Check each model once, when it is first seen: kinds, heads, objectives and vocabularies.

    Args:
        teachers: models and pairs.
        vocab_size: columns that mean the same token in all; None compares the vocabularies.
        known: the tokens that all teachers know, if the caller says it.

    Returns:
        The tokens that all teachers know; None if these are all of the student's, as far as known.
    """
    _check_type("model", model)
    if not is_pair(model):
        _check_student(inside_ddp(model))
    sizes = []
    for teacher in teachers:
        _check_type("teacher", teacher)
        if not is_pair(teacher):
            _check_teacher(inside_ddp(teacher), model)
            if vocab_size is None and not is_pair(model):
                sizes.append(_known_tokens(inside_ddp(teacher), inside_ddp(model)))
    known = least(sizes) if known is None else known
    if not any(is_pair(one) for one in (model, *teachers)):
        # before a teacher runs, and meets a token that it does not have
        width, *widths = [columns_of(inside_ddp(x)) for x in (model, *teachers)]
        check_columns(LossCall(vocab_size=vocab_size, teacher_vocab_size=known), width, widths)
    return known


def _check_type(name: str, model: Any) -> None:
    if is_pair(model):
        head = model[1]
        if isinstance(head, Tensor) or isinstance(getattr(head, "weight", None), Tensor):
            return
        kind = f"a pair with a {type(head).__name__}"
    elif isinstance(inside_ddp(model), PreTrainedModel):
        return
    else:
        kind = f"a {type(inside_ddp(model)).__name__}"
    if isinstance(model, str):
        kind += " (load it first: AutoModelForCausalLM.from_pretrained(...))"
    raise GrowthError(
        f"{name} is {kind}: give a language model of transformers itself, without a module "
        "around it but DistributedDataParallel (of a PeftModel its base_model.model), or a tuple "
        "(hidden states, output projection)"
    )


def _check_student(inner: Any) -> None:
    if inner in _checked["model"]:
        return
    check_model(inner, not is_two_stacks(inner) and is_causal(inner), tensor_parallel=True)
    check_head(inner)
    _checked["model"].add(inner)


def check_prediction(name: str, teacher: Any, model: Any) -> None:
    """Check that a teacher predicts the same tokens as the model in training."""
    names = {"teacher": type(teacher).__name__, "model": type(model).__name__}
    check("kinds", stacks=(is_two_stacks(teacher), is_two_stacks(model)), **names)
    if not is_two_stacks(model):
        check_same_objective(name, is_causal(teacher), is_causal(model))


def _check_teacher(inner: Any, model: Any) -> None:
    if not is_pair(model):
        check_prediction(f"the teacher ({type(inner).__name__})", inner, inside_ddp(model))
    if inner in _checked["teacher"]:
        return
    check_head(inner)
    if not is_two_stacks(inner) and is_causal(inner):
        check_causal(inner)
    if not is_pair(model):
        check_split_teacher(inner, model)
    _checked["teacher"].add(inner)


def _known_tokens(teacher: Any, student: Any) -> int | None:
    students = _known.setdefault(teacher, WeakKeyDictionary())
    if student not in students:
        name = f"the teacher ({type(teacher).__name__})"
        students[student] = check_vocabulary(name, student, teacher, None, GIVE_SIZE)
    return students[student]


class EvaluationSums:
    """Adds up an evaluation, whose loss is a mean over labels, not batches; NaN without any."""

    def __init__(self) -> None:
        # loss, labels
        self._sums: Tensor | float = 0.0

    def add(self, loss_BS: Tensor, labelled_B: Tensor, accelerator: Any) -> None:
        """Add a batch: its loss, and the labels of each example."""
        columns = [loss_BS.double().sum(1), labelled_B.double()]
        # per example, so that the duplicates that fill up the last batch can be dropped
        rows_BC = accelerator.gather_for_metrics(torch.stack(columns, 1))
        self._sums = rows_BC.sum(0) + self._sums

    def write(self, metrics: dict[str, float], prefix: str, sets: Any) -> None:
        """Write the loss of the evaluation into the metrics of Trainer, with a prefix.

        Of several sets of data, the loss of the first is `eval_loss` too.
        """
        loss, labels = self._sums.tolist() if isinstance(self._sums, Tensor) else (0.0, 0.0)
        metrics[f"{prefix}_loss"] = mean = loss / labels if labels else math.nan
        if isinstance(sets, dict) and prefix == f"eval_{next(iter(sets), '')}":
            # the one that plots and the choice of the best model look at
            metrics["eval_loss"] = mean


# ------------------------------------------------------------------- of routers


class RouterTerm(NamedTuple):
    """(1) times the number of real tokens, and that number; of the rows of this process."""

    loss: Tensor
    tokens: Tensor

    def mean(self) -> Tensor:
        """(1), of these rows."""
        return self.loss / self.tokens.clamp(min=1)


def router_weight(model: Any) -> float:
    """The factor of (1) in the loss of a model, 0 if its config does not ask for this loss."""
    return float(model.config.get_text_config().router_aux_loss_coef) if _asks(model) else 0.0


def _asks(model: Any) -> bool:
    return bool(getattr(model.config.get_text_config(), "output_router_logits", False))


def router_inputs(model: Any) -> dict[str, bool]:
    """Inputs without which a model fails whose config asks for (1), but of which no router runs.

    In stage 1 the layers that run may all be dense.
    """
    if not _asks(model):
        return {}
    # a list shows the layers that run, and modules() all
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    runs = any(is_experts(m) for stack in stacks for layer in stack for m in layer.modules())
    is_off = not runs and any(map(is_experts, model.modules()))
    return {"output_router_logits": False} if is_off else {}


def router_term(
    model: Any,
    outputs: Any,
    real_BS: Tensor,
    add_up: Callable[[Tensor], Tensor] = lambda x: x,
) -> RouterTerm | None:
    """The term of a batch, None if no layer that ran has a router.

    The outputs lose their own auxiliary loss. `add_up` sums a tensor over all processes.
    """
    outputs.aux_loss = None
    if not outputs.router_logits:
        return None
    layers, chosen = outputs.router_logits, model.config.get_text_config().num_experts_per_tok
    real_N1 = real_BS.reshape(-1, 1).to(layers[0].device)
    counts_E: Any = 0.0
    sums_E: Any = 0.0
    for logits_NE in layers:
        wide = torch.promote_types(logits_NE.dtype, torch.float32)
        p_NE = logits_NE.to(real_N1.device).softmax(-1, wide) * real_N1
        used_NE = torch.zeros_like(p_NE).scatter_(1, p_NE.topk(chosen).indices, 1.0)
        counts_E = counts_E + (used_NE * real_N1).sum(0)
        sums_E = sums_E + p_NE.sum(0)
    tokens = real_N1.sum()
    everywhere = add_up(torch.cat([counts_E, tokens[None]]))
    shares_E = everywhere[:-1] / everywhere[-1].clamp(min=1)
    return RouterTerm(len(shares_E) * (shares_E * sums_E).sum() / len(layers) ** 2, tokens)


def count_tokens(batch: Mapping[str, Any]) -> Tensor:
    """The real tokens of a batch with its labels, 0-d. A batch that only fills up has none."""
    return real_rows(batch, batch["labels"], causal=False).sum()


def check_router(model: Any) -> None:
    """Refuse a model whose config asks for an auxiliary loss that it lacks, or that is not (1)."""
    # of a stage 1 whose layers are all dense nothing can be told
    if not _asks(model) or router_inputs(model):
        return
    config = model.config.get_text_config()
    inputs = probe_inputs(model)
    with probing(model):
        outputs = model(**inputs, output_router_logits=True)
    loss = getattr(outputs, "aux_loss", None)
    has_names = hasattr(config, "router_aux_loss_coef") and hasattr(config, "num_experts_per_tok")
    if isinstance(loss, Tensor) and has_names:
        term = router_term(model, outputs, torch.ones_like(inputs[model.main_input_name]))
        # transformers rounds the probabilities to the dtype of the weights
        if term and torch.allclose(mine := term.mean(), loss.to(mine), rtol=0.02):
            return
    raise GrowthError(
        f"{type(model).__name__} has config.output_router_logits=True, but its router's loss is "
        "not the one of Mixtral and its relatives, and inherited_loss would leave it out: set "
        "config.output_router_logits=False to train without it"
    )
