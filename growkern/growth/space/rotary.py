"""How the rotary pairs of a small head map to those of a larger head.

Rotary positions rotate the first R entries of a head in pairs. Pair i rotates by
theta ** (-2 i / R) per position, so pairs of different heads may be compared by their speed.
"""

from __future__ import annotations


def rotary_entries(turning: int) -> int:
    """The number of rotated entries: `turning`, rounded up to whole pairs."""
    return turning + turning % 2


def pair_step(source: int, target: int) -> int | None:
    """The step with which pair step * i of the target rotates as fast as pair i of the source.

    Args:
        source, target: R of source and target, the number of rotated entries.

    Returns:
        The step, or None if there is none. Pair i then stays pair i, and `growth.plan.target`
        changes rope_theta instead.
    """
    # a single pair rotates by theta ** 0 in any head, so any step will do
    return None if source > 2 and target % source else target // max(source, 1)
