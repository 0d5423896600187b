"""Trains by run files on several ranks, for `testbed.forked_ranks`.

DIR/script.json is a list of [run file, step after which the run is stopped or null].
"""

import json
import os
import signal
import warnings

from transformers import TrainerCallback

from growkern import run as train
from growkern.train.run import start as module
from growkern.train.safety.signals import Terminated


class StopAfter(TrainerCallback):
    """Sends SIGTERM to its own process."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **objects):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def stopped_after(step):
    """`build_trainer`, with the callback."""
    build = module.build_trainer

    def stopping(*args, **options):
        trainer = build(*args, **options)
        trainer.add_callback(StopAfter(step))
        return trainer

    return build, stopping


def main(folder):
    warnings.simplefilter("ignore")
    for name, step in json.loads((folder / "script.json").read_text()):
        if step is None:
            train(folder / name, progress=False)
            continue
        build, module.build_trainer = stopped_after(step)
        try:
            train(folder / name, progress=False)
            raise AssertionError("it was not stopped")
        except Terminated:
            pass
        finally:
            module.build_trainer = build
