"""The files of a teacher cache, which stores the k likeliest tokens of a teacher for every row.

A cache is a directory:

    cache.json               how the cache was made: the fields of `CacheHeader`
    rows-00000.safetensors   ids (R, ceil(k b / 8)) uint8, logprobs (R, k); more files follow
    index.safetensors        where the rows of each example are, and the keys of the examples
    manifest.json            the size and the checksum of every other file

An id takes b = ceil(log2 V) bits, the lowest bits first. A log-prob is float16, bfloat16 or
float32. Rows are in the order of positions, examples in the order of the data. The files are
mapped into memory. A file of rows is read as a whole once, when the first of its rows is needed,
to compare its checksum. The processes of a data loader share the note that this was done.

The key of an example is a hash of its tokens, as the teacher saw them, and of its labels. A
training batch finds its rows by their keys, in any order and from any number of workers. Rows of
another text, other masks or another tokenizer are never found. Training therefore has to draw the
masks that the cache was made with.

Shape letters used in this file: B examples, S positions, R rows, E examples of the cache.
"""

import errno
import functools
import hashlib
import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import save_file
from safetensors.torch import load_file
from torch import Tensor

from growkern.arguments import POSITIVE, Limit, between, check_fields
from growkern.errors import GrowthError
from growkern.files import check_format, read_json, regular_size, write_whole
from growkern.package import version
from growkern.publish import damage_of, read_manifest
from growkern.train.topk_teacher.teacher import (
    RowFacts,
    TopKRows,
    fault_of,
    keys_of,
    placed,
    rows_of,
)

# of a cache
FORMAT = 1
HEADER_FILE = "cache.json"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
ROWS = ("labels", "all")
# an id is read from four bytes and may start at any of the first eight bits
MAX_ID_BITS = 25
# of a header: the version of growkern that wrote it
WRITER = "growkern"
# a header has some 500 bytes
MOST_BYTES = 100_000
INDEX_FILE = "index.safetensors"
# bits that are apart at a time while ids are packed. Each takes 9 bytes then: all bits of a shard
# of 256 MiB, of 63 million ids of 18 bits, would take 10 GB
BITS_AT_ONCE = 1 << 22

Arrays = dict[str, np.ndarray]


# ------------------------------------------------------------------ header


