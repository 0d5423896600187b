"""Rows that are tokenised while training, in an order that a resumed run repeats.

Each process and each of its data workers reads a part of the records of its own, over and over. A
worker is called a lane here. A row knows the place in its lane where it begins and where the next
one begins, so a run can be resumed behind any batch.
"""

from __future__ import annotations

import copy
import json
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from growkern.errors import GrowthError, warn
from growkern.files import check_format, read_json
from growkern.package import version
from growkern.train.dataset.cache import IDS, Tokens, features_of
from growkern.train.dataset.records import Reader, cut_rows
from growkern.train.dataset.source import need_datasets, plain_errors
from growkern.train.objectives import PASS, OuterCollator

# keys of a row and of a batch
PLACE, PLACES = "place", "stream_places"
# beside a checkpoint, with two places of some kilobytes for each data worker
FILE, MOST_BYTES = "stream_{}.json", 64_000_000
# of that file
FORMAT = 1


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
    """The lane that made a batch, and where its first row and the row after its last begin."""

    lane: int
    before: Place
    after: Place


class TokenStream(IterableDataset[dict[str, Any]]):
    """The rows of the records of one process, without an end.

    The records are a `datasets.IterableDataset`, which so many processes share. So many rows are
    shuffled together as `window` says; below 2 the order of the data is kept.
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
        for place, used, row in cut_rows(self._runs(start), self.reader.settings, start.offset):
            yield replace(place, offset=used), features_of(row, self.weights)

    def _runs(self, start: Place) -> Iterator[tuple[Place, Tokens]]:
        """The tokens of the records from a place on, pass after pass."""
        number, state = start.number, start.records
        while True:
            has_tokens = state is not None
            for place, tokens in self.reader.runs(self._records(number, state)):
                has_tokens = has_tokens or len(tokens[IDS]) > 0
                yield place, tokens
            if not has_tokens:
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


class PlacingCollator(OuterCollator):
    """Adds the places of each batch to it, for rows of a `TokenStream`."""

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, Any]:
        first, last = (features[i][PLACE] for i in (0, -1))
        places = BatchPlaces(first.lane, first.before, last.after)
        rows = [{k: v for k, v in row.items() if k != PLACE} for row in features]
        return {**self.inner(rows), PLACES: places}


class StreamReader:
    """Reads this process's own part of a stream, without an end.

    Resumed on as many processes with as many data workers it reads the batches that an
    uninterrupted run would read. On others it begins a new pass through the data, with a warning.
    """

    def __init__(self, stream: TokenStream, workers: int) -> None:
        self._stream, self._lanes = stream, stream.lanes(workers)
        # the batches that were trained on, and the places of the last one of each lane
        self._batches = 0
        self._last: dict[int, BatchPlaces] = {}
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
                places = batch.pop(PLACES)
                self._last[places.lane] = places
                self._batches += 1

    def save(self, directory: Path) -> None:
        """Write how far this process has read the stream."""
        state = {
            "format": FORMAT,
            "growkern": version(),
            "processes": self._stream.processes,
            "lanes": self._lanes,
            "batches": self._batches,
            "last": {lane: asdict(places) for lane, places in self._last.items()},
        }
        (directory / FILE.format(self._stream.rank)).write_text(json.dumps(state), encoding="utf-8")

    def start(self, checkpoint: str | Path | None, *, warns: bool = True) -> None:
        """Move the stream to the place of a checkpoint, or to its start."""
        stream = self._stream
        stream.places = {}
        if checkpoint is None:
            return
        file = Path(checkpoint) / FILE.format(stream.rank)
        file = file if file.is_file() else file.with_name(FILE.format(0))
        state = read_json(file, MOST_BYTES, "place in a stream")
        check_format(file, state, FORMAT, ())
        try:
            processes, lanes, batches = (
                operator.index(state[key]) for key in ("processes", "lanes", "batches")
            )
            last = {
                int(lane): BatchPlaces(int(lane), Place(**ends["before"]), Place(**ends["after"]))
                for lane, ends in state["last"].items()
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise GrowthError(f"{file}: not a place in a stream: {error!r}") from error
        if (processes, lanes) == (stream.processes, self._lanes):
            self._batches, self._last = batches, last
            # a data loader always begins with the first lane. Lanes whose turn is over repeat their
            # last batch, and these batches are dropped
            self._to_drop = self._batches % self._lanes
            for lane, places in last.items():
                stream.places[lane] = places.before if lane < self._to_drop else places.after
            return
        if warns:
            warn(
                f"{checkpoint} was saved by {processes} processes with {lanes} data workers each: "
                f"with {stream.processes} and {self._lanes} the stream cannot be continued where "
                "it was, so a new pass begins"
            )
        number = 1 + max((places.after.number for places in last.values()), default=-1)
        stream.places = dict.fromkeys(range(self._lanes), Place(number=number, window=batches))
