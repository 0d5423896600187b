"""`DistillKitTeacher`: the log-probs that DistillKit's sampler stored in Parquet files.

The directory holds `*.parquet` with one text per row, and `compression_config.yaml`. A text of S
tokens has S - 1 rows: entry i is the prediction of position i. Columns:

    input_ids             the tokens, (S,)
    bytepacked_indices    the ids of k tokens, b bits each, the highest bit first, (S - 1, bytes)
    compressed_logprobs   their log-probs, likeliest first, (S - 1, bytes)

The bytes of the log-probs of one row are, one part after the other:

1. the first exact_k values as floats of exact_dtype;
2. the coefficients of a curve through the others: a polynomial, with sqrt and exp if asked for;
3. for each bin of residuals, its scale and then integers of a few bits, rounded residual / scale.

Values 2 and 3 are added. With delta_encoding every value is the step from the one before it.

Files with the columns token_ids and top_values hold both as they are.

Shape letters used in this file: S tokens of a text, R rows, k tokens per row.
"""

from __future__ import annotations

import hashlib
import math
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from growkern.arguments import Limit, between, check_fields
from growkern.errors import GrowthError
from growkern.files import read_bounded
from growkern.train.dataset.source import need_datasets
from growkern.train.topk_teacher.teacher import MOST_IDS, CausalRows, Rows, causal_facts, fault_of

CONFIG_FILE = "compression_config.yaml"
Dtype = Literal["float16", "bfloat16", "float32", "float64"]
SPECIAL = {"sqrt": torch.sqrt, "exp": torch.exp}
MOST_BITS = 63
# errors of the YAML reader and of fields that are no config
UNREADABLE = (AttributeError, TypeError, ValueError, LookupError, RecursionError)
# a config has some 500 bytes
MOST_BYTES = 10_000
# a config has five: the stream, the document, its table, the list of bins, a bin
MOST_LEVELS = 10
PLAIN, PACKED = ("token_ids", "top_values"), ("bytepacked_indices", "compressed_logprobs")


