"""The batches of a run: checked, counted on the CPU and never repeated.

The loader of several processes either sends batches from the first process to the others, or lets
each process read all examples and keep its own. The first is accelerate's default for streams,
which are read from start to end, without an index. A `TokenStream` does neither: its processes read
their own parts of it.
"""

import contextlib
import dataclasses
import itertools
import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from growkern.errors import GrowthError, warn
from growkern.train.dataset import PlacingCollator, StreamReader, TokenStream
from growkern.train.loss.batch_rows import (
    ROW_COUNTS,
    TAUGHT_BY,
    CountingCollator,
    RowCounts,
    check_batch_keys,
    count_rows,
)
from growkern.train.model import IGNORE_INDEX, align_labels, document_starts
from growkern.train.objectives import IndexedDataset

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
        kind: whether the model is `causal` and a `decoder`, see `growkern.train.loss.batch_rows`.

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
                check_batch_keys(batch, "labels", *(self._columns if training else ()))
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
            check_batch_keys(batch, "labels", *self._columns)
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


def are_sent(dataset: Any, accelerator: Any) -> bool:
    """Whether the first process reads the data set and sends the batches to the others."""
    if accelerator.num_processes == 1 or isinstance(dataset, TokenStream):
        return False
    chosen = accelerator.dispatch_batches
    return isinstance(dataset, IterableDataset) if chosen is None else bool(chosen)


def check_stream(dataset: Any, accelerator: Any) -> None:
    """Refuse a stream whose last examples would count more than once.

    Each process reads it, and accelerate fills up its end with examples from its start.
    """
    is_shared = isinstance(dataset, IterableDataset) and not isinstance(dataset, TokenStream)
    if is_shared and accelerator.num_processes > 1 and not are_sent(dataset, accelerator):
        raise GrowthError(
            "dispatch_batches=False repeats examples at the end of a data set without an index: "
            "leave it unset, and pad all batches to one length"
        )


def place_in_stream(checkpoint: str | Path, args: TrainingArguments) -> tuple[int, int]:
    """The complete passes through data without a length, and the batches read of the next.

    Trainer counts such an epoch as `max_steps` long. `epoch` of a checkpoint is the number of
    complete passes through the data, plus the batches since then over those of `max_steps` steps.
    """
    state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
    part, passes = math.modf(state.epoch or 0.0)
    batches = round(part * state.max_steps * args.gradient_accumulation_steps)
    return int(passes), 0 if args.ignore_data_skip else batches


def stream_loader(
    dataset: Any, collator: Any, batch_size: int, args: TrainingArguments
) -> Any | None:
    """A data loader for a `TokenStream`, which accelerate would divide once more; or None."""
    if not isinstance(dataset, TokenStream):
        return None
    workers = dataset.lanes(args.dataloader_num_workers) if args.dataloader_num_workers else 0
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=batch_size,
        collate_fn=PlacingCollator(collator),
        num_workers=workers,
        pin_memory=args.dataloader_pin_memory,
        persistent_workers=args.dataloader_persistent_workers and workers > 0,
        prefetch_factor=args.dataloader_prefetch_factor if workers else None,
        # the loader draws a number from it, which a resumed run would draw once more
        generator=torch.Generator(),
    )
    return prepare_data_loader(
        loader,
        device=args.device,
        num_processes=1,
        process_index=0,
        put_on_device=True,
        dispatch_batches=False,
    )


# ---------------------------------------------------------- the end of an epoch


def examples_in_last_sent(loader: Any, rank: int, batch_size: int) -> int:
    """How many examples of the last batch that was sent are not repetitions.

    The loader of accelerate, which sends batches, knows how many examples were left. The batch of
    each process has `batch_size` examples.
    """
    return min(max(loader.remainder - rank * batch_size, 0), batch_size)


def examples_in_last_batch(loader: Any, rank: int, processes: int, *, split: bool) -> int | None:
    """How many examples of a process's last batch are not repetitions; None if there are none.

    accelerate fills up the last batches of an epoch with examples from its start, so that all
    processes run as many steps. Its loader is over a data set that is read by index. It may split
    each batch among the processes.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    batches: Any = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    if not isinstance(batches, BatchSampler) or batches.drop_last:
        return None
    of_a_process = batches.batch_size // processes if split else batches.batch_size
    rest = len(batches.sampler) % (of_a_process * processes)  # type: ignore[arg-type]
    return min(max(rest - rank * of_a_process, 0), of_a_process) if rest else None


def first_examples(batch: dict[str, Any], kept: int, batch_size: int) -> dict[str, Any]:
    """The batch without the repeated examples at its end.

    A batch of repetitions alone keeps one example without labels, because every process has to take
    part in the step. A batch of `batch_size` examples has one per row, or packs them into one row.
    """
    filler, kept = kept == 0, max(kept, 1)
    rows = len(batch["labels"])
    if rows == 1 < batch_size:
        batch = _first_sequences(batch, kept)
    else:
        batch = {
            name: x[:kept]
            if name == TAUGHT_BY or (isinstance(x, Tensor) and x.ndim and len(x) == rows)
            else x
            for name, x in batch.items()
        }
    if not filler:
        return batch
    batch["labels"] = torch.full_like(batch["labels"], IGNORE_INDEX)
    return batch | {ROW_COUNTS: RowCounts(0, 0, is_filler=True)}


def _first_sequences(batch: dict[str, Any], kept: int) -> dict[str, Any]:
    """The first sequences of a batch that is packed into one row."""
    starts_BS = document_starts(batch)
    cut = [] if starts_BS is None else starts_BS[0].nonzero().flatten().tolist()
    if kept >= len(cut):
        return batch
    length, end = batch["labels"].shape[1], cut[kept]
    batch = {
        name: x[:, :end] if isinstance(x, Tensor) and x.shape[:2] == (1, length) else x
        for name, x in batch.items()
    }
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if name in batch:
            batch[name] = batch[name][: kept + 1]
    counts = batch.get(ROW_COUNTS)
    if counts is not None:
        pairs = sum((b - a) ** 2 for a, b in itertools.pairwise(cut[: kept + 1]))
        batch[ROW_COUNTS] = dataclasses.replace(counts, pairs=pairs)
    return batch
