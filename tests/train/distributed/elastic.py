"""python -m tests.train.distributed.elastic FOLDER RUN SEED KILL...: two ranks, which die in turn.

The agent of `torchrun` starts all ranks again. Here its ranks are forks of it, so that they need
not import everything once more. Under `torchrun` itself, this is one rank.

Every KILL strikes once, in this order, each in an attempt of its own:

    step-N     the last rank, in step N
    write-N    the last rank, while it writes checkpoint-N in the background, after half of it
    random     some rank, in some step or in the time of two steps after it, but before the last
               checkpoint; the kills that are left are spread over the steps that are left
"""

import os
import random
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import torch
from transformers import TrainerCallback

from growkern import run as train
from growkern.train.run import start as module
from growkern.train.safety import saving
from testbed import warm
from testbed.torchrun import launch


class Killer(TrainerCallback):
    """Kills this process as planned, and notes it in a file."""

    def __init__(self, note, kill, left, seed, rank, ranks):
        self.note, self.left, self.rank = note, left, rank
        self.kind, _, number = kill.partition("-")
        self.number = int(number or 0)
        draw = random.Random(seed)
        self.victim = draw.randrange(ranks) if self.kind == "random" else ranks - 1
        self.place, self.share = draw.random(), draw.random()
        self.begun = []
        if self.kind == "write":
            self.write, saving.write_parts = saving.write_parts, self.write_half

    def strike(self):
        self.note.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def write_half(self, parts, directory, group=None):
        if self.victim == self.rank and directory.name == f"checkpoint-{self.number}":
            first = next(iter(parts))
            self.write({first: parts[first]}, directory, group)
            self.strike()
        self.write(parts, directory, group)

    def on_train_begin(self, args, state, control, **objects):
        if self.rank == 0:
            self.note.with_name(f"{self.note.name}-from-{state.global_step}").touch()
        steps = state.max_steps - state.global_step
        # on average, the first of so many random numbers
        self.ahead = min(int(2 * self.place * steps / (self.left + 1)), steps - 1)

    def on_step_begin(self, args, state, control, **objects):
        if self.victim != self.rank:
            return
        self.begun.append(time.monotonic())
        if self.kind == "step" and state.global_step == self.number:
            self.strike()
        if self.kind == "random" and len(self.begun) == self.ahead + 1:
            step = (self.begun[-1] - self.begun[0]) / self.ahead if self.ahead else 0.1
            threading.Timer(2 * step * self.share, self.strike).start()

    def on_step_end(self, args, state, control, **objects):
        # the moment that was drawn would come after the run
        mine = (self.victim, self.kind) == (self.rank, "random")
        if mine and state.global_step == args.max_steps:
            self.strike()


def rank(folder, run, seed, *kills):
    folder, number = Path(folder), int(os.environ["RANK"])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    notes = [folder / f"kill-{i}" for i in range(len(kills) + 1)]
    struck = sum(note.exists() for note in notes)
    # the last attempt is not killed
    how = (*kills, "")[struck], len(kills) - struck, f"{seed}:{struck}"
    ranks, build = int(os.environ["WORLD_SIZE"]), module.build_trainer
    killer = Killer(notes[struck], *how, number, ranks)

    def killing(*args, **options):
        trainer = build(*args, **options)
        trainer.add_callback(killer)
        return trainer

    module.build_trainer = killing
    train(folder / run, progress=False)
    warm.note_modules()


def main(folder, run, seed, *kills):
    """As `torchrun --standalone --nproc_per_node=2 --max-restarts=N`."""
    launch(2, rank, folder, run, seed, *kills, restarts=len(kills))


if __name__ == "__main__":
    if "RANK" not in os.environ:
        main(*sys.argv[1:])
    else:
        rank(*sys.argv[1:])
        sys.stdout.flush()
        # gloo's threads now and then abort a process that leaves in the ordinary way
        os._exit(0)
