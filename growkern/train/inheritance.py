"""Learning from the old model while growing past it: the schedule and the frozen teachers.

Knowledge Inheritance (Qin et al. 2022, Eq. 5) mixes the teacher's KL into the loss with a rate

    r_t = max(0, r_0 * (1 - t / S_d))                                        (1)

over optimizer steps t. From t = S_d on the rate is 0 and no teacher runs at all.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from growkern.errors import GrowthError
from growkern.ops.loss.linear_kl_mlm_loss import linear_kl_mlm_loss
from growkern.train.head import HeadInputs, check_head, head_inputs, softcap_of

KLRows = Literal["labels", "all"]


@dataclass(frozen=True)
class InheritanceSchedule:
    """How much, how long and where the student follows its teachers.

    rate: r_0 in [0, 1]. end_step: S_d, the optimizer step from which the teacher is gone.
    temperature: T of the KL. kl_rows: "labels" (rows with a label) or "all" (every real token).
    teacher_weights: one weight per teacher, summing to 1; equal when None.
    """

    rate: float = 1.0
    end_step: int = 0
    temperature: float = 2.0
    kl_rows: KLRows = "labels"
    teacher_weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise GrowthError(f"inheritance rate is {self.rate}: it must be in [0, 1]")
        if self.end_step < 1:
            raise GrowthError(
                f"inheritance end_step is {self.end_step}: give the optimizer step at which the "
                "rate reaches 0 (0.44 of all steps is a good start)"
            )
        if self.temperature <= 0:
            raise GrowthError(f"inheritance temperature is {self.temperature}: it must be positive")
        if self.kl_rows not in ("labels", "all"):
            raise GrowthError(f"kl_rows is {self.kl_rows!r}: 'labels' or 'all'")
        if self.teacher_weights is not None and abs(sum(self.teacher_weights) - 1) > 1e-6:
            raise GrowthError(f"teacher_weights {self.teacher_weights} must sum to 1")

    def rate_at(self, step: int) -> float:
        """r_t of optimizer step t (counted from 0). (1)"""
        return max(0.0, self.rate * (1 - step / self.end_step))


class Teachers:
    """Frozen models that say, row by row, what they would have predicted."""

    def __init__(self, models: Sequence[Any], weights: Sequence[float] | None) -> None:
        self.models = list(models)
        if weights is not None and len(weights) != len(self.models):
            raise GrowthError(f"{len(weights)} teacher_weights for {len(self.models)} teachers")
        self.weights = None if weights is None or len(self.models) == 1 else list(weights)
        for model in self.models:
            check_head(model)
        softcaps = {softcap_of(model) for model in self.models}
        if len(softcaps) > 1:
            raise GrowthError(f"the teachers cap their logits at {softcaps}: they must do so alike")
        self.softcap = softcaps.pop() if softcaps else None

    def freeze(self, student: nn.Module, device: torch.device) -> None:
        """Move to the student's device, in eval mode, without gradients or caches."""
        trained = {id(parameter) for parameter in student.parameters()}
        for model in self.models:
            if any(id(parameter) in trained for parameter in model.parameters()):
                raise GrowthError(
                    "the teacher shares parameters with the model in training: pass a copy "
                    "(copy.deepcopy) or load it again"
                )
            model.to(device).eval().requires_grad_(False)
            model.config.use_cache = False

    def common_vocabulary(self, student: Any, tokenizer: Any | None) -> int | None:
        """Columns that mean the same token in every head; None when all heads have one size.

        Heads padded to different sizes agree on the tokenizer's ids only, so it has to be given.
        raises: GrowthError when the vocabularies cannot be matched.
        """
        heads = [model.get_output_embeddings().weight.shape[0] for model in (student, *self.models)]
        if len(set(heads)) == 1:
            return None
        if tokenizer is None or len(tokenizer) > min(heads):
            size = "no tokenizer" if tokenizer is None else f"a tokenizer of {len(tokenizer)} ids"
            raise GrowthError(
                f"student and teacher vocabularies differ: heads of {heads[0]} and {heads[1:]} "
                f"columns, {size}: pass processing_class if they only differ in padding, "
                "otherwise choose a teacher with the student's vocabulary"
            )
        return len(tokenizer)

    def collator(self, collator: Callable[[Any], Any], dataset: Any) -> Callable[[Any], Any]:
        """The run's own: teachers that run read what the student reads."""
        return collator

    def loss_function(self, inputs: dict[str, Any], alpha: float) -> Callable[..., Any]:
        """`linear_kl_mlm_loss` beside what the teachers say to a batch; at alpha 0 none runs."""
        return loss_beside(self.predict(inputs) if alpha > 0 else [], self.weights, self.softcap)

    @torch.no_grad()
    def predict(self, inputs: dict[str, Any]) -> list[HeadInputs]:
        """Hidden states, weight and bias of each teacher's output projection."""
        return [head_inputs(model, inputs) for model in self.models]


def loss_beside(
    predictions: Sequence[HeadInputs],
    weights: Sequence[float] | None = None,
    softcap: float | None = None,
) -> Callable[..., Any]:
    """`linear_kl_mlm_loss` that knows its teachers' part; of the labels alone where none ran."""
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


def check_tokenizers(student: Any, teachers: Sequence[Any]) -> None:
    """Refuse a teacher whose tokenizer gives a token another id: its columns mean other words."""
    expected = tokenizer_fingerprint(student)
    for number, teacher in enumerate(teachers):
        if tokenizer_fingerprint(teacher) != expected:
            raise GrowthError(
                f"teacher {number} has another tokenizer than the student "
                f"({len(teacher)} and {len(student)} tokens, or other ids): "
                "a teacher must share the student's vocabulary token by token"
            )


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash of the token-to-id table."""
    table = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(table.encode()).hexdigest()
