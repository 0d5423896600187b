"""Grow a trained transformer into a larger one, and train on from where it was.

Each public name is loaded when it is first used, so that `import growkern` is quick and needs
neither a GPU, a compiler, Triton nor transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

from growkern.rooms import doors

if TYPE_CHECKING:
    from growkern.errors import GrowthError as GrowthError
    from growkern.growth.draft.family import (
        DraftedFamily as DraftedFamily,
        draft_family as draft_family,
    )
    from growkern.growth.freeze import freeze_old as freeze_old
    from growkern.growth.grow import grow as grow, grow_checkpoint as grow_checkpoint
    from growkern.growth.optimizer.adamw import (
        GrowthAdamW as GrowthAdamW,
        decay_groups as decay_groups,
    )
    from growkern.growth.optimizer.clip import growth_clip_norm_ as growth_clip_norm_
    from growkern.growth.optimizer.findings import moment_findings as moment_findings
    from growkern.growth.optimizer.into import grow_optimizer_into as grow_optimizer_into
    from growkern.growth.optimizer.moments import growth_lr_multipliers as growth_lr_multipliers
    from growkern.growth.optimizer.muon import GrowthMuon as GrowthMuon
    from growkern.growth.optimizer.state import grow_optimizer as grow_optimizer
    from growkern.growth.own_modules.widen import widen as widen, widening as widening
    from growkern.growth.plan.growth_plan import (
        GrowthPlan as GrowthPlan,
        GrowthReport as GrowthReport,
        plan as plan,
    )
    from growkern.growth.record.lineage import growth_plan_of as growth_plan_of
    from growkern.growth.record.verify import VerifyReport as VerifyReport, verify as verify
    from growkern.growth.sharded import grow_into as grow_into
    from growkern.ops.expand.call import Routing as Routing
    from growkern.ops.expand.expand_op import expand as expand
    from growkern.ops.loss.kl_mlm_loss import kl_mlm_loss as kl_mlm_loss
    from growkern.ops.loss.linear_kl_mlm_loss import linear_kl_mlm_loss as linear_kl_mlm_loss
    from growkern.ops.loss.topk_kl_mlm_loss import topk_kl_mlm_loss as topk_kl_mlm_loss
    from growkern.train.dataset.training_data import load_data as load_data
    from growkern.train.distributed.shard import shard as shard
    from growkern.train.evaluation.evaluate import (
        EvaluationReport as EvaluationReport,
        evaluate as evaluate,
    )
    from growkern.train.loop.callbacks import ExpertBalancing as ExpertBalancing
    from growkern.train.loop.trainer import TwoStageTrainer as TwoStageTrainer
    from growkern.train.loss.inherited import (
        count_labels as count_labels,
        inherited_loss as inherited_loss,
    )
    from growkern.train.model.two_stage import TwoStageConfig as TwoStageConfig
    from growkern.train.run.start import run as run
    from growkern.train.sections import (
        DataSection as DataSection,
        DistributedOptions as DistributedOptions,
        GrowthStep as GrowthStep,
        InheritanceSchedule as InheritanceSchedule,
        LossOptions as LossOptions,
        OptimizerOptions as OptimizerOptions,
    )
    from growkern.train.topk_teacher.served import ServedTeacher as ServedTeacher
    from growkern.train.topk_teacher.store import TeacherCache as TeacherCache
    from growkern.train.topk_teacher.write import (
        CacheReport as CacheReport,
        cache_teacher as cache_teacher,
    )

    __version__: str

_MODULE_OF = doors(__file__)

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from growkern.package import version

        return version()
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'growkern' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
