"""The files of a teacher cache, which stores the k likeliest tokens of a teacher for every row.

A cache is a directory:

    cache.json               how the cache was made: the fields of `CacheHeader`
    rows-00000.safetensors   ids (R, ceil(k b / 8)) uint8, logprobs (R, k); more files follow
    index.safetensors        where the rows of each example are, and the keys of the examples

An id takes b = ceil(log2 V) bits, the lowest bits first. A log-prob is float16, bfloat16 or
float32. Rows are in the order of positions, examples in the order of the data. The files are
mapped into memory, not read as a whole.

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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import save_file
from torch import Tensor

from growkern.errors import GrowthError
from growkern.train.head import IGNORE_INDEX, align_labels, align_rows
from growkern.whole import write_whole

FORMAT = 1
HEADER_FILE, INDEX_FILE = "cache.json", "index.safetensors"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
ROWS = ("labels", "all")
# an id is read from four bytes and may start at any of the first eight bits
MAX_ID_BITS = 25
_NUMPY = {"U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64, "I64": np.int64}


@dataclass(frozen=True)
class CacheHeader:
    """How a cache was made. Two caches with equal headers hold the same rows.

    Args:
        format: version of the file format.
        k: tokens per row.
        temperature: of the softmax.
        rows: "labels" (rows with a label) or "all" (every real token).
        dtype: of the log-probs, a key of DTYPES.
        vocab_size: columns of the teacher's head that the softmax runs over.
        causal: whether the teacher predicts the next token.
        epochs: maskings of each example.
        examples: number of examples, each masking counted.
        teacher: SHA-256 of the teacher's weights.
        tokenizer: SHA-256 of the tokenizer's table, or None.
        data: SHA-256 of the keys of all examples.
    """

    format: int
    k: int
    temperature: float
    rows: str
    dtype: str
    vocab_size: int
    causal: bool
    epochs: int
    examples: int
    teacher: str
    tokenizer: str | None
    data: str

    @property
    def id_bits(self) -> int:
        """Bits of one id."""
        return max(1, (self.vocab_size - 1).bit_length())

    @property
    def row_bytes(self) -> int:
        """Bytes of one row on disk, without its share of the index."""
        return -(-self.k * self.id_bits // 8) + self.k * DTYPES[self.dtype].itemsize


# -------------------------------------------------------------- ids in few bits


def pack_ids(ids_Rk: np.ndarray, bits: int) -> np.ndarray:
    """Pack (R, k) integer ids into (R, ceil(k * bits / 8)) uint8."""
    bits_Rkb = (ids_Rk[:, :, None] >> np.arange(bits)) & 1
    flat = bits_Rkb.astype(np.uint8).reshape(len(ids_Rk), ids_Rk.shape[1] * bits)
    return np.packbits(flat, axis=1, bitorder="little")


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


# ----------------------------------------------------------- rows of a batch


def rows_of(batch: dict[str, Any], rows: str, causal: bool) -> Tensor:
    """The positions of a batch that have a row in the cache.

    Args:
        batch: input_ids, labels and maybe attention_mask, (B, S) each.
        rows: "labels" or "all".
        causal: whether the model predicts the next token.

    Returns:
        (B, S) bool.
    """
    labels_BS = align_labels(batch["labels"], causal=causal)
    if rows == "labels":
        return labels_BS != IGNORE_INDEX
    mask_BS = batch.get("attention_mask")
    mask_BS = torch.ones_like(labels_BS) if mask_BS is None else mask_BS
    return align_rows(mask_BS, causal=causal)


def keys_of(batch: dict[str, Any]) -> np.ndarray:
    """The keys of the examples of a batch, (B,) uint64. They do not depend on the padding."""
    tokens_BS, labels_BS = (batch[name].cpu().numpy() for name in ("input_ids", "labels"))
    mask_BS = np.ones(tokens_BS.shape, bool)
    if batch.get("attention_mask") is not None:
        mask_BS = batch["attention_mask"].cpu().numpy().astype(bool)
    keys = []
    for tokens_S, labels_S, mask_S in zip(tokens_BS, labels_BS, mask_BS, strict=True):
        content = np.stack([tokens_S[mask_S], labels_S[mask_S]]).astype("<i8")
        keys.append(hashlib.blake2b(content.tobytes(), digest_size=8).digest())
    return np.frombuffer(b"".join(keys), "<u8")


# ------------------------------------------------------------------- files


def write_tensors(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write a safetensors file, completely or not at all.

    Raises:
        OSError: the disk is full or failed.
    """
    whole = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    try:
        write_whole(file, lambda partial: save_file(whole, partial))
    except SafetensorError as error:
        # the library has no errno to give
        raise OSError(errno.EIO, f"{file.name}: {error}") from error