@dataclass(frozen=True)
class CacheHeader(RowFacts):
    """How a cache was made, `cache.json`. Two caches with equal headers hold the same rows.

    A value that is impossible is refused.
    """

    LIMITS: ClassVar[dict[str, Limit]] = {
        **dict.fromkeys(("vocab_size", "k"), between(1, 1 << MAX_ID_BITS)),
        **dict.fromkeys(("temperature", "epochs", "examples"), POSITIVE),
        "rows": Limit(ROWS.__contains__, f"be {' or '.join(ROWS)}"),
        "dtype": Limit(DTYPES.__contains__, f"be {' or '.join(DTYPES)}"),
    }

    vocab_size: int
    format: int
    k: int
    dtype: str  # of the log-probs
    examples: int  # each masking counted
    teacher: str  # SHA-256 of its weights
    data: str  # SHA-256 of the keys of all examples

    def __post_init__(self) -> None:
        check_fields(self)
        if self.k > self.vocab_size:
            raise GrowthError(f"k is {self.k}: it must lie in 1 .. {self.vocab_size}, vocab_size")

    @property
    def id_bits(self) -> int:
        """Bits of one id."""
        return max(1, (self.vocab_size - 1).bit_length())

    @property
    def row_bytes(self) -> int:
        """Bytes of one row on disk, without its share of the index."""
        return -(-self.k * self.id_bits // 8) + self.k * DTYPES[self.dtype].itemsize


def write_header(directory: Path, header: CacheHeader) -> None:
    """Write the header of a cache, completely or not at all."""
    text = json.dumps({**asdict(header), WRITER: version()}, indent=1) + "\n"
    write_whole(directory / HEADER_FILE, lambda partial: partial.write_text(text))


def read_header(directory: Path) -> CacheHeader:
    """Read the header of a cache. Another format, or an impossible value, is refused."""
    file = directory / HEADER_FILE
    try:
        table = read_json(file, MOST_BYTES, "cache header")
    except GrowthError as error:
        raise GrowthError(
            f"{directory} is not a teacher cache: {error}: give the directory that growkern "
            "cache-teacher made"
        ) from error
    names = {field.name for field in fields(CacheHeader)}
    check_format(file, table, FORMAT, names - {"format"})
    if not isinstance(table, dict) or table.keys() - {WRITER} != names:
        raise GrowthError(f"{file} is not a cache header of format {FORMAT}: make the cache again")
    try:
        return CacheHeader(**{name: table[name] for name in names})
    except GrowthError as error:
        raise GrowthError(f"{file}: {error}") from error


# -------------------------------------------------------------- ids in few bits


def pack_ids(ids_Rk: np.ndarray, bits: int) -> np.ndarray:
    """Pack (R, k) integer ids into (R, ceil(k * bits / 8)) uint8."""
    rows, k = ids_Rk.shape
    packed = np.empty((rows, -(-k * bits // 8)), np.uint8)
    step = max(1, BITS_AT_ONCE // (k * bits))
    for start in range(0, rows, step):
        part_Rk = ids_Rk[start : start + step]
        bits_Rkb = ((part_Rk[:, :, None] >> np.arange(bits)) & 1).astype(np.uint8)
        flat = bits_Rkb.reshape(len(part_Rk), k * bits)
        packed[start : start + step] = np.packbits(flat, axis=1, bitorder="little")
    return packed


def unpack_ids(packed: np.ndarray, k: int, bits: int) -> np.ndarray:
    """Unpack the result of `pack_ids` into (R, k) int32."""
    padded = np.pad(packed, ((0, 0), (0, 3)))
    first = np.arange(k) * bits
    word_Rk = np.zeros((len(packed), k), np.uint32)
    for byte in range(4):
        word_Rk |= padded[:, first // 8 + byte].astype(np.uint32) << np.uint32(8 * byte)
    return ((word_Rk >> (first % 8).astype(np.uint32)) & np.uint32((1 << bits) - 1)).astype(
        np.int32
    )


# ------------------------------------------------------------------- files


def write_tensors(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write a safetensors file, completely or not at all. A disk that fails is an OSError."""
    whole = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    try:
        write_whole(file, lambda partial: save_file(whole, partial))
    except SafetensorError as error:
        # the library has no errno to give
        raise OSError(errno.EIO, f"{file.name}: {error}") from error


def mapped(file: Path, wanted: Mapping[str, tuple[Any, tuple[int | None, ...]]]) -> Arrays:
    """Map the arrays of a safetensors file into memory without reading them.

    Each has the dtype and the shape that are wanted, with None for a size that the file decides.
    """
    try:
        # a pipe could make the process wait for ever
        regular_size(file)
        # not by safetensors.numpy: it would copy
        arrays = {name: values.numpy() for name, values in load_file(file).items()}
        if arrays.keys() != wanted.keys():
            raise ValueError(f"it holds {reprlib.repr(sorted(arrays))}, not {sorted(wanted)}")
        for name, (dtype, sizes) in wanted.items():
            array = arrays[name]
            fits = [expected in (None, n) for expected, n in zip(sizes, array.shape, strict=False)]
            if array.dtype != dtype or array.ndim != len(sizes) or not all(fits):
                raise ValueError(
                    f"{name} has the dtype {array.dtype} and the shape {array.shape}, expected "
                    f"{np.dtype(dtype)} and {sizes}"
                )
        return arrays
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise GrowthError(f"{file}: truncated or corrupt: {error}: make the cache again") from error


def shard_file(directory: Path, number: int) -> Path:
    """The file of a shard, counted from 0."""
    return directory / f"rows-{number:05}.safetensors"


def _read_index(file: Path, header: CacheHeader) -> Arrays:
    """The arrays of the index; the keys must be those whose checksum the header holds."""
    count = header.examples
    index = mapped(
        file,
        {
            "keys": (np.uint64, (count,)),
            "order": (np.int64, (count,)),
            "first_row": (np.int64, (count + 1,)),
            "shard_row": (np.int64, (None,)),
        },
    )
    first, shard, order = (index[name] for name in ("first_row", "shard_row", "order"))
    rises = all(len(x) and x[0] == 0 and (x[1:] >= x[:-1]).all() for x in (first, shard))
    keys = np.zeros_like(index["keys"])
    if rises and first[-1] == shard[-1] and ((order >= 0) & (order < count)).all():
        keys[order] = index["keys"]
    if hashlib.sha256(keys.tobytes()).hexdigest() != header.data:
        raise GrowthError(f"{file}: not the index of {HEADER_FILE}: make the cache again")
    return index


# ------------------------------------------------------------------ reader


class TeacherCache(TopKRows):
    """A teacher cache written by `growkern.cache_teacher`, open for reading.

    Rows are read from disk when they are needed. A copy in another process maps the files again.

    Args:
        directory: of the cache.

    Raises:
        GrowthError: the directory is not a complete cache, or its header or index was changed.
    """

    remedy = "make the cache again"

    def __init__(self, directory: str | Path) -> None:
        self._open(Path(directory))
        for name in (HEADER_FILE, INDEX_FILE):
            self._check_file(name)

    def _open(self, directory: Path) -> None:
        self.directory, self.name = directory, str(directory)
        self.facts = self.header = read_header(directory)
        self._index = _read_index(directory / INDEX_FILE, self.header)
        sizes, header = np.diff(self._index["shard_row"]).tolist(), self.header
        bits = np.uint32 if DTYPES[header.dtype].itemsize == 4 else np.uint16
        width = -(-header.k * header.id_bits // 8)
        self._shards = [
            mapped(
                shard_file(directory, i),
                {"ids": (np.uint8, (rows, width)), "logprobs": (bits, (rows, header.k))},
            )
            for i, rows in enumerate(sizes)
        ]
        self._manifest = read_manifest(directory)
        # shared memory: a shard that one worker of a data loader checked is not read by the others
        self._is_checked = torch.zeros(len(sizes), dtype=torch.bool).share_memory_()

    def __getstate__(self) -> tuple[Path, Tensor]:
        return self.directory, self._is_checked

    def __setstate__(self, state: tuple[Path, Tensor]) -> None:
        # a copy in another process, which shares the notes on checked shards
        self._open(state[0])
        self._is_checked = state[1]

    def _check_file(self, name: str) -> None:
        wrong = damage_of(self.directory, name, self._manifest)
        if wrong:
            raise GrowthError(f"{self.directory} is damaged: {wrong}: make the cache again")

    def __len__(self) -> int:
        """The number of examples, each masking counted."""
        return len(self._index["first_row"]) - 1

    @functools.cached_property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(file.stat().st_size for file in self.directory.iterdir())

    def find(self, keys: np.ndarray) -> np.ndarray:
        """The numbers of the examples with these keys.

        Args:
            keys: (B,) uint64, from `keys_of`.

        Returns:
            (B,) int64; -1 for a key that is not in the cache.
        """
        by_key = self._index["keys"]
        place = np.searchsorted(by_key, keys).clip(max=max(0, len(by_key) - 1))
        if not len(by_key):
            return np.full(len(keys), -1)
        return np.where(by_key[place] == keys, self._index["order"][place], -1)

    def rows(self, examples: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        """Read the rows of some examples, one example after the other.

        Args:
            examples: numbers of the examples.

        Returns:
            Ids (R, k) int32 and log-probs (R, k) in the dtype of the cache.

        Raises:
            GrowthError: the rows are damaged, or their file is not as it was written.
        """
        packed, logprobs = [], []
        first_row, shard_row = self._index["first_row"], self._index["shard_row"]
        for example in examples:
            start, end = first_row[example], first_row[example + 1]
            # the last shard that starts at this row or before: empty shards may start there too
            number = int(np.searchsorted(shard_row[:-1], start, "right")) - 1
            if not self._is_checked[number]:
                self._check_file(shard_file(self.directory, number).name)
                self._is_checked[number] = True
            here = slice(start - shard_row[number], end - shard_row[number])
            packed.append(self._shards[number]["ids"][here])
            logprobs.append(self._shards[number]["logprobs"][here])
        header = self.header
        ids_Rk = torch.from_numpy(unpack_ids(np.concatenate(packed), header.k, header.id_bits))
        stored = torch.from_numpy(np.concatenate(logprobs)).view(DTYPES[header.dtype])
        fault = fault_of(ids_Rk, stored, header.vocab_size)
        if fault is not None:
            raise GrowthError(f"{self.directory} is damaged ({fault}): make the cache again")
        return ids_Rk, stored

    def batch(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Read the rows of a collated batch.

        Args:
            batch: input_ids and labels, (B, S) each, and maybe attention_mask or position_ids.

        Returns:
            Ids (B, S, k) int32 and log-probs (B, S, k). A position without a row has the ids -1 and
            the log-probs NaN.

        Raises:
            GrowthError: an example is not in the cache.
        """
        examples = self.find(keys_of(batch))
        if (examples < 0).any():
            raise GrowthError(
                f"{int((examples < 0).sum())} of {len(examples)} examples of a batch are not in "
                f"{self.directory}. It was made from other text, or with masks of another seed, "
                "probability or epoch: make it again with the data and the collator of the run"
            )
        header = self.header
        kept_BS = rows_of(batch, header.rows, header.causal, header.vocab_size)
        first_row = self._index["first_row"]
        counts = first_row[examples + 1] - first_row[examples]
        if not np.array_equal(kept_BS.sum(1).numpy(), counts):
            raise GrowthError(
                f"{self.directory / INDEX_FILE} is damaged (an example has another number of "
                "rows): make the cache again"
            )
        return placed(kept_BS, *self.rows(examples))