class DistillKitTeacher(CausalRows):
    """A teacher whose log-probs DistillKit's sampler stored, read as they are.

    `TwoStageTrainer` takes it as a teacher, `growkern.cache_teacher` turns it into a cache, and
    `batch` gives the arguments of `growkern.topk_kl_mlm_loss`. Train on `dataset`: an example is
    found by its tokens, so it must not be cut, and packed only with position_ids.

    Rounding can lift a row's probabilities a little above 1 in total. Such a row is scaled down to
    1. Rows with a larger total are refused: they are no log-probs.

    Args:
        directory: with the Parquet files and their `compression_config.yaml`.
        temperature: with which the teacher was sampled.
        vocab_size: columns of the teacher's softmax; ids beyond are refused. None skips the check.
        tokenizer: of the teacher. It is compared with the student's when training starts.

    Attributes:
        dataset: the texts, a `datasets.Dataset` with the column input_ids.

    Raises:
        GrowthError: the directory holds no such files, or `datasets` is not installed.
    """

    remedy = "sample the teacher again"

    def __init__(
        self,
        directory: str | Path,
        *,
        temperature: float = 1.0,
        vocab_size: int | None = None,
        tokenizer: Any | None = None,
    ) -> None:
        datasets = need_datasets("reading DistillKit's files")
        folder = Path(directory)
        self.name = str(directory)
        files = sorted(map(str, folder.glob("*.parquet")))
        if not files:
            raise GrowthError(f"{directory} has no *.parquet files: give a folder of DistillKit's")
        try:
            table = datasets.load_dataset("parquet", data_files=files, split="train")
        except (datasets.exceptions.DatasetGenerationError, OSError, ValueError) as error:
            why = " ".join(str(error).split())[:300]
            raise GrowthError(f"{directory}: not readable as Parquet: {why}") from error
        columns = set(table.column_names)
        self._pair = PACKED if set(PACKED) <= columns else PLAIN
        if not {"input_ids", *self._pair} <= columns:
            raise GrowthError(
                f"{directory} has the columns {sorted(columns)}: input_ids and "
                f"{' and '.join(PACKED)} (or {' and '.join(PLAIN)}) are needed"
            )
        is_packed = self._pair == PACKED
        self._compression = read_compression(folder / CONFIG_FILE) if is_packed else None
        self.dataset = table.select_columns("input_ids")
        self._table = table.with_format("arrow")
        try:
            texts = _lists(self._table, "input_ids")
        except ValueError as error:
            raise GrowthError(f"{directory}, input_ids: {error}") from error
        self._place = {_key(row): i for i, row in enumerate(texts)}
        self.facts = causal_facts(temperature, vocab_size, tokenizer)

    def __len__(self) -> int:
        """The number of texts."""
        return len(self.dataset)

    def of_texts(self, texts: list[list[int]]) -> list[Rows]:
        """The rows of several texts, which must hold the same number of tokens each."""
        rows = [self._rows_of(text) for text in texts]
        counts = {ids_Rk.shape[-1] for ids_Rk, _ in rows}
        if len(counts) > 1:
            raise GrowthError(
                f"{self.name}: texts have rows of {min(counts)} to {max(counts)} tokens: "
                f"{self.remedy}, with one k for all texts"
            )
        return rows

    def _rows_of(self, tokens: list[int]) -> Rows:
        """The ids (len(tokens) - 1, k) and log-probs of one text."""
        number = self._place.get(_key(np.array(tokens)))
        if number is None:
            raise GrowthError(
                f"a text of {len(tokens)} tokens is not in {self.name}: train on its own dataset, "
                "do not cut its texts, and pack them only with position_ids"
            )
        row = self._table[number]
        rows = len(tokens) - 1
        try:
            first, second = (_matrix(row[name], rows) for name in self._pair)
            if self._compression is None:
                ids, logprobs = _plain(first, second)
            else:
                ids = self._compression.ids(_bytes(first))
                logprobs = self._compression.logprobs(_bytes(second))
            # before they are scaled: logits would become log-probs
            fault = fault_of(ids, logprobs, self.facts.vocab_size)
            fault = fault and f"it holds {fault}"
            logprobs = logprobs - logprobs.logsumexp(-1, keepdim=True).clamp(min=0)
        except ValueError as error:
            fault = str(error)
        if fault is not None:
            raise GrowthError(f"{self.name}, text {number}: {fault}")
        return ids, logprobs


def _key(tokens: np.ndarray) -> bytes:
    """A hash of the tokens of a text."""
    return hashlib.blake2b(tokens.astype("<i8").tobytes(), digest_size=16).digest()


def _lists(table: Any, name: str) -> Sequence[np.ndarray]:
    """The lists of integers of a column, without copying their values."""
    lists = []
    for chunk in table.data.column(name).chunks:
        values = _numbers(chunk)
        _check_integers(values)
        lists += np.split(values, np.cumsum(chunk.value_lengths().to_numpy())[:-1])
    return lists


def _flat(column: Any) -> Any:
    """The entries of an Arrow column of lists, one list after the other."""
    if not hasattr(column, "value_lengths"):
        raise ValueError(f"it holds {column.type}, not lists")
    if column.null_count:
        raise ValueError("a list is missing (null)")
    return column.flatten()


def _numbers(column: Any) -> np.ndarray:
    """The numbers of an Arrow column of lists, one list after the other."""
    flat = _flat(column)
    if flat.null_count:
        raise ValueError("a number is missing (null)")
    values = flat.to_numpy(zero_copy_only=False)
    if values.dtype.kind not in "iuf":
        raise ValueError(f"it holds {flat.type}, not numbers")
    return values


def _check_integers(values: np.ndarray) -> None:
    if values.dtype.kind == "f":
        raise ValueError(f"it holds {values.dtype}, not integers")


