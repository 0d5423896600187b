"""Passes through a data set: who reads it, where a resumed run begins, and how the last batch ends.

The loader of several processes either sends batches from the first process to the others, or lets
each process read all examples and keep its own. The first is accelerate's default for streams,
which are read from start to end, without an index. A `TokenStream` does neither: its processes read
their own parts of it.
"""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from growkern.errors import GrowthError
from growkern.train.dataset.stream import PlacingCollator, TokenStream
from growkern.train.loss.rows import ROW_COUNTS, TAUGHT_BY, RowCounts
from growkern.train.model import IGNORE_INDEX, document_starts


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
