"""One statement about what a growth keeps, and the rule for the word "approximate"."""

from __future__ import annotations

from dataclasses import dataclass

# measures of `growkern.verify`: the largest difference of an output over the largest output (where
# there is a bound, at least that on the random texts of `growth.plan.probe`), the
# rise of the loss by tokens that the source does not have, and the largest difference of a weight
# that is folded back (Frobenius norm, relative to that of the source's weight, in which every copy
# counts as at least the smallest normal number of float16)
OUTPUT_ERROR, NEW_TOKENS = "relative error", "new tokens (nats)"
WEIGHT_ERROR = "weight error"
# 16-bit copies may round in opposite directions, so folded weights are off by more than eps / 2
WEIGHT_ROUNDINGS = 2.0
# outputs that differ by no more, relative to the largest one, differ by rounding in float64
LARGEST_ROUNDING = 1e-12
# a bound says something up to this share of the size in `says_something`
LARGEST_BOUND = 0.1


@dataclass(frozen=True)
class Finding:
    """One statement about what a growth keeps.

    Attributes:
        level: "exact", "approximate" (the error is bounded and small) or "changed".
        what: the part of the model, or the dtype, that the statement is about.
        why: the reason, with the size of the error.
        bound: of an approximate statement, the number that limits the growth's error in `measure`.
            `growkern.verify` checks this number. None: rounding alone if the level is "exact".
        measure: the number of `growkern.verify` that `bound` limits.
        asked: True for a change that the user asked for, such as `method="aki"`.
        change: of a changed statement, the error in `measure` of all changes together, if it was
            measured on random texts.
    """

    level: str
    what: str
    why: str
    bound: float | None = None
    measure: str = OUTPUT_ERROR
    asked: bool = False
    change: float | None = None

    def line(self) -> str:
        """The statement as one line of text."""
        return f"{self.level}: {self.what} ({self.why})"


def says_something(bound: float, size: float = 1.0, asked: float = 0.0) -> bool:
    """True if a bound is small enough for the word "approximate".

    Args:
        size: an error that leaves nothing of the source: 1 for relative errors. A bound that is not
            below it holds for a model that knows nothing too.
        asked: the part of the bound that the target's sizes cost in any dtype and for any weights.
            Only the rest must be small.
    """
    # NaN says nothing either
    return bound < size and bound - asked <= LARGEST_BOUND * size
