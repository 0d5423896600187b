"""`transformers.Trainer` whose batches are checked, counted on the CPU and never repeated."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from transformers import Trainer

from growkern.train.data import IndexedDataset, evaluation_collator
from growkern.train.loss.options import LossOptions
from growkern.train.loss.rows import (
    CountingCollator,
    check_some_label,
    examples_in_last_batch,
    first_examples,
)


class CountingTrainer(Trainer):
    """A trainer that counts the rows of each batch in the collator.

    Several processes compute what one process would, at the end of an epoch too: examples that
    accelerate repeats there are dropped. This holds for data sets that are read by index.
    """

    data_collator: Any
    loss: LossOptions
    _causal: bool

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
        own = self.data_collator
        if isinstance(dataset, IterableDataset) and self.args.world_size > 1:
            # accelerate sends such batches from one process to the others, as tensors alone
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

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """Like Trainer's, after the repeated examples are dropped."""
        self._drop_repetitions(batch_samples)
        return super()._get_num_items_in_batch(batch_samples, device)

    def _drop_repetitions(self, batches: list[Any]) -> None:
        state, processes = self.accelerator.gradient_state, self.accelerator.num_processes
        if processes == 1 or not batches or not state.end_of_dataloader:
            return
        kept = examples_in_last_batch(
            state.active_dataloader,
            self.accelerator.process_index,
            processes,
            split=self.accelerator.split_batches,
        )
        if kept is not None:
            batches[-1] = first_examples(dict(batches[-1]), kept, self._train_batch_size)


@contextlib.contextmanager
def unchanged_random_state() -> Iterator[None]:
    """While active, random numbers may be drawn; afterwards the generators are as before."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002
