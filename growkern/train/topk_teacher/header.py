"""The header of a teacher cache, `cache.json`: how the cache was made."""

import json
import math
import reprlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from growkern.errors import GrowthError
from growkern.files import read_json, write_whole

FORMAT = 1
HEADER_FILE = "cache.json"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
ROWS = ("labels", "all")
# an id is read from four bytes and may start at any of the first eight bits
MAX_ID_BITS = 25
# a header has some 500 bytes
MOST_BYTES = 100_000


@dataclass(frozen=True)
class CacheHeader:
    """How a cache was made. Two caches with equal headers hold the same rows.

    Attributes:
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


def write_header(directory: Path, header: CacheHeader) -> None:
    """Write the header of a cache, completely or not at all."""
    text = json.dumps(asdict(header), indent=1) + "\n"
    write_whole(directory / HEADER_FILE, lambda partial: partial.write_text(text))


def read_header(directory: Path) -> CacheHeader:
    """Read the header of a cache.

    Raises:
        GrowthError: the directory is not a cache, or one of another format, or a field of its
            header has a value that no cache has.
    """
    file = directory / HEADER_FILE
    try:
        table = read_json(file, MOST_BYTES, "cache header")
    except GrowthError as error:
        raise GrowthError(
            f"{directory} is not a teacher cache: {error}: give the directory that growkern "
            "cache-teacher made"
        ) from error
    names = [field.name for field in fields(CacheHeader)]
    if (
        not isinstance(table, dict)
        or table.get("format") != FORMAT
        or sorted(table) != sorted(names)
    ):
        raise GrowthError(f"{file} is not a cache header of format {FORMAT}: make the cache again")
    header = CacheHeader(**table)
    _check_header(file, header)
    return header


def _check_header(file: Path, header: CacheHeader) -> None:
    columns = 1 << MAX_ID_BITS
    for name, kinds, most in (
        ("vocab_size", int, columns),
        ("k", int, header.vocab_size),
        ("temperature", (int, float), None),
        ("epochs", int, None),
        ("examples", int, None),
    ):
        value = getattr(header, name)
        # True is an int; NaN lies in no interval
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf or (most is not None and value > most):
            wanted = "must be positive" if most is None else f"must lie in 1 .. {most}"
            raise GrowthError(f"{file}: {name} is {reprlib.repr(value)}: it {wanted}")
    for name, allowed in (("rows", ROWS), ("dtype", tuple(DTYPES)), ("causal", (False, True))):
        value = getattr(header, name)
        # 0 equals False
        if not any(value is one or (value == one and isinstance(one, str)) for one in allowed):
            names = " or ".join(map(str, allowed))
            raise GrowthError(f"{file}: {name} is {reprlib.repr(value)}: it must be {names}")
    for name in ("teacher", "data", "tokenizer"):
        value = getattr(header, name)
        if not isinstance(value, str) and not (name == "tokenizer" and value is None):
            raise GrowthError(f"{file}: {name} is {reprlib.repr(value)}: it must be a checksum")
