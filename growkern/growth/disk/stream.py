"""Lays out the weight files of a checkpoint, and writes them within a memory limit.

The plan of a growth knows names, dtype and shapes. So each file's safetensors header is written
first, and tensors, or rows of them, are written to their places in any order. The files equal those
of `save_pretrained` byte for byte: the same split into files, the same order inside a file, the
same JSON.

Every target tensor is cut into pieces of whole rows (`growth.stored.row_blocks`). Each worker takes
a piece. It maps the source rows that the piece needs, builds it in its own buffer, computes its
checksum and writes it to its place. So reading, expanding and writing overlap between workers. A
background thread syncs finished pieces and then notes them in the journal.

A file has its full size from the start. Whole blocks of a large piece bypass the page cache
(O_DIRECT), if the file system can do that. A checkpoint is written once, and synced before it
counts. The cache would only copy every byte once more and take memory. The two ends of a piece
share a block with their neighbours. They go through the cache, and so do small pieces.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import struct
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from tqdm import tqdm
from transformers.core_model_loading import dot_natural_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from growkern.errors import GrowthError
from growkern.families import Names
from growkern.files import no_collections, write_all
from growkern.growth.disk.checksums import checksum_pieces, checksum_rows
from growkern.growth.disk.staging import Journal, Mark
from growkern.growth.plan import Blueprint, Piece, build_tensor, part_reader, pieces_of
from growkern.growth.source import Assembled, Header, Run, Source, Stacked, Transposed, weight_file
from growkern.growth.stored import (
    MOST_TENSORS,
    STORED_DTYPES,
    entries_of,
    read_entries,
    refuse_nonfinite,
    refuse_overflow,
    row_blocks,
)


@dataclass(frozen=True)
class ShardLayout:
    """The files of a checkpoint, and where each tensor goes, in the model's order."""

    tensors: Mapping[str, Header | Stacked | Transposed]  # their files are bare names
    heads: Mapping[str, bytes]  # per file its first bytes, length and JSON
    sizes: Mapping[str, int]  # per file, bytes
    index: str  # the text of the index file; "" where there is a single file

    def write_index(self, directory: Path) -> None:
        """Write the index file, if there are several files."""
        if self.index:
            (directory / SAFE_WEIGHTS_INDEX_NAME).write_text(self.index, encoding="utf-8")

    def open(self, directory: Path, stack: ExitStack) -> dict[str, TargetFile]:
        """Make the files in a directory, with their first bytes; `stack` closes them."""
        files = {}
        for name, size in self.sizes.items():
            files[name] = TargetFile(directory / name, size, self.heads[name])
            stack.callback(files[name].close)
        return files


# shape and dtype
Kind = tuple[tuple[int, ...], torch.dtype]


@no_collections()
def lay_out(
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    max_shard_size: int,
    stored: Mapping[str, str | Names] | None = None,
    transposed: Collection[str] = (),
) -> ShardLayout:
    """Split tensors over files of at most `max_shard_size` bytes and place them in those.

    A larger tensor gets a file of its own. `stored` has the names in files, where they differ
    (`ModelSpec.stored_names`). Files have the last two axes of those in `transposed` swapped.
    """
    stored, shapes = stored or {}, dict(shapes)
    for name in transposed:
        *first, rows, columns = shapes[name]
        shapes[name] = (*first, columns, rows)
    names_of, kinds, begins = _in_files(shapes, dtypes, stored)
    empty = {
        name: torch.empty(len(part), *kinds[name][0], dtype=kinds[name][1], device="meta")
        for name, part in names_of.items()
    }
    split = split_torch_state_dict_into_shards(empty, max_shard_size=max_shard_size)
    in_file = {
        # safetensors writes the widest dtype first
        file: sorted(
            chain.from_iterable(names_of[first] for first in firsts),
            key=lambda name: (-kinds[name][1].itemsize, name),
        )
        for file, firsts in split.filename_to_tensors.items()
    }
    places: dict[str, Run] = {}
    heads, sizes = {}, {}
    for file, names in in_file.items():
        heads[file], ends = _head(file, {name: kinds[name] for name in names})
        start = len(heads[file])
        sizes[file] = start + ends[-1]
        spans = zip(names, pairwise(ends), strict=True)
        places |= {name: (file, start + a, b - a) for name, (a, b) in spans}
    total = sum(math.prod(shape) for shape in shapes.values())
    metadata = {"total_parameters": total, **split.metadata}
    index = _index(metadata, in_file) if split.is_sharded else ""
    tensors: dict[str, Header | Stacked | Transposed] = {}
    files = {file: weight_file(file) for file in in_file}
    for name, shape in shapes.items():
        own = stored.get(name, name)
        if isinstance(own, str):
            place = Header(files[places[own][0]], own, kinds[own][0], dtypes[name], places[own][1])
            if kinds[own][0] != shape:
                place = place.part(begins[name], begins[name] + shape[0])
            tensors[name] = Transposed(place) if name in transposed else place
        else:
            parts = ([places[n] for n in expert] for expert in zip(*own, strict=True))
            tensors[name] = Stacked.of(shape, dtypes[name], own[0][0], parts)
    return ShardLayout(tensors, heads, sizes, index)