def _bytes(values: np.ndarray) -> np.ndarray:
    """Packed rows as uint8."""
    _check_integers(values)
    if values.size and not (values.min() >= 0 and values.max() <= 255):
        raise ValueError("it holds numbers that are no bytes")
    return values.astype(np.uint8)


def _plain(ids: np.ndarray, logprobs: np.ndarray) -> Rows:
    """Rows that are stored as they are."""
    _check_integers(ids)
    if ids.shape != logprobs.shape or not ids.size:
        raise ValueError(f"its ids have the shape {ids.shape}, its log-probs {logprobs.shape}")
    return torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(logprobs.astype(np.float32))


def _matrix(column: Any, rows: int) -> np.ndarray:
    """The one value of a column of lists of lists of numbers, (rows, any)."""
    value = _flat(column.combine_chunks())
    if not 0 < rows <= len(value) <= rows + 1:
        raise ValueError(f"{len(value)} rows for {rows + 1} tokens")
    values, lengths = _numbers(value), value.value_lengths()
    if len(set(lengths.to_pylist())) > 1:
        raise ValueError("its rows differ in length")
    # a writer that also stored the prediction after the last token
    return values.reshape(len(value), -1)[:rows]


# ------------------------------------------------------------------- packed rows


@dataclass(frozen=True)
class Bin:
    """Residuals that share a scale, and the bits of each of them as an integer."""

    LIMITS: ClassVar[dict[str, Limit]] = {
        "element_bits": between(1, MOST_BITS),
        "num_elements": between(1, MOST_IDS),
    }

    scale_dtype: Dtype
    element_bits: int
    num_elements: int

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Compression:
    """How DistillKit packed one row: the fields of its `compression_config.yaml`."""

    LIMITS: ClassVar[dict[str, Limit]] = dict.fromkeys(("d", "k"), between(1, MOST_IDS))

    d: int
    k: int
    exact_k: int
    residual_bins: tuple[Bin, ...] = ()
    exact_dtype: Dtype = "float32"
    polynomial_terms: tuple[int | str, ...] = ()
    term_dtype: Dtype = "float32"
    delta_encoding: bool = True
    error_diffusion: bool = False  # a matter of the writer alone
    normalize_t: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.k > self.d:
            raise ValueError(f"k is {self.k}, more than d, which is {self.d}")
        for term in self.polynomial_terms:
            is_power = type(term) is int and 0 <= term <= MOST_BITS
            if not is_power and term not in SPECIAL:
                raise ValueError(
                    f"polynomial_terms has {reprlib.repr(term)}: a term is one of "
                    f"{', '.join(SPECIAL)} or a power in 0 .. {MOST_BITS}"
                )
        residuals = sum(part.num_elements for part in self.residual_bins)
        if not 0 <= self.exact_k <= self.k or residuals > self.k - self.exact_k:
            raise ValueError("exact_k and the residual_bins do not fit k")

    @property
    def id_bits(self) -> int:
        """Bits of one id."""
        return max(1, math.ceil(math.log2(self.d)))

    def ids(self, packed: np.ndarray) -> Tensor:
        """Unpack (R, bytes) uint8 into ids (R, k) int64."""
        return _integers(packed, self.id_bits, self.k)

    def logprobs(self, packed: np.ndarray) -> Tensor:
        """Unpack (R, bytes) uint8 into log-probs (R, k) float32."""
        reader = _Reader(packed)
        exact = reader.floats(self.exact_k, self.exact_dtype)
        rest = self.k - self.exact_k
        others = torch.zeros(len(packed), rest)
        factors = reader.floats(len(self.polynomial_terms), self.term_dtype)
        start = 0
        for part in self.residual_bins:
            others[:, start : start + part.num_elements] = reader.residuals(part)
            start += part.num_elements
        if reader.place != packed.shape[1]:
            raise ValueError(f"{packed.shape[1]} bytes per row, {reader.place} expected")
        # the dtypes of each step are DistillKit's, so that the same bytes give the same values
        others = others.to(exact.dtype)
        if self.polynomial_terms:
            others = (self._terms(rest, factors.dtype) * factors[:, None]).sum(-1) + others
        values = torch.cat([exact, others], dim=-1)
        if self.delta_encoding:
            values = values.float().cumsum(-1).to(exact.dtype)
        return values.float()

    def _terms(self, count: int, dtype: torch.dtype) -> Tensor:
        """The terms of the curve at each of its places, (count, terms)."""
        t = torch.arange(count, dtype=dtype)
        if self.normalize_t:
            t = torch.linspace(0, 1, count, dtype=dtype)
        columns = [SPECIAL[x](t) if isinstance(x, str) else t**x for x in self.polynomial_terms]
        return torch.stack(columns, -1)


