"""The options of `[optimizer]` in a run file, under the same names in Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from growkern.arguments import NOT_NEGATIVE, POSITIVE, Limit, between, check_fields
from growkern.train.rules import check

OptimizerChoice = Literal["auto", "adamw", "growth-adamw", "muon"]


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

    LIMITS: ClassVar[dict[str, Limit]] = {
        "rewarm_steps": NOT_NEGATIVE,
        "rewarm_peak": POSITIVE,
        "muon_lr": NOT_NEGATIVE,
        "momentum": Limit(lambda x: 0 <= x < 1, "lie in [0, 1)"),
        "ns_steps": between(1, 99),
    }

    rewarm_steps: int = 0
    rewarm_peak: float = 1.3
    muon_lr: float | None = None
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"

    def __post_init__(self) -> None:
        check_fields(self, "optimizer")

    def check_fits(self, choice: str) -> None:
        """Refuse options of another optimizer than the chosen one.

        Args:
            choice: an `OptimizerChoice`.

        Raises:
            GrowthError: there is such an option, or one that has no effect.
        """
        check("optimizer", own=self, choice=choice)
