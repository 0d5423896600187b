"""One rank of a run that loses a rank now and then: `torchrun ... elastic FOLDER RUN STEP...`.

The last rank kills itself at each STEP, once.
"""

import os
import signal
import sys
import warnings
from pathlib import Path

import torch
from transformers import TrainerCallback

from growkern.train import run as module
from growkern.train.run import train


class KillOnce(TrainerCallback):
    """Kills this process at some steps. A file notes each kill."""

    def __init__(self, folder, steps):
        self.folder, self.steps = folder, steps

    def on_substep_end(self, args, state, control, **objects):
        noted = self.folder / f"killed-at-{state.global_step}"
        if state.global_step in self.steps and not noted.exists():
            noted.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    on_step_begin = on_substep_end


def main(folder, run, *steps):
    folder = Path(folder)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    build = module.build_trainer

    def killing(*args, **options):
        trainer = build(*args, **options)
        if trainer.args.process_index == trainer.args.world_size - 1:
            trainer.add_callback(KillOnce(folder, {int(step) for step in steps}))
        return trainer

    module.build_trainer = killing
    train(folder / run, progress=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    # gloo's threads now and then abort a process that leaves in the ordinary way
    os._exit(0)