class _Reader:
    """Takes the parts of packed rows (R, bytes) one after the other."""

    def __init__(self, packed: np.ndarray) -> None:
        self.packed, self.place = packed, 0

    def take(self, size: int) -> np.ndarray:
        part = self.packed[:, self.place : self.place + size]
        if part.shape[1] != size:
            raise ValueError(f"{self.packed.shape[1]} bytes per row are too few")
        self.place += size
        return part

    def floats(self, count: int, dtype: Dtype) -> Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        part = np.ascontiguousarray(self.take(count * kind.itemsize))
        return torch.from_numpy(part).view(kind) if count else torch.empty(len(part), 0, dtype=kind)

    def residuals(self, of: Bin) -> Tensor:
        scale, bits = self.floats(1, of.scale_dtype).float(), of.element_bits
        packed = self.take(-(-of.num_elements * bits // 8))
        whole = _integers(packed, bits, of.num_elements).float()
        # one bit is a sign; more bits count from the smallest integer
        centred = whole * 2 - 1 if bits == 1 else whole - 2 ** (bits - 1)
        return centred * scale


def _integers(packed: np.ndarray, bits: int, count: int) -> Tensor:
    """Unpack `count` unsigned integers of (R, bytes) uint8, the highest bits first: (R, count)."""
    if packed.shape[1] * 8 < count * bits:
        raise ValueError(f"{packed.shape[1]} bytes per row, {-(-count * bits // 8)} expected")
    flat = np.unpackbits(packed, axis=1, count=count * bits)
    bits_Rcb = flat.reshape(len(packed), count, bits).astype(np.int64)
    return torch.from_numpy(bits_Rcb @ (1 << np.arange(bits - 1, -1, -1, dtype=np.int64)))


def read_compression(file: Path) -> Compression:
    """Read `compression_config.yaml`. A file that is none is refused."""
    import yaml

    content = read_bounded(file, MOST_BYTES, "compression config")
    try:
        _check_plain(yaml.parse(content, Loader=yaml.SafeLoader))
        table = yaml.safe_load(content)
        if not isinstance(table, dict):
            raise ValueError(f"it holds a {type(table).__name__}, not a table of fields")
        bins = tuple(Bin(**values) for values in table.pop("residual_bins", ()))
        terms = tuple(table.pop("polynomial_terms", None) or ())
        return Compression(**table, residual_bins=bins, polynomial_terms=terms)
    except (yaml.YAMLError, *UNREADABLE) as error:
        reason = " ".join(str(error).split())[:300]
        raise GrowthError(f"{file}: not a compression config of DistillKit: {reason}") from error


def _check_plain(events: Iterable[Any]) -> None:
    """Refuse what makes a short text large or slow, or takes a value for what it is not.

    The events are those of the parser, which reads no further than it is asked to.
    """
    level = 0
    for event in events:
        kind = type(event).__name__
        if getattr(event, "tag", None):
            raise ValueError(f"it has the tag {reprlib.repr(event.tag)}: write values without tags")
        if getattr(event, "value", None) == "<<" or kind == "AliasEvent":
            raise ValueError("it has an alias or a merge (<<): write each value where it stands")
        level += kind.endswith("StartEvent") - kind.endswith("EndEvent")
        if level > MOST_LEVELS:
            raise ValueError(f"it is nested in more than {MOST_LEVELS} levels")
