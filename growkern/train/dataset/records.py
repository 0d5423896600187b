"""Turns records into tokens, and these into rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from growkern.errors import GrowthError, a_kind
from growkern.train.dataset.cache import DTYPES, IDS, LABELS, SIDE, WEIGHTS, Tokens
from growkern.train.dataset.source import CONTINUED, TEXT, DataSource
from growkern.train.model import IGNORE_INDEX, head_of, separator_of
from growkern.train.rules import check
from growkern.train.sections import DataSection

# records that are tokenised together: so many, or of so many characters
RECORDS, CHARACTERS = 64, 1 << 20


def cut(tokens: Tokens, start: int, stop: int | None = None) -> Tokens:
    """Some of the tokens."""
    return {name: values[start:stop] for name, values in tokens.items()}


def join(parts: Sequence[Tokens]) -> Tokens:
    """Tokens one after the other."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@dataclass(frozen=True)
class ReadingSettings:
    """All that decides which tokens records become; plain values, so that workers can have them.

    Those that may be None are names of columns; None if there is none.
    """

    text: str | None
    target: str | None
    pairs: bool  # whether records have two sides, for an encoder and a decoder
    input_ids: str | None
    labels: str | None
    attention_mask: str | None
    weights: str | None
    vocabulary: int
    separator: tuple[int, ...]  # tokens after each text
    head: tuple[int, ...]  # tokens that each row of text begins with
    length: int  # tokens per row, `head` included
    pack: bool  # whether records are joined and cut

    @classmethod
    def of(
        cls,
        data: DataSection,
        source: DataSource,
        tokenizer: Any,
        row_weights: str | None,
        *,
        pairs: bool = False,
    ) -> ReadingSettings:
        """The settings for the records of one source, for a model of two sides with `pairs`.

        Text files have no columns, and a row must have place for a token.
        """
        column = data.input_ids_column or data.target_column or row_weights
        check("source", source=source, column=column)
        of_text = data.input_ids_column is None
        column = TEXT if source.is_text else data.text_column
        settings = cls(
            text=column if of_text else None,
            target=data.target_column,
            pairs=pairs,
            input_ids=data.input_ids_column,
            labels=data.labels_column,
            attention_mask=data.attention_mask_column,
            weights=row_weights,
            vocabulary=len(tokenizer),
            separator=tuple(separator_of(tokenizer)) if of_text and not pairs else (),
            head=tuple(head_of(tokenizer)) if of_text and not (pairs or data.is_bare) else (),
            length=data.row_length,
            pack=data.pack,
        )
        if len(settings.head) >= settings.length:
            raise GrowthError(f"sequence_length is {settings.length}: it must be at least 2")
        return settings


