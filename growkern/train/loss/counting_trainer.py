"""`transformers.Trainer` whose batches are checked, counted on the CPU and never repeated."""

import contextlib
import math
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import Trainer

from growkern.errors import GrowthError, GrowthWarning
from growkern.train.dataset.stream import TokenStream
from growkern.train.loss.options import LossOptions
from growkern.train.loss.rows import (
    EXAMPLES_TO_SEARCH,
    ROW_COUNTS,
    CountingCollator,
    check_keys,
    check_some_label,
    count_rows,
    examples_in_last_batch,
    first_examples,
)
from growkern.train.loss.streams import (
    are_sent,
    check_stream,
    examples_in_last_sent,
    is_without_length,
    place_in_stream,
)
from growkern.train.objectives.language_modeling import IndexedDataset, evaluation_collator

NO_DATA = "Batch does not contain any data"


class CountingTrainer(Trainer):
    """A trainer that counts the rows of each batch in the collator.

    Without dropout, several processes compute what one process would, up to rounding. This holds
    at the end of an epoch too: examples that accelerate repeats there are dropped. A data set
    without a length is read again from its start when it ends, until `args.max_steps`. Its last
    batches are left out if they do not fill an accumulated batch.
    """

    data_collator: Any
    loss: LossOptions
    _causal: bool
    _decoder: bool
    # examples without a single label so far; None once a label was seen
    _unlabelled: int | None = 0
    # batches that were read in the current pass through the data, skipped ones included
    _read: int = 0
    # since the last log line: all steps, those without a single label, and the loss of the latter
    _steps: int = 0
    _empty_steps: Tensor | int = 0
    _empty_loss: Tensor | float = 0.0

    def check_labels(self) -> None:
        """Check that the data for training and for evaluation has labels, where it has an index.

        Raises:
            GrowthError: it has none.
        """
        if _has_index(self.train_dataset):
            self._search_label(
                self.train_dataset, self.data_collator, "training", self.loss.row_weights
            )
            self._unlabelled = None
        data = self.eval_dataset
        for one in data.values() if isinstance(data, dict) else [data]:
            if _has_index(one):
                self._search_label(one, evaluation_collator(self.data_collator, one), "evaluation")

    def _search_label(
        self, dataset: Any, collator: Any, name: str, row_weights: str | None = None
    ) -> None:
        collator = self._get_collator_with_removed_columns(collator)
        size = self.args.eval_batch_size if name == "evaluation" else self._train_batch_size
        with unchanged_random_state():
            check_some_label(dataset, collator, size, row_weights, causal=self._causal, name=name)

    def _set_signature_columns_if_needed(self) -> None:
        """Like Trainer's, and the row weights are not removed from the data."""
        super()._set_signature_columns_if_needed()
        if self.loss.row_weights not in (None, *self._signature_columns):
            self._signature_columns.append(self.loss.row_weights)

    def get_train_dataloader(self) -> Any:
        """Like Trainer's, with the rows of each batch counted on the CPU."""
        with self._collating(self.data_collator, self.train_dataset):
            return super().get_train_dataloader()

    @contextlib.contextmanager
    def _collating(self, collator: Any, dataset: Any) -> Iterator[None]:
        """While active, data loaders are made with this collator, and count the rows."""
        check_stream(dataset, self.accelerator)
        own = self.data_collator
        if are_sent(dataset, self.accelerator):
            # accelerate can send tensors alone, so these batches are counted when they arrive
            self.data_collator = collator
        else:
            kind = {"causal": self._causal, "decoder": self._decoder}
            self.data_collator = CountingCollator(collator, **kind)
        try:
            yield
        finally:
            self.data_collator = own

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Like Trainer's, but a collator that draws masks draws the same at every evaluation."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        # of several sets Trainer gives the name
        dataset = self.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        with self._collating(evaluation_collator(self.data_collator, dataset), dataset):
            return super().get_eval_dataloader(eval_dataset)

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Like Trainer's, and training draws the same random numbers with it as without."""
        with unchanged_random_state():
            return super().evaluation_loop(*args, **options)

    # ------------------------------------------------------- batches of a step

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Like Trainer's, but an accumulated batch that the data cannot fill is left out.

        Trainer would add its gradients to those of the next step.
        """
        try:
            batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        except ValueError as error:
            # of accelerate, when a pass begins and there is nothing
            if NO_DATA not in str(error):
                raise
            batches, items = [], None
        short, self._read = len(batches) < num_batches, self._read + len(batches)
        if not short:
            return batches, items
        if batches:
            warnings.warn(
                f"the data ended in the middle of an accumulated batch: its last {len(batches)} "
                f"of {num_batches} batches are left out",
                GrowthWarning,
                stacklevel=2,
            )
        if self._read == len(batches):
            self._end_early()
        return [], None

    def _end_early(self) -> None:
        """Say that a pass through the data gave no step. Trainer then ends the run."""
        step, steps = self.state.global_step, self.state.max_steps
        if step == 0:
            raise GrowthError("the training data has not enough examples for a single step")
        warnings.warn(
            f"the training data has no more examples: the run ends after step {step} of {steps}",
            GrowthWarning,
            stacklevel=3,
        )

    def end_pass(self) -> None:
        """Note that the data was read to its end. `LoopCallback` calls this."""
        self._read = 0

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, epochs: int, checkpoint: Any, trial: Any
    ) -> tuple[int, int]:
        """Like Trainer's, which resumes data without a length in the first pass only."""
        trained = super()._init_training_state(
            max_steps, steps_per_epoch, epochs, checkpoint, trial
        )
        is_stream = isinstance(self.train_dataset, TokenStream)
        if checkpoint is not None and is_without_length(epochs) and not is_stream:
            trained = place_in_stream(checkpoint, self.args)
        self._read = trained[1]
        return trained

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """Like Trainer's, after the repeated examples are dropped."""
        for batch in batch_samples:
            check_keys(batch, "labels", self.loss.row_weights)
        self._drop_repetitions(batch_samples)
        for i, batch in enumerate(batch_samples):
            if ROW_COUNTS not in batch and are_sent(self.train_dataset, self.accelerator):
                # accelerate has waited for the device already, to send this batch
                counts = count_rows(
                    batch,
                    causal=self._causal,
                    decoder=self._decoder,
                    devices=("cpu", "cuda", "xpu"),
                )
                batch_samples[i] = {**batch, ROW_COUNTS: counts}
        items = super()._get_num_items_in_batch(batch_samples, device)
        self._look_for_labels(batch_samples, items)
        if items is not None:
            self._steps += 1
            self._empty_steps = self._empty_steps + (items == 0)
        return items

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Like Trainer's, and the loss of steps without a label is added up."""
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        if num_items_in_batch is not None:
            is_empty = torch.as_tensor(num_items_in_batch, device=loss.device) == 0
            self._empty_loss = self._empty_loss + torch.where(is_empty, loss, 0.0)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log a line. The loss is the mean over the steps with a label, NaN if there is none."""
        if "loss" in logs:
            # Trainer counts the others as well, with a loss that is 0 or that of the teacher alone
            empty, steps = int(self._empty_steps), self._steps
            if empty:
                rest = logs["loss"] * steps - float(self.mean_of_processes(self._empty_loss))
                logs["loss"] = rest / (steps - empty) if steps > empty else math.nan
            self._steps, self._empty_steps, self._empty_loss = 0, 0, 0.0
        super().log(logs, start_time)

    def mean_of_processes(self, x: Any) -> Tensor:
        """The mean of a number over all processes."""
        mine = torch.as_tensor(x, dtype=torch.float32, device=self.args.device)
        several = self.accelerator.num_processes > 1
        return self.accelerator.reduce(mine, "mean") if several else mine

    def _look_for_labels(self, batches: list[Any], items: Any) -> None:
        """Refuse data whose first examples have no label. Data with an index was looked at before.

        All processes know the labels of the step, so all of them refuse.
        """
        if self._unlabelled is None or items is None:
            return
        if int(items) > 0:
            self._unlabelled = None
            return
        self._unlabelled += sum(len(batch["labels"]) for batch in batches)
        seen = self._unlabelled * self.accelerator.num_processes
        if seen >= EXAMPLES_TO_SEARCH or self.state.global_step + 1 >= self.state.max_steps:
            raise GrowthError(
                f"the training data has not a single label: all labels of its first {seen} "
                "examples are -100. Check the data collator"
            )

    def _drop_repetitions(self, batches: list[Any]) -> None:
        state, processes = self.accelerator.gradient_state, self.accelerator.num_processes
        if processes == 1 or not batches or not state.end_of_dataloader:
            return
        loader, rank = state.active_dataloader, self.accelerator.process_index
        if are_sent(self.train_dataset, self.accelerator):
            size = len(batches[-1]["labels"])
            kept: int | None = examples_in_last_sent(loader, rank, size)
        else:
            size, split = self._train_batch_size, self.accelerator.split_batches
            kept = examples_in_last_batch(loader, rank, processes, split=split)
        if kept is not None:
            batches[-1] = first_examples(dict(batches[-1]), kept, size)


def _has_index(dataset: Any) -> bool:
    return isinstance(dataset, IndexedDataset) and not isinstance(dataset, IterableDataset)


@contextlib.contextmanager
def unchanged_random_state() -> Iterator[None]:
    """While active, random numbers may be drawn; afterwards the generators are as before."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
