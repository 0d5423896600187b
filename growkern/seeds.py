"""The seeds that random choices take."""

from __future__ import annotations

from growkern.errors import GrowthError

# PyTorch takes 63 bits, NumPy 32
MOST_SEED, MOST_NUMPY_SEED = (1 << 63) - 1, (1 << 32) - 1


def check_seed(seed: int, name: str = "seed", most: int = MOST_SEED) -> None:
    """Refuse a seed that a generator of random numbers does not take.

    Args:
        seed: a whole number.
        name: of the setting, for the message.
        most: the largest seed.

    Raises:
        GrowthError: it lies outside 0 .. most.
    """
    if not 0 <= seed <= most:
        raise GrowthError(f"{name} is {seed}: it must lie in 0 .. {most}")
