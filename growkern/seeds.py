"""The seeds that random choices take."""

from __future__ import annotations

import hashlib

from growkern.arguments import whole_number
from growkern.errors import GrowthError

# PyTorch takes 63 bits, NumPy 32
MOST_SEED, MOST_NUMPY_SEED = (1 << 63) - 1, (1 << 32) - 1


def check_seed(seed: int, name: str = "seed", most: int = MOST_SEED) -> int:
    """Refuse a seed that a generator of random numbers does not take.

    Args:
        most: the largest seed.

    Returns:
        The seed as an int.
    """
    seed = whole_number(name, seed)
    if not 0 <= seed <= most:
        raise GrowthError(f"{name} is {seed}: it must lie in 0 .. {most}")
    return seed


def seed_of_process(seed: int, rank: int) -> int:
    """A seed for one of several processes: of each seed and rank another one."""
    digest = hashlib.sha256(f"{seed} {rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & MOST_SEED
