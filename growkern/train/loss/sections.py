"""Options of the loss in training, as sections of a run file and arguments of the trainer.

`python -m docs.options` copies meanings, types and defaults from those of the losses,
`growkern/ops/loss/rows/options.py`. Types and defaults that differ in training are declared here.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from growkern.arguments import SHARE, Limit, check_fields
from growkern.errors import GrowthError
from growkern.ops.loss import KL_OPTIONS, LABEL_OPTIONS, Divergence, KLRows, Tail
from growkern.ops.loss import LIMITS as LOSS_LIMITS
from growkern.train.rules import check

Decay = Literal["linear", "constant", "switch"]


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Options of the training loss. The loss of an evaluation is always plain cross-entropy.

    Give them by name. Options that concern a teacher are those of `growkern.InheritanceSchedule`.

    Args:
        label_smoothing: share of the label that is spread over the whole vocabulary, in [0, 1).
        z_loss: factor of the squared log of the softmax's denominator.
        row_weights: name of the key of the batches that holds one weight per label, (B, S) float.
            The loss is still divided by the number of labels, those of weight 0 included. To
            leave a label out of that number, mask it. None weighs all labels alike.

    Raises:
        GrowthError: a value is out of range.
    """

    LIMITS: ClassVar[dict[str, Limit]] = LOSS_LIMITS

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    row_weights: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def arguments(self) -> dict[str, float]:
        """The arguments of `growkern.inherited_loss`: all options but the name of the weights."""
        return {name: getattr(self, name) for name in LABEL_OPTIONS}

    def with_smoothing(self, factor: float) -> "LossOptions":
        """These options with the `label_smoothing_factor` of `transformers.TrainingArguments`.

        Raises:
            GrowthError: both are given and differ.
        """
        if factor in (0, self.label_smoothing):
            return self
        if self.label_smoothing:
            raise GrowthError(
                f"label_smoothing is {self.label_smoothing} in the options of the loss, but "
                f"label_smoothing_factor is {factor}: give one of them"
            )
        return replace(self, label_smoothing=factor)

    @property
    def columns(self) -> tuple[str, ...]:
        """The keys of the batches that it needs beside the labels."""
        return (self.row_weights,) if self.row_weights else ()


@dataclass(frozen=True)
class InheritanceSchedule:
    """How strongly, for how long and on which rows the student follows its teachers.

    Args:
        alpha: weight of the KL term, 0 to 1. At the float 0 no teacher is read, at the float 1 no
            label. With a 0-d tensor, torch.compile makes one graph for all values, and nothing
            waits for the value. A changing float needs ``dynamic=True`` for one graph, and is
            compiled again at 0 and 1.
        end_step: the optimizer step from which the share is 0; None with "constant".
        decay: of the share: "linear" falls in a straight line from `alpha` to 0 at `end_step`;
            "constant" stays at `alpha` to the end of the run; "switch" stays at `alpha` up to
            `end_step`.
        temperature: of the softmax of student and teachers in the KL term.
        kl_rows: rows with the KL term: "labels" (rows with a label) or "all" (in training every
            real token). The losses of tensors also take a bool mask of the labels' shape.
        teacher_weights: one number per teacher, sum 1. Default: equal.
        divergence: "forward", KL(teacher || student), infinite if the student alone gives
            probability 0 to a token. "reverse", KL(student || teacher), infinite if the teacher
            alone does. "jsd", the generalised Jensen-Shannon divergence of GKD (Agarwal et al.
            2024), always finite. A token of probability 0 in both adds nothing.
        beta: of "jsd", in (0, 1): small values are close to "forward". Default: 0.5.
        tail: of a teacher known by its k likeliest tokens, the use of its remaining probability.
            "bucket", the default, compares it as a whole with the student's. "renormalise" spreads
            it over the k tokens, as Knowledge Inheritance does, with a wrong gradient for small k.

    Raises:
        GrowthError: a value is out of range.
    """

    LIMITS: ClassVar[dict[str, Limit]] = LOSS_LIMITS | {"alpha": SHARE}

    alpha: float = 0.5
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
        check("inheritance", self)
        if self.decay != "constant" and (self.end_step is None or self.end_step < 1):
            raise GrowthError(
                f"inheritance end_step is {self.end_step}: give the optimizer step at which the "
                "alpha reaches 0, for example 0.44 of all steps"
            )
        if self.teacher_weights is not None and not (abs(sum(self.teacher_weights) - 1) <= 1e-6):
            raise GrowthError(f"teacher_weights {self.teacher_weights} must sum to 1")

    def alpha_at(self, step: int) -> float:
        """The share of the KL term at an optimizer step, counted from 0."""
        if self.end_step is None:
            return self.alpha
        if self.decay == "switch":
            return self.alpha if step < self.end_step else 0.0
        return max(0.0, self.alpha * (1 - step / self.end_step))

    def arguments(self) -> dict[str, Any]:
        """The arguments of the losses that say how student and teachers are compared."""
        return {name: getattr(self, name) for name in KL_OPTIONS}