def write_header(directory: Path, header: CacheHeader) -> None:
    """Write the header of a cache, completely or not at all."""
    text = json.dumps(asdict(header), indent=1) + "\n"
    write_whole(directory / HEADER_FILE, lambda partial: partial.write_text(text))


def read_header(directory: Path) -> CacheHeader:
    """Read the header of a cache.

    Raises:
        GrowthError: the directory is not a cache, or one of another format.
    """
    file = directory / HEADER_FILE
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise GrowthError(f"{directory} is not a teacher cache: {error}") from error
    names = [field.name for field in fields(CacheHeader)]
    if (
        not isinstance(table, dict)
        or table.get("format") != FORMAT
        or sorted(table) != sorted(names)
    ):
        raise GrowthError(f"{file} is not a cache header of format {FORMAT}: make the cache again")
    return CacheHeader(**table)


def mapped(file: Path) -> dict[str, np.ndarray]:
    """Map the arrays of a safetensors file into memory without reading them.

    Raises:
        GrowthError: the file is missing, truncated or not a safetensors file.
    """
    try:
        with file.open("rb") as opened:
            start = 8 + int.from_bytes(opened.read(8), "little")
            table = json.loads(opened.read(start - 8))
        table.pop("__metadata__", None)
        return {
            name: np.memmap(
                file, _NUMPY[entry["dtype"]], "r", start + entry["data_offsets"][0],
                tuple(entry["shape"]),
            )
            if 0 not in entry["shape"]
            else np.empty(entry["shape"], _NUMPY[entry["dtype"]])
            for name, entry in table.items()
        }  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GrowthError(f"{file}: truncated or corrupt: {error}; make the cache again") from error


def shard_file(directory: Path, number: int) -> Path:
    """The file of a shard, counted from 0."""
    return directory / f"rows-{number:05}.safetensors"


# ------------------------------------------------------------------ reader


class TeacherCache:
    """A teacher cache written by `growkern.cache_teacher`, open for reading.

    Rows are read from disk when they are needed. A copy in another process maps the files again.

    Args:
        directory: of the cache.

    Raises:
        GrowthError: the directory is not a complete cache.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.header = read_header(self.directory)
        self._index = mapped(self.directory / INDEX_FILE)
        if len(self) != self.header.examples:
            raise GrowthError(
                f"{self.directory}: {len(self)} examples in the index, {self.header.examples} in "
                "the header: make the cache again"
            )
        self._shards = [
            mapped(shard_file(self.directory, i)) for i in range(len(self._index["shard_row"]) - 1)
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        return TeacherCache, (self.directory,)

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
            ids (R, k) int32 and log-probs (R, k) in the dtype of the cache.
        """
        packed, logprobs = [], []
        first_row, shard_row = self._index["first_row"], self._index["shard_row"]
        for example in examples:
            start, end = first_row[example], first_row[example + 1]
            # the last shard that starts at this row or before: empty shards may start there too
            number = int(np.searchsorted(shard_row[:-1], start, "right")) - 1
            here = slice(start - shard_row[number], end - shard_row[number])
            packed.append(self._shards[number]["ids"][here])
            logprobs.append(self._shards[number]["logprobs"][here])
        header = self.header
        ids_Rk = unpack_ids(np.concatenate(packed), header.k, header.id_bits)
        stored = torch.from_numpy(np.concatenate(logprobs))
        return torch.from_numpy(ids_Rk), stored.view(DTYPES[header.dtype])

    def batch(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Read the rows of a collated batch.

        Args:
            batch: input_ids and labels, (B, S) each, and maybe attention_mask.

        Returns:
            ids (B, S, k) int32 and log-probs (B, S, k), zeros at positions without a row.

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
        kept_BS = rows_of(batch, self.header.rows, self.header.causal)
        ids_Rk, logprobs_Rk = self.rows(examples)
        shape = (*kept_BS.shape, self.header.k)
        ids_BSk = torch.zeros(shape, dtype=ids_Rk.dtype)
        logprobs_BSk = torch.zeros(shape, dtype=logprobs_Rk.dtype)
        ids_BSk[kept_BS], logprobs_BSk[kept_BS] = ids_Rk, logprobs_Rk
        return ids_BSk, logprobs_BSk