class Reader:
    """Makes tokens of the records of a source."""

    def __init__(self, settings: ReadingSettings, tokenizer: Any, source: DataSource) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        self.source, self.name = source, source.name

    def runs(
        self, records: Iterable[tuple[Any, Mapping[str, Any]]]
    ) -> Iterator[tuple[Any, Tokens]]:
        """The tokens of records, each with its place, as `cut_rows` takes them."""
        for chunk in _chunks(records):
            tokens = self.read([record for _, record in chunk])
            yield from zip((place for place, _ in chunk), tokens, strict=True)

    def read(self, records: Sequence[Mapping[str, Any]]) -> list[Tokens]:
        """The tokens of some records.

        A column that is missing, has another type, or holds ids that do not exist is refused.
        """
        if self.settings.pairs:
            return self._pairs(records)
        if self.settings.text is None:
            return [self._of_ids(record) for record in records]
        texts = [self._text(record) for record in records]
        options = {"add_special_tokens": False, "return_attention_mask": False}
        read = []
        for record, ids in zip(records, self._ids_of(texts, **options), strict=True):
            end = () if record.get(CONTINUED) is True else self.settings.separator
            read.append(self._weighted({IDS: np.asarray([*ids, *end], DTYPES[IDS])}, record))
        return read

    def _ids_of(self, texts: Sequence[str], **options: Any) -> Any:
        """The token ids of texts. A call sets the tokenizer's truncation and padding: undo that."""
        backend: Any = getattr(self.tokenizer, "backend_tokenizer", None)
        before = [getattr(backend, name, None) for name in ("truncation", "padding")]
        try:
            return self.tokenizer(texts, verbose=False, **options)["input_ids"]
        finally:
            if before[0] is not None:
                backend.enable_truncation(**before[0])
            if before[1] is not None:
                backend.enable_padding(**before[1])

    def _column(self, record: Mapping[str, Any], name: str, key: str) -> Any:
        if name not in record:
            columns = ", ".join(map(str, record))
            raise GrowthError(f"{self.name} has no column {name!r} ({key}): it has {columns}")
        if record[name] is None:
            raise GrowthError(
                f"{self.name} has a record without a value in column {name!r} ({key}): remove it"
            )
        return record[name]

    def _pairs(self, records: Sequence[Mapping[str, Any]]) -> list[Tokens]:
        """The tokens of records with two sides."""
        settings = self.settings
        if settings.target is None:
            sides = []
            for record in records:
                ids, is_real = self._ids(record)
                sides.append((ids[is_real], self._labels(record)))
        else:
            names = (
                (str(settings.text), "data.text_column"),
                (settings.target, "data.target_column"),
            )
            texts = [[self._text(record, *name) for record in records] for name in names]
            read, written = (self._ids_of(side) for side in texts)
            sides = [*zip(map(np.asarray, read), map(np.asarray, written), strict=True)]
        return [self._pair(*both, record) for both, record in zip(sides, records, strict=True)]

    def _pair(self, read: np.ndarray, written: np.ndarray, record: Mapping[str, Any]) -> Tokens:
        for side, ids in (("read", read), ("written", written)):
            if not 0 < len(ids) <= self.settings.length:
                raise GrowthError(
                    f"{self.name} has a record with {len(ids)} tokens to be {side}: remove it, or "
                    f"give a larger data.sequence_length than {self.settings.length}"
                )
        parts = [{IDS: read}, self._weighted({IDS: written}, record)]
        if WEIGHTS in parts[1]:
            parts[0][WEIGHTS] = np.zeros(len(read))
        for number, part in enumerate(parts):
            part[SIDE] = np.full(len(part[IDS]), number)
        return {name: values.astype(DTYPES[name]) for name, values in join(parts).items()}

    def _text(
        self, record: Mapping[str, Any], name: str | None = None, key: str = "data.text_column"
    ) -> str:
        name = name or str(self.settings.text)
        text = self._column(record, name, key)
        if not isinstance(text, str):
            hint = " (token ids belong in data.input_ids_column)" if _is_list(text) else ""
            raise GrowthError(
                f"{self.name}: column {name!r} ({key}) holds {a_kind(text)}, not a text{hint}"
            )
        return text

    def _integers(self, record: Mapping[str, Any], name: str, key: str) -> np.ndarray:
        values = self._column(record, name, key)
        array = np.asarray(values) if _is_list(values) else None
        if array is None or array.ndim != 1 or (len(array) and array.dtype.kind not in "iub"):
            kind = type(values).__name__ if array is None else f"{array.ndim}-d {array.dtype}"
            raise GrowthError(
                f"{self.name}: column {name!r} ({key}) must hold lists of integers, not {kind}"
            )
        return array.astype(np.int64)

    def _ids(self, record: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """The ids that a record holds, and which of them are no padding."""
        name, mask = str(self.settings.input_ids), self.settings.attention_mask
        ids = self._integers(record, name, "data.input_ids_column")
        self._check_range(ids, name)
        if mask is None:
            return ids, np.ones(len(ids), bool)
        values = self._integers(record, mask, "data.attention_mask_column")
        self._check_length(values, ids, mask)
        return ids, values != 0

    def _labels(self, record: Mapping[str, Any]) -> np.ndarray:
        name = str(self.settings.labels)
        labels = self._integers(record, name, "data.labels_column")
        self._check_range(labels[labels != IGNORE_INDEX], name)
        return labels

    def _of_ids(self, record: Mapping[str, Any]) -> Tokens:
        ids, is_real = self._ids(record)
        tokens = {IDS: ids.astype(DTYPES[IDS])}
        if self.settings.labels is not None:
            labels = self._labels(record)
            self._check_length(labels, ids, self.settings.labels)
            tokens[LABELS] = labels.astype(DTYPES[LABELS])
        return {name: x[is_real] for name, x in self._weighted(tokens, record).items()}

    def _weighted(self, tokens: Tokens, record: Mapping[str, Any]) -> Tokens:
        """The tokens with their weights: one per token, or one for the whole record."""
        name = self.settings.weights
        if name is None:
            return tokens
        value, size = self._column(record, name, "loss.row_weights"), len(tokens[IDS])
        array = np.asarray(value)
        if array.dtype.kind not in "iuf" or array.ndim > 1:
            raise GrowthError(
                f"{self.name}: column {name!r} (loss.row_weights) must hold numbers or lists of "
                f"numbers, not {type(value).__name__}"
            )
        if array.ndim == 1:
            if self.settings.text is not None:
                raise GrowthError(
                    f"{self.name}: column {name!r} (loss.row_weights) holds lists, but a text has "
                    "no tokens yet: give one number per record, or token ids"
                )
            self._check_length(array, tokens[IDS], name)
        if not np.isfinite(array).all() or (array < 0).any():
            raise GrowthError(
                f"{self.name}: column {name!r} (loss.row_weights) holds a weight that is negative "
                "or not finite"
            )
        return {**tokens, WEIGHTS: np.broadcast_to(array, size).astype(DTYPES[WEIGHTS])}

    def _check_length(self, values: np.ndarray, ids: np.ndarray, name: str) -> None:
        if len(values) != len(ids):
            raise GrowthError(
                f"{self.name}: column {name!r} has {len(values)} values in a record of {len(ids)} "
                "token ids: it needs one per id"
            )

    def _check_range(self, values: np.ndarray, name: str) -> None:
        size = self.settings.vocabulary
        wrong = values[(values < 0) | (values >= size)]
        if len(wrong):
            raise GrowthError(
                f"{self.name}: column {name!r} holds the id {wrong[0]}, but the tokenizer has ids "
                f"0 .. {size - 1}: it was tokenised with another tokenizer"
            )


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray)


