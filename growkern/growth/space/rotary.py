"""Rotary pairs of smaller and larger heads: of R entries, pair i turns by theta ** (-2 i / R)."""

from __future__ import annotations


def rotary_entries(turning: int) -> int:
    """How many entries turn: pairs, so one more than an odd number."""
    return turning + turning % 2


def pair_step(source: int, target: int) -> int | None:
    """Pair i of `source` turning entries turns like pair step * i of `target`.

    None where no step does that: pair i then becomes pair i, with another theta.
    """
    # the first pair turns by theta ** 0 in any head
    return None if source > 2 and target % source else target // max(source, 1)
