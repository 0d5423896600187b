"""The batches of a run: checked, counted on the CPU and never repeated."""

import contextlib
import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import TrainingArguments

from growkern.errors import GrowthError, warn
from growkern.train.dataset.stream import StreamReader, TokenStream
from growkern.train.loss.passes import (
    are_sent,
    check_stream,
    examples_in_last_batch,
    examples_in_last_sent,
    first_examples,
    place_in_stream,
)
from growkern.train.loss.rows import ROW_COUNTS, CountingCollator, check_keys, count_rows
from growkern.train.model import IGNORE_INDEX, align_labels
from growkern.train.objectives.language_modeling import IndexedDataset

EXAMPLES_TO_SEARCH = 1000
NO_DATA = "Batch does not contain any data"


class Batches:
    """Prepares the batches of a training loop.

    Without dropout, several processes then compute what one process would, up to rounding. This
    holds at the end of an epoch too: examples that accelerate repeats there are dropped. A data set
    without a length is read again from its start when it ends. Its last batches are left out if
    they do not fill an accumulated batch.

    Args:
        columns: of training data beside the labels.
        kind: whether the model is `causal` and a `decoder`, see `growkern.train.loss.rows`.

    Attributes:
        unlabelled: examples without a single label so far; None once a label was seen.
        done: batches that were read in this pass through the data, skipped ones included.
        source: the collator of the run without the count.
        stream: reads the training data if that is a `TokenStream`.
    """

    def __init__(self, accelerator: Any, columns: Sequence[str] = (), **kind: bool) -> None:
        self._accelerator, self._columns, self._kind = accelerator, columns, kind
        self.unlabelled: int | None = 0
        self.done = 0
        self.source: Any = None
        self.stream: StreamReader | None = None

    def collator(self, collator: Any, dataset: Any) -> Any:
        """A collator that counts the rows too, if they are not counted when they arrive.

        Data is refused whose examples would count more than once.
        """
        check_stream(dataset, self._accelerator)
        # accelerate can send tensors alone
        sent = are_sent(dataset, self._accelerator)
        return collator if sent else CountingCollator(collator, **self._kind)

    def check_labels(self, dataset: Any, collator: Any, size: int, name: str) -> None:
        """Check that the batches of a data set have labels, if it can be read by index.

        It stops at the first label, and looks at up to 1000 examples, evenly spread over the data
        set. A causal model does not predict the first token of a row, so a label there does not
        count.
        """
        if not isinstance(dataset, IndexedDataset) or isinstance(dataset, IterableDataset):
            return
        causal, training = self._kind["causal"], name == "training"
        indices = range(0, len(dataset), max(1, len(dataset) // EXAMPLES_TO_SEARCH))
        has_label = not indices
        with unchanged_random_state():
            for start in range(0, len(indices), size):
                batch = collator([dataset[i] for i in indices[start : start + size]])
                if not isinstance(batch, Mapping):
                    kind = type(batch).__name__
                    raise GrowthError(f"the data collator makes a {kind}, not a dict")
                check_keys(batch, "labels", *(self._columns if training else ()))
                labels_BS = align_labels(torch.as_tensor(batch["labels"]), causal=causal)
                has_label = bool((labels_BS != IGNORE_INDEX).any())
                if has_label:
                    break
        if not has_label:
            first = ", or belong to a first token, which is not predicted" if causal else ""
            raise GrowthError(
                f"the {name} data has not a single label: all labels of {len(indices)} examples, "
                f"evenly spread over the data set, are -100{first}. Check the data collator"
            )
        if training:
            self.unlabelled = None

    def start(
        self,
        dataset: Any,
        source: Any,
        checkpoint: Any,
        place: tuple[int, int],
        epochs: int,
        args: TrainingArguments,
    ) -> tuple[int, int]:
        """Begin a run.

        Args:
            source: the collator.
            place: where Trainer would resume: the complete passes through the data, and the batches
                of the next one to be skipped. It resumes data without a length in the first only.
            epochs: that Trainer plans.

        Returns:
            The right place.
        """
        self.stream = None
        if isinstance(dataset, TokenStream):
            # it is moved to its place, and nothing is skipped
            self.stream, place = StreamReader(dataset, args.dataloader_num_workers), (0, 0)
            self.stream.start(checkpoint, warns=args.process_index == 0)
        elif checkpoint is not None and epochs == sys.maxsize:
            # Trainer does not know how long an epoch is
            place = place_in_stream(checkpoint, args)
        self.done, self.source = place[1], source
        return place

    def read(self, batches: Iterator[Any], number: int, state: Any) -> list[Any]:
        """The next accumulated batch; empty if the data cannot fill it.

        Trainer would add the gradients of its batches to those of the next step. A run without a
        single step is refused.
        """
        if self.stream is not None:
            self.stream.skip(batches)
        try:
            taken = list(islice(batches, number))
        except ValueError as error:
            # of accelerate, when a pass begins and there is nothing
            if NO_DATA not in str(error):
                raise
            taken = []
        self.done += len(taken)
        if self.stream is not None:
            self.stream.note(taken)
        if len(taken) == number:
            return taken
        if taken:
            warn(
                f"the data ended in the middle of an accumulated batch: its last {len(taken)} "
                f"of {number} batches are left out"
            )
        if self.done > len(taken):
            return []
        # this pass gave no step: Trainer ends the run
        if state.global_step == 0:
            raise GrowthError("the training data has not enough examples for a single step")
        warn(
            "the training data has no more examples: the run ends after step "
            f"{state.global_step} of {state.max_steps}"
        )
        return []

    def prepare(self, batches: list[Any], dataset: Any, size: int) -> None:
        """Check batches, drop repeated examples, and count the rows that were not counted.

        The list is changed in place. A process has `size` examples per batch.
        """
        for batch in batches:
            check_keys(batch, "labels", *self._columns)
        if self._accelerator.num_processes == 1:
            return
        sent = are_sent(dataset, self._accelerator)
        if batches and self._accelerator.gradient_state.end_of_dataloader:
            self._drop_repetitions(batches, size, sent=sent)
        for i, batch in enumerate(batches if sent else ()):
            if ROW_COUNTS not in batch:
                # accelerate has waited for the device already, to send this batch
                counts = count_rows(batch, **self._kind, devices=("cpu", "cuda", "xpu"))
                batches[i] = {**batch, ROW_COUNTS: counts}

    def _drop_repetitions(self, batches: list[Any], size: int, *, sent: bool) -> None:
        accelerator = self._accelerator
        loader, rank = accelerator.gradient_state.active_dataloader, accelerator.process_index
        if sent:
            size = len(batches[-1]["labels"])
            kept: int | None = examples_in_last_sent(loader, rank, size)
        else:
            split = accelerator.split_batches
            kept = examples_in_last_batch(loader, rank, accelerator.num_processes, split=split)
        if kept is not None:
            batches[-1] = first_examples(dict(batches[-1]), kept, size)

    def look_for_labels(self, batches: list[Any], items: Any, state: Any) -> None:
        """Refuse data whose first examples have no label, unless labels were seen.

        All processes know the labels of the step in all of them, `items`, so all of them refuse.
        """
        if self.unlabelled is None or items is None:
            return
        if int(items) > 0:
            self.unlabelled = None
            return
        self.unlabelled += sum(len(batch["labels"]) for batch in batches)
        seen = self.unlabelled * self._accelerator.num_processes
        if seen >= EXAMPLES_TO_SEARCH or state.global_step + 1 >= state.max_steps:
            raise GrowthError(
                f"the training data has not a single label: all labels of its first {seen} "
                "examples are -100. Check the data collator"
            )


class LabelledSteps:
    """Corrects the mean loss of a log line, which is over the steps with a label alone."""

    def __init__(self) -> None:
        # since the last log line: all steps, those without a single label, the loss of the latter
        self._steps = 0
        self._empty: Tensor | int = 0
        self._is_empty: Tensor | bool = False  # of this step
        self._loss: Tensor | float = 0.0

    def begin(self, items: Any) -> None:
        """Count a step that has so many labels in all processes; None counts nothing."""
        self._steps += items is not None
        self._is_empty = False if items is None else items == 0
        if isinstance(self._is_empty, Tensor) and self._is_empty.is_cpu:
            # no small operations on the loss then
            self._is_empty = bool(self._is_empty)
        self._empty = self._empty + self._is_empty

    def add(self, loss: Tensor) -> None:
        """Add the loss of a batch of the step that has begun."""
        if self._is_empty is not False:
            is_empty = torch.as_tensor(self._is_empty, device=loss.device)
            self._loss = self._loss + torch.where(is_empty, loss, 0.0)

    def corrected(self, loss: float, accelerator: Any) -> float:
        """The mean over the steps with a label since the last call; NaN if there is none.

        The given loss is the mean over all steps. Steps without a label have a loss of 0, or that
        of the teacher alone.
        """
        empty, steps, rest = int(self._empty), self._steps, self._loss
        self._steps, self._empty, self._loss = 0, 0, 0.0
        if not empty:
            return loss
        if steps == empty:
            return math.nan
        if accelerator.num_processes > 1:
            mine = torch.as_tensor(rest, dtype=torch.float32, device=accelerator.device)
            rest = accelerator.reduce(mine, "mean")
        return (loss * steps - float(rest)) / (steps - empty)


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
