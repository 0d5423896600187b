"""The training loop around a step: its optimizer, its callback and its numbers."""

from typing import TYPE_CHECKING

from growkern.rooms import opener

# fmt: off
if TYPE_CHECKING:
    from growkern.train.loop.callbacks import ExpertBalancing
    from growkern.train.loop.checks import Beginning, check_switches, steps_per_epoch
    from growkern.train.loop.display import last_losses
    from growkern.train.loop.growing import (grown_model, later_plans, on_meta, plan_in_run,
        unfilled_model)
    from growkern.train.loop.trainer import trainer_of_run, TwoStageTrainer
# fmt: on

__getattr__ = opener(__name__, __file__)
