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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from growkern.errors import GrowthError
from growkern.train.topk_teacher.compression import read_compression
from growkern.train.topk_teacher.facts import CausalRows, Rows, causal_facts, fault_of

CONFIG_FILE = "compression_config.yaml"
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
        try:
            import datasets
        except ImportError as error:
            raise GrowthError("DistillKit's files need datasets: pip install datasets") from error

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
        found = [self._rows_of(text) for text in texts]
        counts = {ids_Rk.shape[-1] for ids_Rk, _ in found}
        if len(counts) > 1:
            raise GrowthError(
                f"{self.name}: texts have rows of {min(counts)} to {max(counts)} tokens: "
                f"{self.remedy}, with one k for all texts"
            )
        return found

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
    """The lists of integers of a column, without copying their values.

    Raises:
        ValueError: the column holds something else.
    """
    found = []
    for chunk in table.data.column(name).chunks:
        values = _numbers(chunk)
        _check_integers(values)
        found += np.split(values, np.cumsum(chunk.value_lengths().to_numpy())[:-1])
    return found


def _flat(column: Any) -> Any:
    """The entries of an Arrow column of lists, one list after the other.

    Raises:
        ValueError: it holds something else, or a list is missing.
    """
    if not hasattr(column, "value_lengths"):
        raise ValueError(f"it holds {column.type}, not lists")
    if column.null_count:
        raise ValueError("a list is missing (null)")
    return column.flatten()


def _numbers(column: Any) -> np.ndarray:
    """The numbers of an Arrow column of lists, one list after the other.

    Raises:
        ValueError: as `_flat`, or a value is no number.
    """
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
    """Packed rows as uint8.

    Raises:
        ValueError: a value is no byte.
    """
    _check_integers(values)
    if values.size and not (values.min() >= 0 and values.max() <= 255):
        raise ValueError("it holds numbers that are no bytes")
    return values.astype(np.uint8)


def _plain(ids: np.ndarray, logprobs: np.ndarray) -> Rows:
    """Rows that are stored as they are.

    Raises:
        ValueError: they differ in size, or the ids are no integers.
    """
    _check_integers(ids)
    if ids.shape != logprobs.shape or not ids.size:
        raise ValueError(f"its ids have the shape {ids.shape}, its log-probs {logprobs.shape}")
    return torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(logprobs.astype(np.float32))


def _matrix(column: Any, rows: int) -> np.ndarray:
    """The one value of a column of lists of lists of numbers, (rows, any).

    Raises:
        ValueError: it is something else, has another number of rows, or rows of different lengths.
    """
    value = _flat(column.combine_chunks())
    if not 0 < rows <= len(value) <= rows + 1:
        raise ValueError(f"{len(value)} rows for {rows + 1} tokens")
    values, lengths = _numbers(value), value.value_lengths()
    if len(set(lengths.to_pylist())) > 1:
        raise ValueError("its rows differ in length")
    # a writer that also stored the prediction after the last token
    return values.reshape(len(value), -1)[:rows]
