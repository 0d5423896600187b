"""A trainer that adds a loss beside that of the labels, and evaluates both."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.train.loss.counting_trainer import CountingTrainer
from growkern.train.loss.rows import ROW_COUNTS, check_keys
from growkern.train.objectives.electra import GENERATOR, ReplacedTokenDetection
from growkern.train.objectives.replaced_tokens import DetectionLoss
from growkern.train.objectives.sentence_pairs import NextSentenceLoss
from growkern.train.objectives.side_loss import SideLoss, SideParts

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
) -> None:
    """Refuse settings that a side loss does not fit.

    Args:
        side: from `side_loss_of`.
        two_stage: whether there is a stage 1.
        teacher: whether there is a teacher.
        cached: whether the teacher is read from a cache.
        grows: whether the model grows in the run.

    Raises:
        GrowthError: there is such a setting.
    """
    if isinstance(side, DetectionLoss):
        for found, name, sections in (
            (two_stage, "two stages", "[two_stage]"),
            (teacher, "a teacher", "[inheritance] and [teacher]"),
            (grows, "growth in a run", "[growth], and grow both with growkern grow"),
        ):
            if found:
                raise GrowthError(
                    f"replaced-token detection trains two models, which does not fit {name}: "
                    f"leave out {sections}"
                )
    if side is not None and cached:
        raise GrowthError(
            "a teacher cache holds predictions for masked rows, not for pairs of passages: give "
            "the paths of teachers"
        )


class SideLossTrainer(CountingTrainer):
    """A trainer whose loss may have a part beside that of the labels.

    Log lines hold the mean of that part and the share of items that were predicted correctly. The
    loss of an evaluation is the sum of both parts.
    """

    side: SideLoss | None = None
    meter: Any
    # items of the side loss in the whole accumulated batch of all processes
    _side_items: Tensor | None = None
    # sums of the evaluation: loss, labels; side loss, correct items, items
    _eval_sums: Tensor | None = None

    def add_up(self, x: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        if self.accelerator.num_processes == 1:
            return x
        return self.accelerator.reduce(x.to(self.args.device), "sum")

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """Like Trainer's, and count the items of the side loss."""
        items = super()._get_num_items_in_batch(batch_samples, device)
        if self.side is not None and batch_samples:
            counts = [self._count(batch) for batch in batch_samples]
            self._side_items = self.add_up(torch.stack(counts).sum().to(device))
        return items

    def _count(self, batch: dict[str, Any]) -> Tensor:
        assert self.side is not None
        check_keys(batch, *self.side.keys)
        count = self.side.count(batch)
        return torch.zeros_like(count) if _is_filler(batch) else count

    def take_targets(self, inputs: dict[str, Any]) -> dict[str, Tensor] | None:
        """The targets of the side loss; None without one, and for a batch that only fills up."""
        if self.side is None:
            return None
        check_keys(inputs, *self.side.keys)
        targets = self.side.take(inputs)
        return None if _is_filler(inputs) else targets

    def with_side(
        self, loss: Tensor, outputs: Any, targets: dict[str, Tensor] | None, *, counted: bool
    ) -> Tensor:
        """The loss of a batch with its side loss.

        Args:
            loss: of the labels.
            outputs: of the model.
            targets: from `take_targets`.
            counted: whether the loss is divided by the items of the whole accumulated batch.
        """
        if self.side is None:
            return loss
        parts = self._side_parts(outputs, targets)
        items = parts.items_B.sum()
        if counted and self._side_items is not None:
            self._meter_side(parts)
            items = self._side_items
        return loss + self.side.weight * parts.losses_B.sum() / items.clamp(min=1)

    def _side_parts(self, outputs: Any, targets: dict[str, Tensor] | None) -> SideParts:
        assert self.side is not None
        if targets is not None:
            return self.side.losses(outputs, targets)
        # every parameter needs a gradient, if only 0
        zeros = [0.0 * x.float().sum() for x in outputs.values() if isinstance(x, Tensor)]
        none_B = torch.zeros(1, device=self.args.device)
        return SideParts(none_B + torch.stack(zeros).sum(), none_B, none_B)

    def _meter_side(self, parts: SideParts) -> None:
        assert self.side is not None
        items = parts.items_B.sum()
        each = items.clamp(min=1)
        self.meter.add(self.side.name, parts.losses_B.detach().sum() / each, items)
        self.meter.add(f"{self.side.name}_accuracy", parts.correct_B.sum() / each, items)

    # ------------------------------------------------------------- evaluation

    def add_evaluated(
        self, loss_BS: Tensor, labelled_B: Tensor, outputs: Any, targets: dict[str, Tensor] | None
    ) -> None:
        """Add a batch to the sums of an evaluation.

        Args:
            loss_BS: of the labels.
            labelled_B: labels per example.
            outputs, targets: as in `with_side`.
        """
        columns = [loss_BS.double().sum(1), labelled_B.double()]
        if self.side is not None:
            columns += [x.double() for x in self._side_parts(outputs, targets)]
        # per example, so that the duplicates that fill up the last batch can be dropped
        found_BC = self.accelerator.gather_for_metrics(torch.stack(columns, 1))
        self._eval_sums = found_BC.sum(0) + (0.0 if self._eval_sums is None else self._eval_sums)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Like Trainer's, but the loss is a mean over labels, not batches; NaN without any."""
        self._eval_sums = None
        output = super().evaluation_loop(
            dataloader, description, True, ignore_keys, metric_key_prefix
        )
        sums = [0.0, 0.0] if self._eval_sums is None else self._eval_sums.tolist()
        loss = sums[0] / sums[1] if sums[1] else math.nan
        if self.side is not None and len(sums) > 2 and sums[4]:
            mean, name = sums[2] / sums[4], f"{metric_key_prefix}_{self.side.name}"
            output.metrics.update({name: mean, f"{name}_accuracy": sums[3] / sums[4]})
            loss += self.side.weight * mean
        output.metrics[f"{metric_key_prefix}_loss"] = loss
        sets = self.eval_dataset
        if isinstance(sets, dict) and metric_key_prefix == f"eval_{next(iter(sets), '')}":
            # the one that plots and the choice of the best model look at
            output.metrics["eval_loss"] = loss
        return output

    # ----------------------------------------------------------------- saving

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Like Trainer's; a generator gets a tokenizer of its own beside it."""
        super()._save(output_dir, state_dict)
        is_pair = isinstance(self.model, ReplacedTokenDetection)
        if is_pair and self.processing_class is not None and self.args.should_save:
            directory = Path(output_dir or str(self.args.output_dir)) / GENERATOR
            self.processing_class.save_pretrained(directory)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Like Trainer's; a generator and a discriminator are in two directories."""
        loaded = model or self.model
        if isinstance(loaded, ReplacedTokenDetection):
            loaded.load_both(Path(resume_from_checkpoint))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if isinstance(self.model, ReplacedTokenDetection):
            self._load_from_checkpoint(str(self.state.best_model_checkpoint))
        else:
            super()._load_best_model()


def _is_filler(batch: dict[str, Any]) -> bool:
    counts = batch.get(ROW_COUNTS)
    return counts is not None and counts.is_filler
