"""The options of the loss that do not concern a teacher: section [loss] of a run file."""

import dataclasses
from dataclasses import dataclass

from growkern.errors import GrowthError
from growkern.ops.loss.rows.label_options import LabelOptions


@dataclass(frozen=True)
class LossOptions(LabelOptions):
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

    row_weights: str | None = None

    def arguments(self) -> dict[str, float]:
        """The arguments of `growkern.inherited_loss`: all options but the name of the weights."""
        found = dataclasses.asdict(self)
        del found["row_weights"]  # the rows of a batch bring the weights themselves
        return found

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
        return dataclasses.replace(self, label_smoothing=factor)
