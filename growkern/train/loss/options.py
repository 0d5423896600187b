"""Options of the loss in training, as sections of a run file and arguments of the trainer.

`python -m tests.train.loss.generate` writes the fields, from `growkern/ops/loss/rows/options.py`.
Change an option there. The words and the methods are written here.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

from growkern.arguments import SHARE, Limit, check_fields
from growkern.errors import GrowthError
from growkern.ops.loss.rows.options import (
    KL_OPTIONS,
    LIMITS,
    Divergence,
    KLRows,
    Tail,
)
from growkern.train.rules import check

Decay = Literal["linear", "constant", "switch"]


@dataclass(frozen=True)
class LossOptions:
    """Options of the training loss. The loss of an evaluation is always plain cross-entropy.

    The options that concern a teacher are those of `growkern.InheritanceSchedule`.

    Args:
        label_smoothing: share of the label that is spread over the whole vocabulary, in [0, 1).
        z_loss: factor of the squared log of the softmax's denominator.
        row_weights: name of the key of the batches that holds one weight per label, (B, S) float.
            The loss is still divided by the number of labels, those of weight 0 included. To
            leave a label out of that number, mask it. None weighs all labels alike.

    Raises:
        GrowthError: a value is out of range.
    """

    LIMITS: ClassVar[dict[str, Limit]] = {
        "label_smoothing": LIMITS["label_smoothing"],
        "z_loss": LIMITS["z_loss"],
    }

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    row_weights: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def arguments(self) -> dict[str, float]:
        """The arguments of `growkern.inherited_loss`: all options but the name of the weights."""
        options = asdict(self)
        del options["row_weights"]  # the rows of a batch bring the weights themselves
        return options

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
        "temperature": LIMITS["temperature"],
        "beta": LIMITS["beta"],
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
        check("inheritance", self)
        if self.decay != "constant" and (self.end_step is None or self.end_step < 1):
            raise GrowthError(
                f"inheritance end_step is {self.end_step}: give the optimizer step at which the "
                "rate reaches 0, for example 0.44 of all steps"
            )
        if self.teacher_weights is not None and not (abs(sum(self.teacher_weights) - 1) <= 1e-6):
            raise GrowthError(f"teacher_weights {self.teacher_weights} must sum to 1")

    @property
    def has_idle_beta(self) -> bool:
        """Whether a beta is given that the divergence does not read."""
        return self.beta is not None and self.divergence != "jsd"

    def rate_at(self, step: int) -> float:
        """The share of the KL term at an optimizer step, counted from 0."""
        if self.end_step is None:
            return self.rate
        if self.decay == "switch":
            return self.rate if step < self.end_step else 0.0
        return max(0.0, self.rate * (1 - step / self.end_step))

    def arguments(self) -> dict[str, Any]:
        """The arguments of the losses that say how student and teachers are compared."""
        return {name: getattr(self, name) for name in KL_OPTIONS}


class Taught(NamedTuple):
    """What rules ask of the teachers of a run, which a run file names and Python code holds."""

    inheritance: InheritanceSchedule | None
    given: bool
    by_source: bool  # whether each teaches the rows of one source
    number: int | None  # of those that run; None for one that is known by its likeliest tokens