def _chunks(
    records: Iterable[tuple[Any, Mapping[str, Any]]],
) -> Iterator[list[tuple[Any, Mapping[str, Any]]]]:
    """Records, each with its place, in groups that are tokenised together."""
    chunk: list[tuple[Any, Mapping[str, Any]]] = []
    characters = 0
    for place, record in records:
        chunk.append((place, record))
        characters += sum(len(x) for x in record.values() if isinstance(x, str))
        if len(chunk) == RECORDS or characters >= CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


# ------------------------------------------------------------------- rows


def cut_rows(
    runs: Iterable[tuple[Any, Tokens]], settings: ReadingSettings, offset: int = 0
) -> Iterator[tuple[Any, int, Tokens]]:
    """Make rows of the tokens of records.

    Args:
        runs: the tokens of each record, and its place.
        offset: tokens of the first record that were used before.

    Yields:
        The place of the record in which a row ends, the number of its tokens that were used until
        then, and the row. Tokens that fill no row are left at the end.
    """
    if settings.pack:
        yield from _packed(runs, settings, offset)
        return
    room = settings.length - len(settings.head)
    for place, tokens in runs:
        count = len(tokens[IDS])
        if count > room and settings.text is None and not settings.pairs:
            raise GrowthError(
                f"a record has {count} token ids, more than data.sequence_length "
                f"{settings.length}: give a larger one, or data.packing = true to cut it"
            )
        size = max(count, 1) if settings.pairs else room
        for start in range(offset, count, size):
            row, used = cut(tokens, start, start + size), min(start + size, count)
            yield place, used, join([_head(settings, tokens), row]) if settings.head else row
        offset = 0


def _packed(
    runs: Iterable[tuple[Any, Tokens]], settings: ReadingSettings, offset: int
) -> Iterator[tuple[Any, int, Tokens]]:
    body = settings.length - len(settings.head)
    # (place, tokens, tokens used) of the records that are not used up
    waiting: deque[tuple[Any, Tokens, int]] = deque()
    count = 0
    for place, tokens in runs:
        waiting.append((place, tokens, offset))
        count += len(tokens[IDS]) - offset
        offset = 0
        while count >= body:
            parts, missing = [_head(settings, tokens)], body
            while missing:
                at, first, used = waiting.popleft()
                part = cut(first, used, used + missing)
                used, missing = used + len(part[IDS]), missing - len(part[IDS])
                parts.append(part)
                if used < len(first[IDS]):
                    waiting.appendleft((at, first, used))
            count -= body
            yield at, used, join(parts)


def _head(settings: ReadingSettings, like: Tokens) -> Tokens:
    head = np.asarray(settings.head, DTYPES[IDS])
    fill = {LABELS: IGNORE_INDEX, WEIGHTS: 1}
    return {
        name: head if name == IDS else np.full(len(head), fill[name], DTYPES[name]) for name in like
    }
