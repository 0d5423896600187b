"""Grow a trained transformer into a larger one, and train on from where it was.

Each public name is loaded when it is first used, so that `import growkern` is quick and needs
neither a GPU, a compiler, Triton nor transformers.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from growkern.errors import GrowthError as GrowthError
    from growkern.grow import GrowthPlan as GrowthPlan
    from growkern.grow import GrowthReport as GrowthReport
    from growkern.grow import VerifyReport as VerifyReport
    from growkern.grow import grow as grow
    from growkern.grow import grow_checkpoint as grow_checkpoint
    from growkern.grow import plan as plan
    from growkern.grow import verify as verify
    from growkern.ops.expand import expand as expand
    from growkern.ops.kl_mlm_loss import kl_mlm_loss as kl_mlm_loss
    from growkern.ops.linear_kl_mlm_loss import linear_kl_mlm_loss as linear_kl_mlm_loss
    from growkern.train.config import TwoStageConfig as TwoStageConfig
    from growkern.train.inheritance import InheritanceSchedule as InheritanceSchedule
    from growkern.train.trainer import TwoStageTrainer as TwoStageTrainer

    __version__: str

_MODULE_OF = {
    "GrowthError": "growkern.errors",
    "GrowthPlan": "growkern.grow",
    "GrowthReport": "growkern.grow",
    "VerifyReport": "growkern.grow",
    "grow": "growkern.grow",
    "grow_checkpoint": "growkern.grow",
    "plan": "growkern.grow",
    "verify": "growkern.grow",
    "expand": "growkern.ops.expand",
    "kl_mlm_loss": "growkern.ops.kl_mlm_loss",
    "linear_kl_mlm_loss": "growkern.ops.linear_kl_mlm_loss",
    "TwoStageConfig": "growkern.train.config",
    "InheritanceSchedule": "growkern.train.inheritance",
    "TwoStageTrainer": "growkern.train.trainer",
}

__all__ = ["__version__", *_MODULE_OF]


class _Package(ModuleType):
    """Keeps `growkern.grow` the function: importing the subpackage of that name would rebind it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


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
