"""`transformers.Trainer` whose batches are checked, counted on the CPU and never repeated."""

import contextlib
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from transformers import Trainer

from growkern.errors import GrowthError, GrowthWarning
from growkern.train.data import IndexedDataset, evaluation_collator
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

NO_DATA = "Batch does not contain any data"


class CountingTrainer(Trainer):
    """A trainer that counts the rows of each batch in the collator.

    Several processes compute what one process would, at the end of an epoch too: examples that
    accelerate repeats there are dropped. A data set without a length is read again from its start
    when it ends, until `args.max_steps`. Its last batches are left out if they do not fill an
    accumulated batch.
    """

    data_collator: Any
    loss: LossOptions
    _causal: bool
    # examples without a single label so far; None once a label was seen
    _unlabelled: int | None = 0
    # batches that were read in the current pass through the data, skipped ones included
    _read: int = 0

    def check_labels(self) -> None:
        """Check that the training data has labels.

        Raises:
            GrowthError: it has none.
        """
        data = self.train_dataset
        if isinstance(data, IndexedDataset) and not isinstance(data, IterableDataset):
            collator = self._get_collator_with_removed_columns(self.data_collator)
            with unchanged_random_state():
                check_some_label(data, collator, self._train_batch_size, self.loss.row_weights)
            self._unlabelled = None

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
            self.data_collator = CountingCollator(collator, causal=self._causal)
        try:
            yield
        finally:
            self.data_collator = own

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Like Trainer's, but a collator that draws masks draws the same at every evaluation."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        with self._collating(evaluation_collator(self.data_collator), dataset):
            return super().get_eval_dataloader(eval_dataset)

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
        if checkpoint is not None and is_without_length(epochs):
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
                counts = count_rows(batch, causal=self._causal, devices=("cpu", "cuda", "xpu"))
                batch_samples[i] = {**batch, ROW_COUNTS: counts}
        items = super()._get_num_items_in_batch(batch_samples, device)
        self._look_for_labels(batch_samples, items)
        return items

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


@contextlib.contextmanager
def unchanged_random_state() -> Iterator[None]:
    """While active, random numbers may be drawn; afterwards the generators are as before."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002
