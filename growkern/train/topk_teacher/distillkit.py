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

Files with the columns token_ids and top_values hold both as they are. The older format, with
packed_indices and coeffs, is refused.

Shape letters used in this file: B examples, S positions, R rows, k tokens per row.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.train.loss.vocabulary import tokenizer_fingerprint
from growkern.train.topk_teacher.facts import RowFacts, TopKRows, causal_rows

CONFIG_FILE = "compression_config.yaml"
PLAIN, PACKED, OLD = (
    ("token_ids", "top_values"),
    ("bytepacked_indices", "compressed_logprobs"),
    ("packed_indices", "exact_values", "coeffs"),
)
DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
SPECIAL = {"sqrt": torch.sqrt, "exp": torch.exp}
MOST_BITS = 63


# ------------------------------------------------------------------ decoding


@dataclass(frozen=True)
class Bin:
    """Residuals that share a scale.

    Attributes:
        scale_dtype: of the scale.
        element_bits: of each integer.
        num_elements: number of residuals.
    """

    scale_dtype: str
    element_bits: int
    num_elements: int


@dataclass(frozen=True)
class Compression:
    """How DistillKit packed one row: the fields of its `compression_config.yaml`."""

    d: int
    k: int
    exact_k: int
    residual_bins: tuple[Bin, ...] = ()
    exact_dtype: str = "float32"
    polynomial_terms: tuple[int | str, ...] = ()
    term_dtype: str = "float32"
    delta_encoding: bool = True
    error_diffusion: bool = False  # a matter of the writer alone
    normalize_t: bool = False

    @property
    def id_bits(self) -> int:
        """Bits of one id."""
        return max(1, math.ceil(math.log2(self.d)))

    def ids(self, packed: np.ndarray) -> Tensor:
        """Unpack (R, bytes) uint8 into ids (R, k) int64."""
        return _integers(packed, self.id_bits, self.k)

    def logprobs(self, packed: np.ndarray) -> Tensor:
        """Unpack (R, bytes) uint8 into log-probs (R, k) float32.

        Raises:
            ValueError: the bytes do not have the size that the fields ask for.
        """
        reader = _Reader(packed)
        exact = reader.floats(self.exact_k, self.exact_dtype)
        rest = self.k - self.exact_k
        others = torch.zeros(len(packed), rest)
        factors = reader.floats(len(self.polynomial_terms), self.term_dtype)
        start = 0
        for one in self.residual_bins:
            others[:, start : start + one.num_elements] = reader.residuals(one)
            start += one.num_elements
        reader.check_end()
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

    def check_end(self) -> None:
        if self.place != self.packed.shape[1]:
            raise ValueError(f"{self.packed.shape[1]} bytes per row, {self.place} expected")

    def floats(self, count: int, dtype: str) -> Tensor:
        kind = DTYPES[dtype]
        part = np.ascontiguousarray(self.take(count * kind.itemsize))
        return torch.from_numpy(part).view(kind) if count else torch.empty(len(part), 0, dtype=kind)

    def residuals(self, one: Bin) -> Tensor:
        scale = self.floats(1, one.scale_dtype).float()
        size = -(-one.num_elements * one.element_bits // 8)
        whole = _integers(self.take(size), one.element_bits, one.num_elements).float()
        # one bit is a sign; more bits count from the smallest integer
        centred = whole * 2 - 1 if one.element_bits == 1 else whole - 2 ** (one.element_bits - 1)
        return centred * scale


def _integers(packed: np.ndarray, bits: int, count: int) -> Tensor:
    """Unpack `count` unsigned integers of (R, bytes) uint8, the highest bits first: (R, count)."""
    if packed.shape[1] * 8 < count * bits:
        raise ValueError(f"{packed.shape[1]} bytes per row, {-(-count * bits // 8)} expected")
    flat = np.unpackbits(packed, axis=1, count=count * bits)
    bits_Rcb = flat.reshape(len(packed), count, bits).astype(np.int64)
    return torch.from_numpy(bits_Rcb @ (1 << np.arange(bits - 1, -1, -1, dtype=np.int64)))


def read_compression(file: Path) -> Compression:
    """Read `compression_config.yaml`.

    Raises:
        GrowthError: it is missing, or not such a file.
    """
    import yaml

    try:
        table = yaml.safe_load(file.read_text())
        bins = tuple(Bin(**one) for one in table.pop("residual_bins", ()))
        terms = tuple(table.pop("polynomial_terms", None) or ())
        found = Compression(**table, residual_bins=bins, polynomial_terms=terms)
        dtypes = {found.exact_dtype, found.term_dtype, *(one.scale_dtype for one in bins)}
        words = {x for x in terms if isinstance(x, str)}
        numbers = [found.k, found.d, *(n for x in bins for n in (x.element_bits, x.num_elements))]
        sizes_fit = 0 <= found.exact_k <= found.k and (
            sum(one.num_elements for one in bins) <= found.k - found.exact_k
        )
        if not (dtypes <= DTYPES.keys() and words <= SPECIAL.keys() and sizes_fit):
            raise ValueError("a dtype, a term or a size is none of DistillKit's")
        if min(numbers) < 1 or any(one.element_bits > MOST_BITS for one in bins):
            raise ValueError("a size is not positive")
    except OSError as error:
        raise GrowthError(f"{file}: {error.strerror or error}") from error
    except (yaml.YAMLError, AttributeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise GrowthError(f"{file}: not a compression config of DistillKit: {reason}") from error
    return found


# -------------------------------------------------------------------- reader


class DistillKitTeacher(TopKRows):
    """A teacher whose log-probs DistillKit's sampler stored, read as they are.

    `TwoStageTrainer` takes it as a teacher, `growkern.cache_teacher` turns it into a cache, and
    `batch` gives the arguments of `growkern.topk_kl_mlm_loss`. Train on `dataset`: an example is
    found by its tokens, so it must not be cut, and packed only with position_ids.

    Rounding can lift a row's probabilities above 1 in total. Such a row is scaled down to 1.

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
        try:
            import datasets
        except ImportError as error:
            raise GrowthError("DistillKit's files need datasets: pip install datasets") from error

        folder = Path(directory)
        self.name = str(directory)
        files = sorted(map(str, folder.glob("*.parquet")))
        if not files:
            raise GrowthError(f"{directory} has no *.parquet files")
        try:
            table = datasets.load_dataset("parquet", data_files=files, split="train")
        except (datasets.exceptions.DatasetGenerationError, OSError, ValueError) as error:
            raise GrowthError(f"{directory}: not readable as Parquet: {error}") from error
        columns = set(table.column_names)
        if set(OLD) <= columns:
            raise GrowthError(
                f"{directory} has DistillKit's older format ({', '.join(OLD)}): sample it again"
            )
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
        self._place = {_key(row): i for i, row in enumerate(_lists(self._table, "input_ids"))}
        self.facts = RowFacts(
            temperature=temperature,
            rows="all",
            causal=True,
            vocab_size=vocab_size,
            tokenizer=None if tokenizer is None else tokenizer_fingerprint(tokenizer),
            epochs=1,
        )

    def __len__(self) -> int:
        """The number of texts."""
        return len(self.dataset)

    def batch(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Read the rows of a collated batch.

        Args:
            batch: input_ids (B, S), and maybe attention_mask, or position_ids of packed documents.

        Returns:
            Ids (B, S, k) int32 and log-probs (B, S, k) float32. Padding and the last token of each
            document have no row: the ids -1, and the log-probs NaN.

        Raises:
            GrowthError: an example is not in the files, or its row is damaged.
        """
        return causal_rows(batch, lambda texts: [self._rows_of(np.array(x)) for x in texts])

    def _rows_of(self, tokens: np.ndarray) -> tuple[Tensor, Tensor]:
        """The ids (len(tokens) - 1, k) and log-probs of one text."""
        number = self._place.get(_key(tokens))
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
                ids, logprobs = torch.tensor(first).long(), torch.tensor(second).float()
            else:
                ids = self._compression.ids(first.astype(np.uint8))
                logprobs = self._compression.logprobs(second.astype(np.uint8))
            limit = self.facts.vocab_size or 1 << 31
            if logprobs.isnan().any() or ((ids < 0) | (ids >= limit)).any():
                raise ValueError("it holds NaN, or tokens beyond vocab_size")
        except ValueError as error:
            raise GrowthError(f"{self.name}, text {number}: {error}") from error
        return ids, logprobs - logprobs.logsumexp(-1, keepdim=True).clamp(min=0)


def _key(tokens: np.ndarray) -> bytes:
    """A hash of the tokens of a text."""
    return hashlib.blake2b(tokens.astype("<i8").tobytes(), digest_size=16).digest()


def _lists(table: Any, name: str) -> Sequence[np.ndarray]:
    """The lists of a column of lists, without copying their values."""
    found = []
    for chunk in table.data.column(name).chunks:
        values, ends = chunk.flatten().to_numpy(zero_copy_only=False), chunk.value_lengths()
        found += np.split(values, np.cumsum(ends.to_numpy())[:-1])
    return found


def _matrix(column: Any, rows: int) -> np.ndarray:
    """The one value of a column of lists of lists, (rows, any).

    Raises:
        ValueError: it has another number of rows, or rows of different lengths.
    """
    value = column.combine_chunks().flatten()
    if not 0 < rows <= len(value) <= rows + 1:
        raise ValueError(f"{len(value)} rows for {rows + 1} tokens")
    if len(set(value.value_lengths().to_pylist())) > 1:
        raise ValueError("its rows differ in length")
    # a writer that also stored the prediction after the last token
    return value.flatten().to_numpy(zero_copy_only=False).reshape(len(value), -1)[:rows]
