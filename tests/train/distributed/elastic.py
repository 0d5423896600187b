"""python -m tests.train.distributed.elastic FOLDER RUN STEP...: two ranks; one dies now and then.

The last rank kills itself at each STEP, once. The agent of `torchrun` starts all ranks again. Here
its ranks are forks of it, so that they need not import everything once more.
"""

import os
import signal
import sys
import warnings
from pathlib import Path

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers import TrainerCallback

from growkern.train import run as module
from growkern.train.run import train
from tests import warm


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


def rank(folder, run, *steps):
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
    warm.note_modules()


def main(folder, run, *steps):
    """As `torchrun --standalone --nproc_per_node=2 --max-restarts=N`."""
    how = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=len(steps), run_id=run,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork",
    )  # fmt: skip
    elastic_launch(how, rank)(Path(folder), run, *steps)


if __name__ == "__main__":
    main(*sys.argv[1:])
