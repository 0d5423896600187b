"""The loss beside that of the labels, which some models have: BERT's and ELECTRA's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from growkern.train.loss.rows import ROW_COUNTS, check_keys, real_tokens
from growkern.train.objectives.electra import ORIGINAL, UNIFORMS, ReplacedTokenDetection
from growkern.train.rules import check


class SideParts(NamedTuple):
    """Sums over the items of each example, such as its tokens. (B,) each."""

    losses_B: Tensor  # float
    correct_B: Tensor  # items that were predicted correctly
    items_B: Tensor


class SideLoss(Protocol):
    """A loss that is added to that of the labels: weight * sum of losses / number of items.

    Attributes:
        name: in log lines.
        weight: of the mean over all items.
        keys: keys of the batches that it needs.
        about: for the header of a run: how the two losses are computed.
    """

    name: str
    weight: float
    keys: tuple[str, ...]
    about: str

    def count(self, batch: dict[str, Any]) -> Tensor:
        """The number of items of a batch, 0-d."""

    def take(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """The targets. Keys that the model does not take are removed from the inputs."""

    def losses(self, outputs: Any, targets: dict[str, Tensor]) -> SideParts:
        """The losses of a batch, from the outputs of the model and the targets."""


class NextSentenceLoss:
    """The cross-entropy of next-sentence prediction, beside the loss of the masked tokens."""

    name: str = "nsp"
    weight: float = 1.0
    keys: tuple[str, ...] = ("next_sentence_label",)
    about: str = (
        "masked tokens through the fused loss, and the cross-entropy of the 2 classes of "
        "next-sentence prediction added plainly; a teacher's KL is on the masked-LM head only"
    )

    def count(self, batch: dict[str, Any]) -> Tensor:
        """The number of pairs of a batch."""
        labels_B: Tensor = batch["next_sentence_label"]
        return torch.tensor(len(labels_B), device=labels_B.device)

    def take(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Remove the labels of the pairs from the inputs of the model."""
        return {"labels_B": inputs.pop("next_sentence_label").flatten()}

    def losses(self, outputs: Any, targets: dict[str, Tensor]) -> SideParts:
        """The loss of each pair."""
        logits_B2, labels_B = outputs.seq_relationship_logits.float(), targets["labels_B"]
        losses_B = F.cross_entropy(logits_B2, labels_B, reduction="none")
        return SideParts(losses_B, logits_B2.argmax(-1) == labels_B, torch.ones_like(labels_B))


class DetectionLoss:
    """The binary cross-entropy of the discriminator, over all real tokens."""

    name: str = "rtd"
    weight: float = 50.0
    keys: tuple[str, ...] = (ORIGINAL, UNIFORMS)
    about: str = (
        "the generator's masked tokens through the fused loss, and 50 times the binary "
        "cross-entropy of the discriminator, which the fused loss does not fit, added plainly"
    )

    def count(self, batch: dict[str, Any]) -> Tensor:
        """The number of real tokens of a batch."""
        return real_tokens(batch).sum()

    def take(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """The original tokens and the mask of real ones. The model takes both as well."""
        return {"original_BS": inputs[ORIGINAL], "real_BS": real_tokens(inputs)}

    def losses(self, outputs: Any, targets: dict[str, Tensor]) -> SideParts:
        """The loss of each example, summed over its tokens."""
        logits_BS, real_BS = outputs.detection_logits.float(), targets["real_BS"]
        replaced_BS = outputs.corrupted_ids != targets["original_BS"]
        losses_BS = F.binary_cross_entropy_with_logits(
            logits_BS, replaced_BS.float(), reduction="none"
        )
        correct_BS = ((logits_BS > 0) == replaced_BS) & real_BS
        return SideParts((losses_BS * real_BS).sum(1), correct_BS.sum(1), real_BS.sum(1))


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
    """Refuse settings of a run that a side loss does not fit."""
    facts = {"two_stage": two_stage, "teacher": teacher, "cached": cached, "grows": grows}
    check("training", side=side and side.name, two_stacks=two_stacks, **facts)


class SideTerm:
    """A side loss, as a term of the loss of a model.

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

        The meter gets the mean, and the share of the items that were predicted correctly.
        """
        items = parts.items_B.sum()
        each = items.clamp(min=1)
        meter.add(self.loss.name, parts.losses_B.detach().sum() / each, items)
        meter.add(f"{self.loss.name}_accuracy", parts.correct_B.sum() / each, items)
        return loss + self.loss.weight * parts.losses_B.sum() / self.items.clamp(min=1)


class EvaluationSums:
    """Adds up an evaluation, whose loss is a mean over labels, not batches; NaN without any."""

    def __init__(self, side: SideLoss | None) -> None:
        self._side = side
        # loss, labels; side loss, correct items, items
        self._sums: Tensor | float = 0.0

    def add(
        self, loss_BS: Tensor, labelled_B: Tensor, side: SideParts | None, accelerator: Any
    ) -> None:
        """Add a batch: its loss, the labels of each example, and the side loss if there is one."""
        columns = [loss_BS.double().sum(1), labelled_B.double()]
        columns += [x.double() for x in side or ()]
        # per example, so that the duplicates that fill up the last batch can be dropped
        rows_BC = accelerator.gather_for_metrics(torch.stack(columns, 1))
        self._sums = rows_BC.sum(0) + self._sums

    def write(self, metrics: dict[str, float], prefix: str, sets: Any) -> None:
        """Write the numbers of the evaluation into the metrics of Trainer, whose names get a
        prefix.

        Of several sets of data, the loss of the first is `eval_loss` too.
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
