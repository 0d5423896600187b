"""Data sets that are read from start to end, without an index: streams.

The loader of several processes either sends batches from the first process to the others, or lets
each process read all examples and keep its own. The first is accelerate's default for streams.
A `TokenStream` does neither: its processes read their own parts of it.
"""

import json
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from growkern.errors import GrowthError, GrowthWarning
from growkern.files import read_json
from growkern.train.dataset.stream import PLACES, Place, PlacingCollator, Progress, TokenStream

FILE = "stream_{}.json"
# two places of some kilobytes for each data worker
MOST_BYTES = 64_000_000


def are_sent(dataset: Any, accelerator: Any) -> bool:
    """Whether the first process reads the data set and sends the batches to the others.

    Args:
        dataset: of a trainer.
    """
    if accelerator.num_processes == 1 or isinstance(dataset, TokenStream):
        return False
    chosen = accelerator.dispatch_batches
    return isinstance(dataset, IterableDataset) if chosen is None else bool(chosen)


def check_stream(dataset: Any, accelerator: Any) -> None:
    """Refuse a stream whose last examples would count more than once.

    Args:
        dataset: of a trainer.

    Raises:
        GrowthError: each process reads the stream, and accelerate fills up its end with examples
            from its start.
    """
    is_shared = isinstance(dataset, IterableDataset) and not isinstance(dataset, TokenStream)
    if is_shared and accelerator.num_processes > 1 and not are_sent(dataset, accelerator):
        raise GrowthError(
            "dispatch_batches=False repeats examples at the end of a data set without an index: "
            "leave it unset, and pad all batches to one length"
        )


def examples_in_last_sent(loader: Any, rank: int, batch_size: int) -> int:
    """How many examples of the last batch that was sent are not repetitions.

    Args:
        loader: of accelerate, which sends batches. It knows how many examples were left.
        rank: of this process.
        batch_size: examples in the batch of each process.
    """
    return min(max(loader.remainder - rank * batch_size, 0), batch_size)


def is_without_length(epochs: int) -> bool:
    """Whether Trainer does not know how long an epoch is, by the epochs that it plans."""
    return epochs == sys.maxsize


def place_in_stream(checkpoint: str | Path, args: TrainingArguments) -> tuple[int, int]:
    """Where a run was in a data set without a length.

    Trainer counts such an epoch as `max_steps` long. `epoch` of a checkpoint is the number of
    complete passes through the data, plus the batches since then over those of `max_steps` steps.

    Returns:
        The complete passes, and the batches of the next pass that were trained on.
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


class StreamReader:
    """Reads this process's own part of a stream, without an end.

    Resumed on as many processes with as many data workers it reads the batches that an
    uninterrupted run would read. On others it begins a new pass through the data, with a warning.

    Args:
        stream: that the run trains on.
    """

    def __init__(self, stream: TokenStream, args: TrainingArguments) -> None:
        self._stream, self._args = stream, args
        self._lanes = stream.lanes(args.dataloader_num_workers)
        self._progress = Progress(stream.processes, self._lanes)
        # batches to drop when a resumed run begins
        self._to_drop = 0

    def skip(self, batches: Iterator[Any]) -> None:
        """Drop the batches that were trained on before the run was resumed."""
        while self._to_drop:
            next(batches)
            self._to_drop -= 1

    def note(self, batches: Sequence[dict[str, Any]]) -> None:
        """Note how far the stream was read for these batches."""
        for batch in batches:
            if PLACES in batch:
                self._progress.add(batch.pop(PLACES))

    def save(self, directory: Path) -> None:
        """Write how far this process has read the stream."""
        file = directory / FILE.format(self._stream.rank)
        file.write_text(json.dumps(self._progress.state()), encoding="utf-8")

    def start(self, checkpoint: str | Path | None) -> None:
        """Move the stream to the place of a checkpoint, or to its start."""
        stream = self._stream
        stream.places = {}
        if checkpoint is None:
            return
        file = Path(checkpoint) / FILE.format(stream.rank)
        file = file if file.is_file() else file.with_name(FILE.format(0))
        state = read_json(file, MOST_BYTES, "place in a stream")
        if self._progress.load(state):
            stream.places, self._to_drop = self._progress.starts()
            return
        if self._args.process_index == 0:
            warnings.warn(
                f"{checkpoint} was saved by {state['processes']} processes with "
                f"{state['lanes']} data workers each: with {stream.processes} and {self._lanes} "
                "the stream cannot be continued where it was, so a new pass begins",
                GrowthWarning,
                stacklevel=2,
            )
        last = state["last"].values()
        number = 1 + max((places["after"]["number"] for places in last), default=-1)
        start = replace(Place(), number=number, window=state["batches"])
        stream.places = dict.fromkeys(range(self._lanes), start)
