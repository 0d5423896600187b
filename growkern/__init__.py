"""Grow a trained transformer into a larger one, and train on from where it was.

Each public name is loaded when it is first used, so that `import growkern` is quick and needs
neither a GPU, a compiler, Triton nor transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from growkern.errors import GrowthError as GrowthError
    from growkern.growth.fold_checkpoint import FoldReport as FoldReport
    from growkern.growth.fold_checkpoint import fold as fold
    from growkern.growth.grow import GrowthReport as GrowthReport
    from growkern.growth.grow import grow as grow
    from growkern.growth.grow import grow_checkpoint as grow_checkpoint
    from growkern.growth.grow_into import grow_into as grow_into
    from growkern.growth.moments import growth_lr_multipliers as growth_lr_multipliers
    from growkern.growth.moments import moment_findings as moment_findings
    from growkern.growth.optimizer import grow_optimizer as grow_optimizer
    from growkern.growth.optimizer_into import grow_optimizer_into as grow_optimizer_into
    from growkern.growth.plan import GrowthPlan as GrowthPlan
    from growkern.growth.plan import plan as plan
    from growkern.growth.replay import replay as replay
    from growkern.growth.verify import VerifyReport as VerifyReport
    from growkern.growth.verify import verify as verify
    from growkern.ops.expand import expand as expand
    from growkern.ops.kl_mlm_loss import kl_mlm_loss as kl_mlm_loss
    from growkern.ops.linear_kl_mlm_loss import linear_kl_mlm_loss as linear_kl_mlm_loss
    from growkern.ops.topk_kl_mlm_loss import topk_kl_mlm_loss as topk_kl_mlm_loss
    from growkern.train.cache_teacher import CacheReport as CacheReport
    from growkern.train.cache_teacher import cache_teacher as cache_teacher
    from growkern.train.config import TwoStageConfig as TwoStageConfig
    from growkern.train.growth_adamw import GrowthAdamW as GrowthAdamW
    from growkern.train.growth_adamw import decay_groups as decay_groups
    from growkern.train.inheritance import InheritanceSchedule as InheritanceSchedule
    from growkern.train.teacher_cache import TeacherCache as TeacherCache
    from growkern.train.trainer import TwoStageTrainer as TwoStageTrainer

    __version__: str

_MODULE_OF = {
    "FoldReport": "growkern.growth.fold_checkpoint",
    "GrowthError": "growkern.errors",
    "GrowthPlan": "growkern.growth.plan",
    "GrowthReport": "growkern.growth.grow",
    "VerifyReport": "growkern.growth.verify",
    "fold": "growkern.growth.fold_checkpoint",
    "grow": "growkern.growth.grow",
    "grow_checkpoint": "growkern.growth.grow",
    "grow_into": "growkern.growth.grow_into",
    "grow_optimizer": "growkern.growth.optimizer",
    "grow_optimizer_into": "growkern.growth.optimizer_into",
    "growth_lr_multipliers": "growkern.growth.moments",
    "moment_findings": "growkern.growth.moments",
    "plan": "growkern.growth.plan",
    "replay": "growkern.growth.replay",
    "verify": "growkern.growth.verify",
    "expand": "growkern.ops.expand",
    "kl_mlm_loss": "growkern.ops.kl_mlm_loss",
    "linear_kl_mlm_loss": "growkern.ops.linear_kl_mlm_loss",
    "GrowthAdamW": "growkern.train.growth_adamw",
    "topk_kl_mlm_loss": "growkern.ops.topk_kl_mlm_loss",
    "CacheReport": "growkern.train.cache_teacher",
    "TeacherCache": "growkern.train.teacher_cache",
    "cache_teacher": "growkern.train.cache_teacher",
    "TwoStageConfig": "growkern.train.config",
    "decay_groups": "growkern.train.growth_adamw",
    "InheritanceSchedule": "growkern.train.inheritance",
    "TwoStageTrainer": "growkern.train.trainer",
}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("growkern")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'growkern' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