def _in_files(
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    stored: Mapping[str, str | Names],
) -> tuple[dict[str, tuple[str, ...]], dict[str, Kind], dict[str, int]]:
    """The tensors of files.

    Returns:
        Those that count as one, by the first of them; the kind of each; the row of a joined one at
        which each tensor of the model begins.
    """
    names_of: dict[str, tuple[str, ...]] = {}
    kinds: dict[str, Kind] = {}
    begins: dict[str, int] = {}
    rows = Counter[str | Names]()
    for name, own in stored.items():
        if shapes.get(name):
            begins[name] = rows[own]
            rows[own] += shapes[name][0]
    # transformers orders tensors before it renames them
    for name in sorted(shapes, key=dot_natural_key) if stored else shapes:
        own, shape = stored.get(name, name), shapes[name]
        if isinstance(own, str):
            shape = (rows[own], *shape[1:]) if name in begins else shape
            names_of[own], kinds[own] = (own,), (shape, dtypes[name])
            continue
        for part in own:
            # all experts of a part go into one file, and count as one tensor
            names_of[part[0]] = part
            kinds |= dict.fromkeys(part, ((shape[1] // len(own), *shape[2:]), dtypes[name]))
    return names_of, kinds, begins


def _head(file: str, kinds: Mapping[str, Kind]) -> tuple[bytes, list[int]]:
    """The first bytes of a file, and where its tensors end after these, from 0 on."""
    if len(kinds) > MOST_TENSORS:
        raise GrowthError(
            f"{file} would hold {len(kinds)} tensors, more than the {MOST_TENSORS} that growkern "
            "reads: give a smaller max_shard_size, for more files"
        )
    codes = {dtype: code for code, dtype in STORED_DTYPES.items()}
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ends = [0]
    for name, (shape, dtype) in kinds.items():
        ends.append(ends[-1] + math.prod(shape) * dtype.itemsize)
        entries[name] = {"dtype": codes[dtype], "shape": shape, "data_offsets": ends[-2:]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, ends


def _index(metadata: Mapping[str, Any], in_file: Mapping[str, list[str]]) -> str:
    """The text of `json.dumps` with `indent=2`, from the encoder that is ten times faster."""
    weight_map = {name: file for file, names in in_file.items() for name in names}
    lines = json.dumps(weight_map, sort_keys=True, separators=(",\n    ", ": "))
    text = json.dumps({"metadata": metadata, "weight_map": {}}, indent=2, sort_keys=True) + "\n"
    return text.replace("{}", f"{{\n    {lines[1:-1]}\n  }}")


# direct writes need addresses, offsets and lengths that are multiples of a disk's block
BLOCK_BYTES = 4096
# smaller pieces go through the cache: a direct write waits for the disk
LEAST_DIRECT_BYTES = 1 << 20


class TargetFile:
    """An open file. Several threads may write to it, each to its own places."""

    def __init__(self, path: Path, size: int, head: bytes) -> None:
        self._cached = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        self._direct: int | None = None
        # the pieces of an interrupted run are read
        self._read = weight_file(path)
        self._writing = threading.Lock()
        try:
            if os.fstat(self._cached).st_size != size:
                reserve(self._cached, size)
            self._direct = _open_direct(path)
            write_all(self._cached, memoryview(head), 0)
        except BaseException:
            self.close()
            raise

    def write(self, data: Tensor, at: int) -> None:
        """Put `data`, (n,) uint8, to its place, byte `at` of the file."""
        view, start, written = data.numpy().data, 0, 0
        if len(view) >= LEAST_DIRECT_BYTES:
            start = -at % BLOCK_BYTES
            stop = start + (len(view) - start) // BLOCK_BYTES * BLOCK_BYTES
            if (data.data_ptr() + start) % BLOCK_BYTES == 0:
                written = self._write_direct(view[start:stop], at + start)
        # the cache takes one writer per file at a time: a second one should not wait inside it
        with self._writing:
            if start:
                write_all(self._cached, view[:start], at)
            start += written
            write_all(self._cached, view[start:], at + start)

    def _write_direct(self, data: memoryview, at: int) -> int:
        """Write past the cache as far as possible; returns how many bytes were written."""
        done = 0
        while self._direct is not None and done < len(data):
            try:
                done += os.pwrite(self._direct, data[done:], at + done)
            except OSError as error:
                # the disk's blocks are larger than BLOCK_BYTES
                if error.errno != errno.EINVAL:
                    raise
                break
            if done % BLOCK_BYTES:
                break
        return done

    def sync(self) -> None:
        """Return when all that was written before is on disk."""
        os.fdatasync(self._cached)

    def close(self) -> None:
        """Close both descriptors, the second one even if closing the first fails."""
        try:
            os.close(self._cached)
        finally:
            if self._direct is not None:
                os.close(self._direct)


def write_rows(
    files: Mapping[str, TargetFile],
    tensor: Header | Stacked | Transposed,
    start: int,
    stop: int,
    data: Tensor,
) -> None:
    """Put rows [start, stop) of a tensor, (n,) uint8, to their places in files."""
    if isinstance(tensor, Transposed):
        rows = data.view(tensor.dtype).view(stop - start, *tensor.shape[1:])
        data = rows.mT.contiguous().view(-1).view(torch.uint8)
    done = 0
    for file, at, size in tensor.places(start, stop):
        files[file].write(data[done : done + size], at)
        done += size


class Buffer(threading.local):
    """Memory of each worker, which grows when a piece needs more."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def room(self, size: int, at: int) -> Tensor:
        """Memory, (size,) uint8, whose blocks are those of a file's bytes from `at` on."""
        if len(self._memory) < size + 2 * BLOCK_BYTES:
            self._memory = torch.empty(size + 2 * BLOCK_BYTES, dtype=torch.uint8)
        start = -self._memory.data_ptr() % BLOCK_BYTES + at % BLOCK_BYTES
        return self._memory[start : start + size]


def _open_direct(path: Path) -> int | None:
    """A descriptor that writes past the page cache, or None where there is no such thing."""
    flag = getattr(os, "O_DIRECT", None)
    try:
        return None if flag is None else os.open(path, os.O_WRONLY | flag)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


def reserve(file: int, size: int) -> None:
    """Give an open file its size, and its space too, so that a full disk shows at the start."""
    os.ftruncate(file, size)
    # not posix_fallocate: where the file system cannot reserve, it writes every block once
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    while fallocate is not None and fallocate(file, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS):
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


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
        threads = torch.get_num_threads()
        with ExitStack() as stack:
            self._files = self.layout.open(self.directory, stack)
            bar = tqdm(
                total=sum(map(self._bytes, pieces)),
                desc="resuming" if self.journal.marks else "growing",
                unit="B",
                unit_scale=True,
                disable=None if progress else True,
            )
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
        write_rows(self._files, header, start, stop, data)
        return piece, checksum_rows(data), True
