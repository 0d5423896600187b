"""What every teacher has that is known by the k likeliest tokens of each row.

Such a teacher is a cache on disk, a server, or a file of another library. None of them is a model
that runs in this process.
"""

import json
import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from growkern.arguments import POSITIVE, Limit, between, check_fields
from growkern.errors import GrowthError
from growkern.files import check_format, read_json, write_whole
from growkern.package import version
from growkern.train.loss.rows import document_starts, real_tokens, teacher_rows
from growkern.train.loss.vocabulary import tokenizer_fingerprint

# stand where the teacher has no row. No vocabulary has this id, and NaN is no log-prob: the loss
# refuses both
NO_ID, NO_LOGPROB = -1, float("nan")
# ids are stored in 32 bits with a sign
MOST_IDS = 1 << 31
# what bfloat16 rounds away of a number, and so of each log-prob of a teacher that computes in it
ROUNDING = 2.0**-7
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

Rows: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RowFacts:
    """How the rows of such a teacher were computed.

    Attributes:
        temperature: of the softmax.
        rows: "labels" (rows with a label) or "all" (every real token).
        causal: whether the teacher predicts the next token.
        vocab_size: columns that the softmax runs over; None if unknown.
        tokenizer: SHA-256 of the tokenizer's table, or None.
        epochs: maskings of each example.
    """

    temperature: float
    rows: str
    causal: bool
    vocab_size: int | None
    tokenizer: str | None
    epochs: int


class TopKRows(ABC):
    """The rows of one teacher.

    Attributes:
        name: for messages.
        remedy: completes "change the inheritance, or ..." for messages.
        facts: how the rows were computed.
    """

    name: str
    remedy: str
    facts: RowFacts

    @abstractmethod
    def batch(self, batch: dict[str, Any]) -> Rows:
        """The rows of a collated batch: ids (B, S, k) int32, log-probs (B, S, k); -1, NaN: none."""


class CausalRows(TopKRows):
    """The rows of a causal teacher that is asked for whole texts."""

    @abstractmethod
    def of_texts(self, texts: list[list[int]]) -> list[Rows]:
        """Ids (n - 1, k) and log-probs (n - 1, k) of each text, where n is its number of tokens.

        A text has two tokens or more, without padding. There is one for each document.
        """

    def batch(self, batch: dict[str, Any]) -> Rows:
        """The rows of a collated batch: none at padding and at the last token of each document."""
        ids_BS, real_BS = batch["input_ids"].cpu(), real_tokens(batch).cpu()
        has_row_BS, starts_BS = teacher_rows(batch).cpu(), document_starts(batch)
        starts_BS = (
            torch.zeros_like(ids_BS) if starts_BS is None else starts_BS.cpu().expand_as(ids_BS)
        )
        places = []
        for b, (real_S, starts_S) in enumerate(zip(real_BS, starts_BS, strict=True)):
            # a packed row has no padding, so its starts count its tokens
            texts = real_S.nonzero()[:, 0].tensor_split(starts_S.nonzero()[1:, 0])
            places += [(b, at) for at in texts if len(at) > 1]
        rows = self.of_texts([ids_BS[b, at].tolist() for b, at in places])
        k = rows[0][0].shape[-1] if rows else 1
        ids_BSk, logprobs_BSk = no_rows((*ids_BS.shape, k), torch.float32)
        for (b, at), (ids_Rk, logprobs_Rk) in zip(places, rows, strict=True):
            ids_BSk[b, at[:-1]], logprobs_BSk[b, at[:-1]] = ids_Rk.int(), logprobs_Rk
        none_BS1 = ~has_row_BS[..., None]
        return ids_BSk.masked_fill_(none_BS1, NO_ID), logprobs_BSk.masked_fill_(
            none_BS1, NO_LOGPROB
        )


def causal_facts(temperature: float, vocab_size: int | None, tokenizer: Any | None) -> RowFacts:
    """The facts of a causal teacher, which has a row for every real token."""
    known = None if tokenizer is None else tokenizer_fingerprint(tokenizer)
    return RowFacts(temperature, "all", True, vocab_size, known, epochs=1)


def fault_of(ids_Rk: Tensor, logprobs_Rk: Tensor, columns: int | None) -> str | None:
    """The first fault in words: what no row of a teacher holds; or None.

    Args:
        ids_Rk: (R, k) integers.
        logprobs_Rk: (R, k). A token that is not the likeliest may have the probability 0.
        columns: of the teacher's softmax; None if unknown.
    """
    limit = MOST_IDS if columns is None else columns
    is_outside = (ids_Rk < 0) | (ids_Rk > limit - 1)
    if bool(is_outside.any()):
        return (
            f"token {int(ids_Rk[is_outside][0])}, but vocab_size is {limit}: teacher and student "
            "must have the same tokenizer"
        )
    ordered_Rk = ids_Rk.sort(-1).values
    is_double = ordered_Rk[:, 1:] == ordered_Rk[:, :-1]
    if bool(is_double.any()):
        return f"token {int(ordered_Rk[:, 1:][is_double][0])} twice in a row"
    wide_Rk = logprobs_Rk.float()
    is_wrong = ~(wide_Rk <= ROUNDING)
    is_wrong[:, :1] |= wide_Rk[:, :1].isinf()
    if bool(is_wrong.any()):
        return f"the log-prob {float(wide_Rk[is_wrong][0]):g}: check the teacher's weights"
    # each log-prob l is off by at most ROUNDING |l|, and the sum of p |l| is at most log k
    most = 1 + ROUNDING * (1 + math.log(ids_Rk.shape[-1]))
    mass_R = wide_Rk.exp().sum(-1)
    if bool((mass_R > most).any()):
        return f"probabilities that add up to {float(mass_R.max()):g}: check the teacher"
    return None


def no_rows(shape: tuple[int, ...], dtype: torch.dtype) -> Rows:
    """Ids and log-probs of positions without a row, in the shape (B, S, k)."""
    return torch.full(shape, NO_ID, dtype=torch.int32), torch.full(shape, NO_LOGPROB, dtype=dtype)


# ------------------------------------------------------------------- cache


@dataclass(frozen=True)
class CacheHeader(RowFacts):
    """How a cache was made, `cache.json`. Two caches with equal headers hold the same rows.

    Attributes:
        format: version of the file format.
        k: tokens per row.
        dtype: of the log-probs, a key of DTYPES.
        examples: number of examples, each masking counted.
        teacher: SHA-256 of the teacher's weights.
        data: SHA-256 of the keys of all examples.

    Raises:
        GrowthError: a value is impossible.
    """

    LIMITS: ClassVar[dict[str, Limit]] = {
        **dict.fromkeys(("vocab_size", "k"), between(1, 1 << MAX_ID_BITS)),
        **dict.fromkeys(("temperature", "epochs", "examples"), POSITIVE),
    }

    rows: Literal["labels", "all"]
    vocab_size: int
    format: int
    k: int
    dtype: Literal["float16", "bfloat16", "float32"]
    examples: int
    teacher: str
    data: str

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
    check_format(file, table, FORMAT)
    names = {field.name for field in fields(CacheHeader)}
    if not isinstance(table, dict) or table.keys() - {WRITER} != names:
        raise GrowthError(f"{file} is not a cache header of format {FORMAT}: make the cache again")
    try:
        return CacheHeader(**{name: table[name] for name in names})
    except GrowthError as error:
        raise GrowthError(f"{file}: {error}") from error
