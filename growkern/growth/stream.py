"""Carries a plan out onto disk within a memory limit.

Every target tensor is cut into pieces of whole rows (`growkern.growth.checksums.row_blocks`). Each
worker takes a piece, builds it in its own buffer while the source rows it needs are mapped, sums it
and writes it to its place; so reading, expanding and writing overlap between workers. Meanwhile
what is written is put on disk and then into the journal, again and again, as fast as the disk takes
it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import math
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from growkern.errors import GrowthError
from growkern.growth.apply import build_tensor
from growkern.growth.checksums import row_blocks, sum_pieces, sum_rows
from growkern.growth.journal import Journal, Mark
from growkern.growth.pieces import Piece, pieces_of
from growkern.growth.plan import GrowthPlan
from growkern.growth.shards import ShardLayout
from growkern.growth.source import Source, refuse_nonfinite


class SourceReader:
    """Reads source tensors for several workers; checks and sums each before its first use.

    Attributes:
        sums: source tensor -> its sum, as far as they have been read.
    """

    def __init__(self, source: Source, known: Mapping[str, str], allow_nonfinite: bool) -> None:
        self.sums: dict[str, str] = {}
        self._headers, self._known = source.headers, known
        self._allow_nonfinite = allow_nonfinite
        self._locks = {name: threading.Lock() for name in source.headers}

    def __call__(self, name: str) -> Tensor:
        with self._locks[name]:
            if name not in self.sums:
                self.sums[name] = self._scan(name)
        return self._headers[name].read()

    def _scan(self, name: str) -> str:
        header = self._headers[name]
        sums = []
        for block in row_blocks(header.shape, header.dtype.itemsize):
            rows = header.rows(*block)
            if not self._allow_nonfinite:
                refuse_nonfinite(name, rows)
            sums.append(sum_rows(rows))
        total = sum_pieces(sums)
        if self._known.get(name, total) != total:
            raise GrowthError(
                f"{header.file}: {name} is not what the interrupted run read; start over with "
                "resume=False (--no-resume)"
            )
        return total


# ------------------------------------------------------------------ writing


class Stream:
    """One growth onto disk.

    Attributes:
        reader: reads and sums the source.
        sums: (tensor, first row, past the last row) -> sum of what is written.
        bytes_kept: how much of it an interrupted run had written.
    """

    def __init__(
        self,
        plan: GrowthPlan,
        layout: ShardLayout,
        directory: Path,
        journal: Journal,
        *,
        allow_nonfinite: bool,
        backend: str | None,
    ) -> None:
        self.plan, self.layout, self.directory, self.journal = plan, layout, directory, journal
        self.backend = backend
        self.reader = SourceReader(plan.source, journal.source_sums, allow_nonfinite)
        self.sums: dict[Mark, str] = {}
        self.bytes_kept = 0
        self._descriptors: dict[str, int] = {}
        self._own, self._writing = threading.local(), threading.Lock()

    def run(self, workers: int, *, progress: bool) -> None:
        """Write all tensors that the journal does not vouch for; on an error, note what is done."""
        order = {name: i for i, name in enumerate(self.layout.tensors)}
        pieces = sorted(pieces_of(self.plan), key=lambda piece: order[piece.task.name])
        total = sum(map(self._bytes, pieces))
        what = "resuming" if self.journal.marks else "growing"
        threads = torch.get_num_threads()
        with ExitStack() as stack:
            self._open_files(stack)
            bar = tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=not progress)
            stack.enter_context(bar)
            # each worker's kernels take its share of the cores; PyTorch keeps that per thread,
            # and the default for later threads, which has to be put back
            stack.callback(torch.set_num_threads, threads)
            share = max(1, threads // workers)
            committer = stack.enter_context(ThreadPoolExecutor(1))
            pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(share,))
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
                self.sums[piece.mark] = total
                if was_built:
                    new[piece.mark] = total
                else:
                    self.bytes_kept += self._bytes(piece)
                bar.update(self._bytes(piece))
                if commit.done() and new:
                    commit.result()
                    commit, new = committer.submit(self._commit, new), {}
        finally:
            # after an error too: what was in other workers' hands is finished, and all is kept
            pool.shutdown(cancel_futures=True)
            done = [f for f in written if f.done() and not f.cancelled() and not f.exception()]
            late = {piece.mark: total for piece, total, _ in (f.result() for f in done)}
            new |= {mark: total for mark, total in late.items() if mark not in self.sums}
            committer.submit(self._commit, new).result()
            commit.result()

    def _commit(self, marks: dict[Mark, str]) -> None:
        """Data first, then the marks that speak of it."""
        for file in sorted({self.layout.tensors[name].file for name, _, _ in marks}):
            os.fdatasync(self._descriptors[file])
        known = self.journal.source_sums
        sources = {name: s for name, s in list(self.reader.sums.items()) if name not in known}
        self.journal.add(marks, sources)

    def tensor_sums(self) -> dict[str, str]:
        """The sum of every tensor, once all is written."""
        tensors = {}
        for task in self.plan.tasks:
            blocks = row_blocks(task.shape, self.plan.dtype.itemsize)
            tensors[task.name] = sum_pieces(self.sums[task.name, a, b] for a, b in blocks)
        return tensors

    # ---- a piece

    def _bytes(self, piece: Piece) -> int:
        start, stop = piece.rows
        return (stop - start) * math.prod(piece.task.shape[1:]) * self.plan.dtype.itemsize

    def _write(self, piece: Piece) -> tuple[Piece, str, bool]:
        """The piece, its sum, and whether it had to be built: rows on disk count if unharmed."""
        header = self.layout.tensors[piece.task.name]
        before = self.journal.marks.get(piece.mark)
        if before is not None:
            stored = dataclasses.replace(header, file=str(self.directory / header.file))
            if sum_rows(stored.rows(*piece.rows)) == before:
                return piece, before, False
        start, stop = piece.rows
        data = self._buffer(self._bytes(piece))
        rows = (stop - start,) if piece.task.shape else ()
        build_tensor(
            self.plan,
            piece.task,
            read=self.reader,
            backend=self.backend,
            part=piece.part,
            out=data.view(self.plan.dtype).view(*rows, *piece.task.shape[1:]),
        )
        row = len(data) // (stop - start)
        total = sum_rows(data)
        file = self._descriptors[header.file]
        # a file takes one writer at a time: a second one had better build
        with self._writing:
            write_all(file, data.numpy().data, header.start + start * row)
        return piece, total, True

    def _buffer(self, size: int) -> Tensor:
        """This worker's own memory, (size,) uint8."""
        own = getattr(self._own, "buffer", None)
        if own is None or len(own) < size:
            own = self._own.buffer = torch.empty(size, dtype=torch.uint8)
        return own[:size]

    # ---- files

    def _open_files(self, stack: ExitStack) -> None:
        for name, size in self.layout.sizes.items():
            file = os.open(self.directory / name, os.O_RDWR | os.O_CREAT, 0o666)
            stack.callback(os.close, file)
            if os.fstat(file).st_size != size:
                reserve(file, size)
            write_all(file, memoryview(self.layout.heads[name]), 0)
            self._descriptors[name] = file


def reserve(file: int, size: int) -> None:
    """Give an open file its size, and its space too, so that a full disk shows at the start."""
    os.ftruncate(file, size)
    # not posix_fallocate: where the file system cannot reserve, it writes every block once
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is not None and fallocate(file, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(code, os.strerror(code))


def write_all(file: int, data: memoryview, at: int) -> None:
    """Write at a position; the system may take it in several bites."""
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], at + done)
