"""A trainer that reads a `TokenStream`, and saves with each checkpoint how far it has read."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from transformers import Trainer

from growkern.bounded import read_json
from growkern.errors import GrowthWarning
from growkern.train.dataset.stream import PLACES, Place, PlacingCollator, Progress, TokenStream
from growkern.train.safety.workers import guard_workers

FILE = "stream_{}.json"
# two places of some kilobytes for each data worker
MOST_BYTES = 64_000_000


class StreamTrainer(Trainer):
    """A trainer whose processes read their own parts of a stream, without an end.

    Resumed on as many processes with as many data workers it reads the batches that an
    uninterrupted run would read. On others it begins a new pass through the data, with a warning.
    Other data is read as in Trainer.
    """

    data_collator: Any
    _progress = Progress(1, 1)
    # batches to drop when a resumed run begins
    _to_drop = 0

    def get_train_dataloader(self) -> Any:
        """Like Trainer's; accelerate would divide a stream once more."""
        stream = self.train_dataset
        if not isinstance(stream, TokenStream):
            return super().get_train_dataloader()
        args = self.args
        workers = stream.lanes(args.dataloader_num_workers) if args.dataloader_num_workers else 0
        loader: DataLoader[Any] = DataLoader(
            stream,
            batch_size=self._train_batch_size,
            collate_fn=PlacingCollator(self.data_collator),
            num_workers=workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers and workers > 0,
            prefetch_factor=args.dataloader_prefetch_factor if workers else None,
            # the loader draws a number from it, which a resumed run would draw once more
            generator=torch.Generator(),
        )
        prepared = prepare_data_loader(
            loader,
            device=args.device,
            num_processes=1,
            process_index=0,
            put_on_device=True,
            dispatch_batches=False,
        )
        return guard_workers(prepared)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Like Trainer's, and note how far the stream was read."""
        while self._to_drop:
            next(epoch_iterator)
            self._to_drop -= 1
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        for batch in batches:
            if PLACES in batch:
                self._progress.add(batch.pop(PLACES))
        return batches, items

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, epochs: int, checkpoint: Any, trial: Any
    ) -> tuple[int, int]:
        """Like Trainer's; a stream is moved to its place, and nothing is skipped."""
        trained = super()._init_training_state(
            max_steps, steps_per_epoch, epochs, checkpoint, trial
        )
        stream = self.train_dataset
        if not isinstance(stream, TokenStream):
            return trained
        workers = stream.lanes(self.args.dataloader_num_workers)
        self._progress, self._to_drop = Progress(stream.processes, workers), 0
        stream.places = {}
        if checkpoint is None:
            return trained
        file = Path(checkpoint) / FILE.format(stream.rank)
        file = file if file.is_file() else file.with_name(FILE.format(0))
        state = read_json(file, MOST_BYTES, "place in a stream")
        if self._progress.load(state):
            stream.places, self._to_drop = self._progress.starts()
        else:
            if self.is_world_process_zero():
                warnings.warn(
                    f"{checkpoint} was saved by {state['processes']} processes with "
                    f"{state['lanes']} data workers each: with {stream.processes} and {workers} "
                    "the stream cannot be continued where it was, so a new pass begins",
                    GrowthWarning,
                    stacklevel=2,
                )
            last = state["last"].values()
            number = 1 + max((places["after"]["number"] for places in last), default=-1)
            start = replace(Place(), number=number, window=state["batches"])
            stream.places = dict.fromkeys(range(workers), start)
        return 0, 0

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        """Like Trainer's; the epoch of a stream is the share of the steps that were made."""
        if isinstance(self.train_dataset, TokenStream):
            self.state.epoch = self.state.global_step / self.state.max_steps
        super()._maybe_log_save_evaluate(*args, **options)

    def _save_rng_state(self, output_dir: str) -> None:
        """Like Trainer's, and save how far this process has read the stream."""
        super()._save_rng_state(output_dir)
        if isinstance(self.train_dataset, TokenStream):
            file = Path(output_dir) / FILE.format(self.train_dataset.rank)
            file.write_text(json.dumps(self._progress.state()), encoding="utf-8")
