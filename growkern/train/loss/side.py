"""The loss beside that of the labels, which some models have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from growkern.train.loss.rows import ROW_COUNTS, check_keys
from growkern.train.objectives.electra import ReplacedTokenDetection
from growkern.train.objectives.replaced_tokens import DetectionLoss
from growkern.train.objectives.sentence_pairs import NextSentenceLoss
from growkern.train.objectives.side_loss import SideLoss, SideParts
from growkern.train.rules import check

SIDE_LOSSES: dict[str, SideLoss] = {"mlm+nsp": NextSentenceLoss(), "rtd": DetectionLoss()}


def side_loss_of(model: Any) -> SideLoss | None:
    """The loss that a model has beside that of its labels; None if there is none."""
    if isinstance(model, ReplacedTokenDetection):
        return SIDE_LOSSES["rtd"]
    names = {cls.__name__ for cls in type(model).__mro__}
    return SIDE_LOSSES["mlm+nsp"] if "BertForPreTraining" in names else None


def check_side(
    side: SideLoss | None,
    *,
    two_stage: bool = False,
    teacher: bool = False,
    cached: bool = False,
    grows: bool = False,
    two_stacks: bool = False,
) -> None:
    """Refuse settings that a side loss does not fit.

    Args:
        two_stage: whether there is a stage 1.
        teacher: whether there is a teacher.
        cached: whether the teacher is read from a cache.
        grows: whether the model grows in the run.
        two_stacks: whether the model has an encoder and a decoder.

    Raises:
        GrowthError: there is such a setting.
    """
    facts = {"two_stage": two_stage, "teacher": teacher, "cached": cached, "grows": grows}
    check("training", side=side and side.name, two_stacks=two_stacks, **facts)


class SideTerm:
    """A side loss, as a term of the loss of a model.

    Args:
        loss: the loss itself.

    Attributes:
        items: of the side loss in the whole accumulated batch of all processes.
    """

    def __init__(self, loss: SideLoss) -> None:
        self.loss = loss
        self.items = torch.tensor(0)

    def count(self, batches: Sequence[dict[str, Any]]) -> Tensor:
        """The items of several batches, 0-d. Batches that only fill up have none."""
        counts = []
        for batch in batches:
            check_keys(batch, *self.loss.keys)
            count = self.loss.count(batch)
            counts.append(torch.zeros_like(count) if _is_filler(batch) else count)
        return torch.stack(counts).sum()

    def take(self, inputs: dict[str, Any]) -> dict[str, Tensor] | None:
        """Remove the targets from a batch; None for one that only fills up."""
        check_keys(inputs, *self.loss.keys)
        targets = self.loss.take(inputs)
        return None if _is_filler(inputs) else targets

    def parts(
        self, outputs: Any, targets: dict[str, Tensor] | None, device: torch.device
    ) -> SideParts:
        """The side loss of a batch."""
        if targets is not None:
            return self.loss.losses(outputs, targets)
        # every parameter needs a gradient, if only 0
        zeros = [0.0 * x.float().sum() for x in outputs.values() if isinstance(x, Tensor)]
        none_B = torch.zeros(1, device=device)
        return SideParts(none_B + torch.stack(zeros).sum(), none_B, none_B)

    def mean(self, parts: SideParts) -> Tensor:
        """The term of a batch on its own."""
        return self.loss.weight * parts.losses_B.sum() / parts.items_B.sum().clamp(min=1)

    def added(self, loss: Tensor, parts: SideParts, meter: Any) -> Tensor:
        """The loss of a batch and its share of the term of the whole accumulated batch.

        Args:
            meter: gets the mean, and the share of the items that were predicted correctly.
        """
        items = parts.items_B.sum()
        each = items.clamp(min=1)
        meter.add(self.loss.name, parts.losses_B.detach().sum() / each, items)
        meter.add(f"{self.loss.name}_accuracy", parts.correct_B.sum() / each, items)
        return loss + self.loss.weight * parts.losses_B.sum() / self.items.clamp(min=1)


class EvaluationSums:
    """Adds up an evaluation, whose loss is a mean over labels, not batches; NaN without any.

    Args:
        side: the side loss, or None.
    """

    def __init__(self, side: SideLoss | None) -> None:
        self._side = side
        # loss, labels; side loss, correct items, items
        self._sums: Tensor | float = 0.0

    def add(
        self, loss_BS: Tensor, labelled_B: Tensor, side: SideParts | None, accelerator: Any
    ) -> None:
        """Add a batch.

        Args:
            labelled_B: labels per example.
            side: the side loss.
        """
        columns = [loss_BS.double().sum(1), labelled_B.double()]
        columns += [x.double() for x in side or ()]
        # per example, so that the duplicates that fill up the last batch can be dropped
        rows_BC = accelerator.gather_for_metrics(torch.stack(columns, 1))
        self._sums = rows_BC.sum(0) + self._sums

    def write(self, metrics: dict[str, float], prefix: str, sets: Any) -> None:
        """Write the numbers of the evaluation into the metrics of Trainer.

        Args:
            metrics: changed in place.
            prefix: of their names.
            sets: the data for evaluation; the loss of the first of several is `eval_loss` too.
        """
        sums = self._sums.tolist() if isinstance(self._sums, Tensor) else [0.0, 0.0]
        loss = sums[0] / sums[1] if sums[1] else math.nan
        if self._side is not None and len(sums) > 2 and sums[4]:
            mean, name = sums[2] / sums[4], f"{prefix}_{self._side.name}"
            metrics |= {name: mean, f"{name}_accuracy": sums[3] / sums[4]}
            loss += self._side.weight * mean
        metrics[f"{prefix}_loss"] = loss
        if isinstance(sets, dict) and prefix == f"eval_{next(iter(sets), '')}":
            # the one that plots and the choice of the best model look at
            metrics["eval_loss"] = loss


def _is_filler(batch: dict[str, Any]) -> bool:
    counts = batch.get(ROW_COUNTS)
    return counts is not None and counts.is_filler
