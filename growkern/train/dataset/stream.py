"""Rows that are tokenised while training, in an order that a resumed run repeats.

Each process and each of its data workers reads a part of the records of its own, over and over. A
worker is called a lane here. A row knows the place in its lane where it begins and where the next
one begins, so a run can be resumed behind any batch.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from growkern.errors import GrowthError
from growkern.train.dataset.records import Reader, Settings, Tokens, chunks, features_of
from growkern.train.dataset.rows import cut_rows
from growkern.train.dataset.source import need_datasets, plain_errors
from growkern.train.objectives.language_modeling import PASS, Collator

# keys of a row and of a batch
PLACE, PLACES = "place", "stream_places"


@dataclass(frozen=True)
class Place:
    """A place in a lane, as plain values.

    Attributes:
        number: of the pass through the data, from 0.
        records: state of the `datasets.IterableDataset` before the next record; None: the start.
        offset: tokens of that record that were used.
        window: rows are shuffled within windows; number of the window that begins here.
        used: rows of that window that were given out.
    """

    number: int = 0
    records: Any = None
    offset: int = 0
    window: int = 0
    used: int = 0


@dataclass(frozen=True)
class BatchPlaces:
    """The places of a batch.

    Attributes:
        lane: that made it.
        before: where its first row begins.
        after: where the row after its last begins.
    """

    lane: int
    before: Place
    after: Place


class TokenStream(IterableDataset[dict[str, Any]]):
    """The rows of the records of one process, without an end.

    Args:
        records: a `datasets.IterableDataset`.
        reader: makes tokens of its records.
        rank, processes: this process, and the number of processes that share the records.
        window: rows that are shuffled together; below 2 the order of the data is kept.
        seed: of the shuffling.
        weights: the key that weights of tokens get.
    """

    def __init__(
        self,
        records: Any,
        reader: Reader,
        *,
        rank: int = 0,
        processes: int = 1,
        window: int = 0,
        seed: int = 0,
        weights: str | None = None,
    ) -> None:
        need_datasets("streaming")
        from datasets.distributed import split_dataset_by_node

        self.reader, self.rank, self.processes = reader, rank, processes
        self.window, self.seed, self.weights = max(1, window), seed, weights
        # with fewer parts than processes, or a number that cannot be divided by theirs, each
        # process reads all of them and keeps its share of the records
        self.records = records
        if processes > 1:
            self.records = split_dataset_by_node(records, rank=rank, world_size=processes)
        # where each lane begins
        self.places: dict[int, Place] = {}

    @property
    def settings(self) -> Settings:
        """The settings of its rows."""
        return self.reader.settings

    def lanes(self, workers: int) -> int:
        """How many data workers have something to read, at least 1."""
        return max(1, min(workers, self.records.num_shards))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        if info is not None:
            # threads do not survive the fork that made this worker: a tokenizer that was told to
            # use them would wait for ever
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        lane = 0 if info is None else info.id
        start = self.places.get(lane, Place())
        rows = self._rows(start)
        while True:
            window, end = self._window(rows, start)
            rng = np.random.default_rng((self.seed, self.rank, lane, start.window))
            order = rng.permutation(len(window)) if self.window > 1 else range(len(window))
            for used in range(start.used, len(window)):
                before, after = replace(start, used=used), replace(start, used=used + 1)
                if used + 1 == len(window):
                    after = end
                number, row = window[order[used]]
                yield {**row, PASS: number, PLACE: BatchPlaces(lane, before, after)}
            start = end

    def _window(
        self, rows: Iterator[tuple[Place, Tokens]], start: Place
    ) -> tuple[list[tuple[int, Tokens]], Place]:
        """The next rows that are shuffled together, and the place behind them."""
        window, end = [], start
        for place, row in islice(rows, self.window):
            window.append((place.number, row))
            end = replace(place, window=start.window + 1)
            if place.number != start.number:
                # a row is not given twice before all were given once
                break
        return window, end

    def _rows(self, start: Place) -> Iterator[tuple[Place, Tokens]]:
        """The rows from a place on, each with the place behind it."""
        runs = self._runs(start)
        for place, used, row in cut_rows(runs, self.settings, start.offset):
            yield replace(place, offset=used), features_of(row, self.weights)

    def _runs(self, start: Place) -> Iterator[tuple[Place, Tokens]]:
        """The tokens of the records from a place on, pass after pass."""
        number, state = start.number, start.records
        while True:
            found = state is not None
            for chunk in chunks(self._records(number, state)):
                tokens = self.reader.read([record for _, record in chunk])
                for (place, _), one in zip(chunk, tokens, strict=True):
                    found = found or len(one["input_ids"]) > 0
                    yield place, one
            if not found:
                raise GrowthError(
                    f"{self.reader.name} has no tokens for process {self.rank} of "
                    f"{self.processes}: it has no records, or fewer than there are processes and "
                    "data workers"
                )
            number, state = number + 1, None

    def _records(self, number: int, state: Any) -> Iterator[tuple[Place, Mapping[str, Any]]]:
        records = copy.copy(self.records)
        # at the start of a pass too: a copy brings the place where the last pass was left
        records.load_state_dict(state)
        with plain_errors(self.reader.name):
            for record in records:
                yield Place(number, state), record
                state = records.state_dict()


class PlacingCollator:
    """Adds the places of each batch to the batches of another collator.

    Args:
        collator: makes the batches of the rows of a `TokenStream`.
    """

    def __init__(self, collator: Collator) -> None:
        self.inner = collator

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, Any]:
        first, last = (features[i][PLACE] for i in (0, -1))
        places = BatchPlaces(first.lane, first.before, last.after)
        rows = [{k: v for k, v in row.items() if k != PLACE} for row in features]
        return {**self.inner(rows), PLACES: places}


# -------------------------------------------------------------------- progress


class Progress:
    """How far each lane of a stream was trained on.

    Args:
        processes: that share the stream.
        lanes: of this process.
    """

    def __init__(self, processes: int, lanes: int) -> None:
        self.processes, self.lanes, self.batches = processes, lanes, 0
        self.last: dict[int, BatchPlaces] = {}

    def add(self, places: BatchPlaces) -> None:
        """Note a batch that was trained on."""
        self.last[places.lane] = places
        self.batches += 1

    def state(self) -> dict[str, Any]:
        """All of it, as values for JSON."""
        return {
            "processes": self.processes,
            "lanes": self.lanes,
            "batches": self.batches,
            "last": {str(lane): asdict(places) for lane, places in self.last.items()},
        }

    def load(self, state: Mapping[str, Any]) -> bool:
        """Take over a state; False, with nothing changed, if it is of other processes or lanes."""
        if (state["processes"], state["lanes"]) != (self.processes, self.lanes):
            return False
        self.batches = state["batches"]
        for lane, value in state["last"].items():
            before, after = Place(**value["before"]), Place(**value["after"])
            self.last[int(lane)] = BatchPlaces(int(lane), before, after)
        return True

    def starts(self) -> tuple[dict[int, Place], int]:
        """Where each lane begins again, and how many batches to drop after that.

        A data loader always begins with the first lane. Lanes whose turn is over repeat their last
        batch, and these batches are dropped.
        """
        drop = self.batches % self.lanes
        return {
            lane: places.before if lane < drop else places.after
            for lane, places in self.last.items()
        }, drop
