"""The options of `[optimizer]` in a run file, under the same names in Python."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from growkern.errors import GrowthError, nearest
from growkern.train.rules import check

OptimizerChoice = Literal["auto", "adamw", "growth-adamw", "muon"]
# Muon's own names for its rules, with which it fits its learning rate to the shape of a matrix
RULES = ("original", "match_rms_adamw")


@dataclass(frozen=True)
class OptimizerOptions:
    """Options of `growkern.GrowthAdamW` and of Muon. Those of AdamW are in `[trainer]`.

    Args:
        rewarm_steps, rewarm_peak: of new entries alone, as in `growkern.GrowthAdamW`. The rate of
            all entries rises again with `rewarm_steps` of a growth inside the run.
        muon_lr: with optimizer = "muon", the peak of the learning rate of the matrices. None: as
            for all other parameters.
        momentum, nesterov, ns_steps: of Muon, as in `torch.optim.Muon`.
        adjust_lr_fn: of Muon, as in `torch.optim.Muon`. "match_rms_adamw" makes steps as large as
            those of AdamW, so both can share a learning rate. "original" is PyTorch's default, and
            needs a `muon_lr` of its own.

    Raises:
        GrowthError: a value is out of range.
    """

    rewarm_steps: int = 0
    rewarm_peak: float = 1.3
    muon_lr: float | None = None
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"

    def __post_init__(self) -> None:
        # all written so that NaN fails
        ranges = {
            "rewarm_steps": (self.rewarm_steps >= 0, "0 or more"),
            "rewarm_peak": (0 < self.rewarm_peak < math.inf, "positive"),
            "muon_lr": (self.muon_lr is None or 0 <= self.muon_lr < math.inf, "0 or more"),
            "momentum": (0 <= self.momentum < 1, "at least 0 and below 1"),
            "ns_steps": (1 <= self.ns_steps < 100, "at least 1 and below 100"),
        }
        for name, (fits, needed) in ranges.items():
            if not fits:
                raise GrowthError(f"optimizer.{name} is {getattr(self, name)}: it must be {needed}")
        if self.adjust_lr_fn not in RULES:
            found = self.adjust_lr_fn
            raise GrowthError(f"optimizer.adjust_lr_fn is {found!r}{nearest(found, RULES)}")

    def check_fits(self, choice: str) -> None:
        """Refuse options of another optimizer than the chosen one.

        Args:
            choice: an `OptimizerChoice`.

        Raises:
            GrowthError: there is such an option, or one that has no effect.
        """
        check("optimizer", own=self, choice=choice)
