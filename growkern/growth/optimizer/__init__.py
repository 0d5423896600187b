"""Grows the state of optimizers."""

from typing import TYPE_CHECKING

from growkern.rooms import opener

# fmt: off
if TYPE_CHECKING:
    from growkern.growth.optimizer.adamw import groups_of, GrowthAdamW, HALF_WEIGHTS
    from growkern.growth.optimizer.checks import COUNTS
    from growkern.growth.optimizer.clip import growth_clip_norm_
    from growkern.growth.optimizer.file import OPTIMIZER_FILE, OptimizerStream
    from growkern.growth.optimizer.findings import moment_findings
    from growkern.growth.optimizer.into import grow_optimizer_into
    from growkern.growth.optimizer.moments import growth_lr_multipliers
    from growkern.growth.optimizer.muon import CombinedOptimizer, GrowthMuon, Muon, products
# fmt: on

__getattr__ = opener(__name__, __file__)
