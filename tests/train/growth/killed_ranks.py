"""The work of one process of a run that is killed: `python -m tests.forked_ranks N ... FOLDER`.

FOLDER/kill.json says where: [step, "step"] is inside that step, [step, "growth"] is inside the
growth before it. null: nowhere. FOLDER/killed says that it came there.
"""

import json
import os
import signal

import torch

from growkern.train.growing import GrowingTrainer
from growkern.train.run import train


def kill_in(name, step, note):
    """Wrap a method of the trainer so that the last process is killed after it."""
    method = getattr(GrowingTrainer, name)

    def wrapped(self, *args, **options):
        result = method(self, *args, **options)
        if self.state.global_step == step and self.args.process_index == self.args.world_size - 1:
            note.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(GrowingTrainer, name, wrapped)


def main(folder):
    torch.use_deterministic_algorithms(True, warn_only=True)
    place = json.loads((folder / "kill.json").read_text())
    if place is not None:
        step, where = place
        name = {"step": "training_step", "growth": "_forget_model"}[where]
        kill_in(name, step, folder / "killed")
    train(folder / "run.toml", progress=False)
