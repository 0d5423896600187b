"""Reads a `TokenStream`, and saves with each checkpoint how far it was read."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from growkern.bounded import read_json
from growkern.errors import GrowthWarning
from growkern.train.dataset.stream import PLACES, Place, PlacingCollator, Progress, TokenStream

FILE = "stream_{}.json"
# two places of some kilobytes for each data worker
MOST_BYTES = 64_000_000


class StreamReader:
    """Reads this process's own part of a stream, without an end.

    Resumed on as many processes with as many data workers it reads the batches that an
    uninterrupted run would read. On others it begins a new pass through the data, with a warning.

    Args:
        stream: that the run trains on.
        args: of the trainer.
    """

    def __init__(self, stream: TokenStream, args: TrainingArguments) -> None:
        self._stream, self._args = stream, args
        self._lanes = stream.lanes(args.dataloader_num_workers)
        self._progress = Progress(stream.processes, self._lanes)
        # batches to drop when a resumed run begins
        self._to_drop = 0

    def loader(self, collator: Any, batch_size: int) -> Any:
        """A data loader; accelerate's would divide the stream once more.

        Args:
            collator: makes the batches.
            batch_size: examples per batch.
        """
        args = self._args
        workers = self._lanes if args.dataloader_num_workers else 0
        loader: DataLoader[Any] = DataLoader(
            self._stream,
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

    def save(self, directory: str) -> None:
        """Write how far this process has read the stream."""
        file = Path(directory) / FILE.format(self._stream.rank)
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


def reader_of(dataset: Any, args: TrainingArguments) -> StreamReader | None:
    """A reader for a stream; None for other data."""
    return StreamReader(dataset, args) if isinstance(dataset, TokenStream) else None
