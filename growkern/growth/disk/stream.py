"""Writes the target's files within a memory limit.

Every target tensor is cut into pieces of whole rows (`growth.source.stored.row_blocks`).
Each worker takes a piece. It maps the source rows that the piece needs, builds it in its own
buffer, computes its checksum and writes it to its place. So reading, expanding and writing overlap
between workers. A background thread syncs finished pieces and
then notes them in the journal.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from growkern.errors import GrowthError
from growkern.growth.disk.checksums import checksum_pieces, checksum_rows
from growkern.growth.disk.shards import Buffer, ShardLayout, TargetFile, write_rows
from growkern.growth.disk.staging import Journal, Mark
from growkern.growth.plan import Blueprint, Piece, build_tensor, part_reader, pieces_of
from growkern.growth.source import Assembled, Source
from growkern.growth.stored import (
    entries_of,
    read_entries,
    refuse_nonfinite,
    refuse_overflow,
    row_blocks,
)


class SourceReader:
    """Reads source tensors for several workers. Each is checked once, before its first use.

    `checksums` has those of the tensors that have been read.
    """

    def __init__(self, source: Source, known: Mapping[str, str], allow_nonfinite: bool) -> None:
        self.checksums: dict[str, str] = {}
        self._headers, self._known = source.headers, known
        self._allow_nonfinite = allow_nonfinite
        self._locks = {name: threading.Lock() for name in source.headers}

    def __call__(self, name: str, entries: Sequence[int] | None = None) -> Tensor:
        whole = self._first_read(name)
        if whole is None:
            return read_entries(self._headers[name], entries)
        return entries_of(whole, entries)

    def check(self, name: str) -> None:
        """Compute its checksum and look for NaN and Inf, once."""
        self._first_read(name)

    def _first_read(self, name: str) -> Tensor | None:
        """The tensor, if `check` reads it now, at once and into memory: it is not read twice."""
        with self._locks[name]:
            if name in self.checksums:
                return None
            header = self._headers[name]
            blocks, checksums = row_blocks(header.shape, header.dtype.itemsize), []
            for block in blocks:
                rows = header.rows(*block)
                if not self._allow_nonfinite:
                    refuse_nonfinite(name, rows)
                checksums.append(checksum_rows(rows))
            total = checksum_pieces(checksums)
            if self._known.get(name, total) != total:
                raise GrowthError(
                    f"{header.file}: {name} has changed since the interrupted run read it: start "
                    "over with resume=False (--no-resume)"
                )
            self.checksums[name] = total
        return None if header.is_mapped or len(blocks) > 1 else rows


class Stream:
    """One growth onto disk.

    Attributes:
        reader: reads the source and computes its checksums.
        checksums: (tensor, first row, past the last row) -> checksum of the written rows.
        bytes_kept: how much of it an interrupted run had written.
    """

    def __init__(
        self,
        plan: Blueprint,
        layout: ShardLayout,
        directory: Path,
        journal: Journal,
        *,
        allow_nonfinite: bool,
        backend: str | None,
    ) -> None:
        self.plan, self.layout, self.directory, self.journal = plan, layout, directory, journal
        self.backend = backend
        self._may_overflow = plan.may_overflow and not allow_nonfinite
        self.reader = SourceReader(plan.source, journal.source_checksums, allow_nonfinite)
        # what it reads of a dense model, as tensors of the mixture that the model becomes
        self._read = Assembled(self.reader, plan.source.parts)
        self.checksums: dict[Mark, str] = {}
        self.bytes_kept = 0
        self._has_lost = False
        self._files: dict[str, TargetFile] = {}
        self._buffer = Buffer()

    def run(self, workers: int, *, progress: bool) -> None:
        """Write all pieces that the journal does not list as finished. An error loses no piece."""
        order = {name: i for i, name in enumerate(self.layout.tensors)}
        pieces = sorted(pieces_of(self.plan), key=lambda piece: order[piece.task.name])
        total = sum(map(self._bytes, pieces))
        what = "resuming" if self.journal.marks else "growing"
        threads = torch.get_num_threads()
        with ExitStack() as stack:
            self._files = self.layout.open(self.directory, stack)
            bar = tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=not progress)
            stack.enter_context(bar)
            # each worker's kernels take its share of the cores; PyTorch keeps that per thread,
            # and the default for later threads, which has to be put back
            stack.callback(torch.set_num_threads, threads)
            share = max(1, threads // workers)
            committer = stack.enter_context(ThreadPoolExecutor(1))
            pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(share,))
            stack.enter_context(pool)
            # pieces of an interrupted run are kept, so their source tensors must be unchanged
            read_before = self.journal.source_checksums.keys() & self.plan.source.headers.keys()
            list(pool.map(self.reader.check, read_before))
            self._collect(pieces, pool, committer, bar)

    def _collect(
        self,
        pieces: list[Piece],
        pool: ThreadPoolExecutor,
        committer: ThreadPoolExecutor,
        bar: Any,
    ) -> None:
        written: list[Future[tuple[Piece, str, bool]]] = []
        new: dict[Mark, str] = {}
        commit: Future[None] = committer.submit(lambda: None)
        try:
            written.extend(pool.submit(self._write, piece) for piece in pieces)
            for future in as_completed(written):
                piece, total, was_built = future.result()
                self.checksums[piece.mark] = total
                if was_built:
                    new[piece.mark] = total
                else:
                    self.bytes_kept += self._bytes(piece)
                bar.update(self._bytes(piece))
                if commit.done() and new:
                    commit.result()
                    commit, new = committer.submit(self._commit, new), {}
        finally:
            # also after an error: pieces that other workers had started are finished and kept
            pool.shutdown(cancel_futures=True)
            done = [f for f in written if f.done() and not f.cancelled() and not f.exception()]
            late = {piece.mark: total for piece, total, _ in (f.result() for f in done)}
            new |= {mark: total for mark, total in late.items() if mark not in self.checksums}
            committer.submit(self._commit, new).result()
            commit.result()

    def _commit(self, marks: dict[Mark, str]) -> None:
        """Sync the pieces, then note them in the journal. After a failure no more are noted.

        A failed sync lost rows that earlier writes put there, and another sync would not tell.
        """
        if self._has_lost or not marks:
            return
        try:
            places = (self.layout.tensors[name].places(*rows) for name, *rows in marks)
            for file in sorted({file for place in places for file, _, _ in place}):
                self._files[file].sync()
            known = self.journal.source_checksums
            sources = {
                name: s for name, s in list(self.reader.checksums.items()) if name not in known
            }
            self.journal.add(marks, sources)
        except OSError:
            self._has_lost = True
            raise

    def tensor_checksums(self) -> dict[str, str]:
        """The checksum of every tensor, once all pieces are written."""
        tensors = {}
        for task in self.plan.tasks:
            blocks = row_blocks(task.shape, self.plan.dtype_of(task).itemsize)
            tensors[task.name] = checksum_pieces(self.checksums[task.name, a, b] for a, b in blocks)
        return tensors

    def _bytes(self, piece: Piece) -> int:
        start, stop = piece.rows
        itemsize = self.plan.dtype_of(piece.task).itemsize
        return (stop - start) * math.prod(piece.task.shape[1:]) * itemsize

    def _write(self, piece: Piece) -> tuple[Piece, str, bool]:
        """Write a piece, unless it is on disk already with the right checksum.

        Returns the piece, its checksum, and whether it was built now.
        """
        header = self.layout.tensors[piece.task.name]
        before = self.journal.marks.get(piece.mark)
        if before is not None:
            stored = header.inside(self.directory)
            if checksum_rows(stored.rows(*piece.rows)) == before:
                return piece, before, False
            self.journal.lose(piece.mark)
        start, stop = piece.rows
        size = self._bytes(piece)
        # where the rows lie in one piece, memory has the blocks of the file
        at = next(header.places(start, stop))[1]
        data = self._buffer.room(size, at)
        rows = (stop - start,) if piece.task.shape else ()
        built = build_tensor(
            self.plan,
            piece.task,
            read=part_reader(
                self.plan, piece.task, piece.part or (), self._read, self.reader.check
            ),
            backend=self.backend,
            part=piece.part,
            out=data.view(header.dtype).view((*rows, *piece.task.shape[1:])),
        )
        if self._may_overflow:
            refuse_overflow(piece.task.name, built)
        total = checksum_rows(data)
        write_rows(self._files, header, start, stop, data)
        return piece, total, True
