"""Cuts the tokens of records into rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from growkern.errors import GrowthError
from growkern.train.dataset.records import DTYPES, IDS, LABELS, WEIGHTS, Settings, Tokens, join
from growkern.train.model.head import IGNORE_INDEX


def cut(tokens: Tokens, start: int, stop: int | None = None) -> Tokens:
    """Some of the tokens."""
    return {name: values[start:stop] for name, values in tokens.items()}


def cut_rows(
    runs: Iterable[tuple[Any, Tokens]], settings: Settings, offset: int = 0
) -> Iterator[tuple[Any, int, Tokens]]:
    """Make rows of the tokens of records.

    Args:
        runs: the tokens of each record, and its place.
        settings: of the rows.
        offset: tokens of the first record that were used before.

    Yields:
        The place of the record in which a row ends, the number of its tokens that were used until
        then, and the row. Tokens that fill no row are left at the end.

    Raises:
        GrowthError: a record of token ids that is not cut has more than a row.
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
    runs: Iterable[tuple[Any, Tokens]], settings: Settings, offset: int
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


def _head(settings: Settings, like: Tokens) -> Tokens:
    head = np.asarray(settings.head, DTYPES[IDS])
    fill = {LABELS: IGNORE_INDEX, WEIGHTS: 1}
    return {
        name: head if name == IDS else np.full(len(head), fill[name], DTYPES[name]) for name in like
    }
