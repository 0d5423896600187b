"""Keeps training runs safe: complete checkpoints, clean stops by signal, only finite steps."""

from typing import TYPE_CHECKING

from growkern.rooms import opener

# fmt: off
if TYPE_CHECKING:
    from growkern.train.safety.checkpoints import (behind_link, checkpoints_in, damage, exportable,
        last_checkpoint, LOG_FILE, STATE_FILE, step_of)
    from growkern.train.safety.saving import (best_checkpoint, evaluates_start, EvaluationStopped,
        misses_evaluation, plain_hub_errors, Saver, set_dtype, Stops)
    from growkern.train.safety.signals import (guard_workers, INTERRUPTIONS, settle, SignalWatch,
        Terminated)
    from growkern.train.safety.staging import close_staging, MARKER, open_staging, STAGING
    from growkern.train.safety.steps import (clip_on_cpu, OnNonfinite, own_random_numbers,
        StepWatch)
# fmt: on

__getattr__ = opener(__name__, __file__)
