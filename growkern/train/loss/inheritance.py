"""Trains a student beside frozen teachers: how strongly, for how long, and the teachers themselves.

Knowledge Inheritance (Qin et al. 2022, Eq. 5) adds the KL divergence from the teacher to the loss.
Its share of the loss at optimizer step t is

    r_t = max(0, r_0 * (1 - t / S_d))                                        (1)

with the first rate r_0 and the end step S_d. From t = S_d on the rate is 0 and no teacher runs.
The paper compares this with a constant rate, and with one that drops from r_0 to 0 at S_d.

The paper's students begin at random, with r_0 = 1. A student that was grown from its teacher begins
with the teacher's predictions. At r_0 = 1 its first gradients are then nothing but rounding, which
Adam scales up to full steps. So r_0 is 0.5 by default: the labels' gradient is a hundred times the
rounding of bfloat16.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from growkern.arguments import POSITIVE, SHARE, Limit, check_fields
from growkern.errors import GrowthError
from growkern.ops.loss.linear_kl_mlm_loss import linear_kl_mlm_loss
from growkern.ops.loss.rows.options import Divergence, KLRows, Tail
from growkern.train.distributed.shard import is_sharded
from growkern.train.loss.context import as_known
from growkern.train.model.head import (
    check_causal,
    check_head,
    common_softcap,
    softcap_of,
    teacher_inputs,
)
from growkern.train.model.load import is_causal
from growkern.train.model.projection import HeadInputs
from growkern.train.objectives.language_modeling import Collator

Decay = Literal["linear", "constant", "switch"]


@dataclass(frozen=True)
class InheritanceSchedule:
    """How strongly, for how long and on which rows the student follows its teachers.

    Args:
        rate: the share of the KL term at step 0, in [0, 1]. Below 1 for a student that was grown
            from its teacher; the paper takes 1 for a student that begins at random.
        end_step: the optimizer step from which the share is 0; None with "constant".
        decay: of the share: "linear" falls in a straight line from `rate` to 0 at `end_step`;
            "constant" stays at `rate` to the end of the run; "switch" stays at `rate` up to
            `end_step`.
        temperature: of the softmax in the KL term.
        kl_rows: rows with a KL term: "labels" (rows with a label) or "all" (every real token).
        teacher_weights: one weight per teacher, with sum 1; None weighs all alike.
        divergence: between teacher p and student q: "forward" is KL(p || q), "reverse" is
            KL(q || p), "jsd" is the Jensen-Shannon divergence.
        beta: of "jsd", in (0, 1): small values are close to "forward". None takes 0.5.
        tail: of a teacher that is known by its k likeliest tokens, the use of its remaining
            probability. "bucket" compares it as a whole with the student's. "renormalise"
            distributes it over the k tokens, as Knowledge Inheritance does; its gradient is wrong
            where k is small. None is "bucket".

    Raises:
        GrowthError: a value is out of range.
    """

    LIMITS: ClassVar[dict[str, Limit]] = {
        "rate": SHARE,
        "temperature": POSITIVE,
        "beta": Limit(lambda x: 0 < x < 1, "lie in (0, 1)"),
    }

    rate: float = 0.5
    end_step: int | None = None
    temperature: float = 2.0
    kl_rows: KLRows = "labels"
    teacher_weights: tuple[float, ...] | None = None
    divergence: Divergence = "forward"
    beta: float | None = None
    decay: Decay = "linear"
    tail: Tail | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.decay == "constant":
            if self.end_step is not None:
                raise GrowthError(
                    "inheritance end_step is given, but a constant rate has no end: leave it out, "
                    "or set decay to 'switch'"
                )
        elif self.end_step is None or self.end_step < 1:
            raise GrowthError(
                f"inheritance end_step is {self.end_step}: give the optimizer step at which the "
                "rate reaches 0, for example 0.44 of all steps"
            )
        if self.teacher_weights is not None and not (abs(sum(self.teacher_weights) - 1) <= 1e-6):
            raise GrowthError(f"teacher_weights {self.teacher_weights} must sum to 1")
        if self.beta is not None and self.divergence != "jsd":
            raise GrowthError(
                f"beta is {self.beta} with divergence {self.divergence!r}: beta belongs to 'jsd'"
            )
        if self.tail == "renormalise" and self.divergence == "reverse":
            raise GrowthError(
                "divergence 'reverse' is infinite with tail 'renormalise', which gives probability "
                "0 to all but the k tokens: set tail to 'bucket'"
            )

    def rate_at(self, step: int) -> float:
        """The share of the KL term at an optimizer step, counted from 0. (1)"""
        if self.end_step is None:
            return self.rate
        if self.decay == "switch":
            return self.rate if step < self.end_step else 0.0
        return max(0.0, self.rate * (1 - step / self.end_step))


class Teachers:
    """Frozen models whose predictions the student learns to match.

    Args:
        models: with the same softcap; an empty list trains on the labels alone.
        weights: one per model, with sum 1; None weighs all alike.

    Attributes:
        known: tokens that all models know, if the student has further ones; else None.

    Raises:
        GrowthError: a model cannot be a teacher, or the models do not fit together.
    """

    def __init__(self, models: Sequence[Any], weights: Sequence[float] | None) -> None:
        self.models = list(models)
        if weights is not None and len(weights) != len(self.models):
            teachers = "1 teacher" if len(self.models) == 1 else f"{len(self.models)} teachers"
            raise GrowthError(
                f"{len(weights)} teacher_weights for {teachers}: give one weight per teacher"
            )
        self.weights = None if weights is None or len(self.models) == 1 else list(weights)
        for model in self.models:
            check_head(model)
        self.softcap = common_softcap(map(softcap_of, self.models))
        self.known: int | None = None

    def freeze(self, student: nn.Module, device: torch.device) -> None:
        """Move the teachers to a device and switch off dropout, gradients and caches.

        Raises:
            GrowthError: a teacher shares parameters with the student, or predicts tokens that it
                sees.
        """
        trained = {id(parameter) for parameter in student.parameters()}
        for model in self.models:
            if any(id(parameter) in trained for parameter in model.parameters()):
                raise GrowthError(
                    "the teacher shares parameters with the model in training: pass a copy "
                    "(copy.deepcopy), or load it a second time"
                )
            if not is_sharded(model):
                model.to(device)
            model.eval().requires_grad_(False)
            model.config.use_cache = False
            if not model.config.is_encoder_decoder and is_causal(model):
                check_causal(model)

    def check_objective(self, causal: bool) -> None:
        """Check that the teachers predict the same tokens as the student.

        Args:
            causal: whether the student predicts the next token.

        Raises:
            GrowthError: a teacher predicts masked tokens and the student the next, or vice versa.
        """
        for number, model in enumerate(self.models):
            check_same_objective(f"teacher {number} ({type(model).__name__})", model, causal)

    def common_vocabulary(self, student: Any, tokenizer: Any | None) -> int | None:
        """The number of vocabulary columns of the student that are not padding.

        Heads that are padded to different sizes agree on the ids of the tokenizer only.

        Args:
            student: the model in training.
            tokenizer: of the student; only needed when the heads have different sizes.

        Returns:
            The number of columns, or None when all heads have the same size.

        Raises:
            GrowthError: the vocabularies cannot be matched.
        """
        heads = [model.get_output_embeddings().weight.shape[0] for model in (student, *self.models)]
        if len(set(heads)) == 1:
            return None
        differ = (
            f"student and teacher vocabularies differ: heads of {heads[0]} and {heads[1:]} columns"
        )
        if tokenizer is None:
            raise GrowthError(
                f"{differ}. If they differ in padding only, pass the tokenizer as processing_class"
            )
        if len(tokenizer) > heads[0]:
            raise GrowthError(
                f"{differ}, but the tokenizer has {len(tokenizer)} ids: the student must have all"
            )
        return len(tokenizer)

    def collator(self, collator: Collator, dataset: Any) -> Collator:
        """The collator as it is: teachers that run read the batches of the student."""
        return collator

    def loss_function(self, inputs: dict[str, Any], alpha: float) -> Callable[..., Any]:
        """The loss for a batch, after running the teachers on it.

        Args:
            inputs: of the models, without labels.
            alpha: share of the KL term; at 0 no teacher runs.

        Returns:
            `linear_kl_mlm_loss` with the arguments of the teachers filled in.
        """
        return loss_beside(self.predict(inputs) if alpha > 0 else [], self.weights, self.softcap)

    def predict(self, inputs: dict[str, Any]) -> list[HeadInputs]:
        """Run the teachers; hidden states, weight and bias of each output projection."""
        inputs = as_known(inputs, self.known)
        return [teacher_inputs(model, inputs) for model in self.models]


def loss_beside(
    predictions: Sequence[HeadInputs],
    weights: Sequence[float] | None = None,
    softcap: float | None = None,
) -> Callable[..., Any]:
    """`linear_kl_mlm_loss` with the arguments of the teachers filled in.

    Args:
        predictions: one per teacher; when empty, the loss is that of the labels alone.
        weights: one per teacher, with sum 1; None weighs all alike.
        softcap: of the teachers' logits.
    """
    if not predictions:
        return partial(linear_kl_mlm_loss, teacher_hidden=None, teacher_weight=None)
    hidden, weight, bias = (list(column) for column in zip(*predictions, strict=True))
    return partial(
        linear_kl_mlm_loss,
        teacher_hidden=hidden,
        teacher_weight=weight,
        teacher_bias=bias,
        teacher_weights=weights,
        teacher_softcap=softcap,
    )


def objective(causal: bool) -> str:
    """The objective of a model in words."""
    return "the next token" if causal else "masked tokens"


def check_same_objective(name: str, teacher: Any, causal: bool) -> None:
    """Check that a teacher has the objective of the student.

    Args:
        name: of the teacher, for the error message.
        teacher: a ...ForMaskedLM or ...ForCausalLM model.
        causal: whether the student predicts the next token.

    Raises:
        GrowthError: it has the other objective.
    """
    if is_causal(teacher) != causal:
        raise GrowthError(
            f"{name} predicts {objective(not causal)}, but the student predicts "
            f"{objective(causal)}: choose a teacher with the student's objective"
        )
