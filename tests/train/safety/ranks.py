"""The work of a process: `python -m testbed.forked_ranks 2 tests.train.safety.ranks FOLDER`.

A signal, a NaN and a full disk each reach one of the processes only. Each process leaves what
became of it as FOLDER/<case>-<rank>.json. FOLDER/walk.json is [number of signals at random moments,
seed].
"""

import contextlib
import json
import os
import random
import signal
import warnings

import torch
import torch.distributed as dist

from growkern import GrowthError, GrowthStep
from growkern.errors import GrowthWarning
from growkern.train.safety.checkpoints import checkpoints_in
from growkern.train.safety.signals import Terminated
from tests.train.safety.runs import SENDERS, At, Everywhere, small_trainer, weights_of
from tests.train.safety.test_saving import small_files
from tests.train.safety.test_steps import poison

ARGS = {"per_device_train_batch_size": 2}


def run(folder, resume=None, **options):
    """Train, and say how that ended."""
    trainer = small_trainer(folder, args=ARGS | options.pop("args", {}), **options)
    for callback in options.get("callbacks", ()):
        callback.trainer = trainer
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.train(resume_from_checkpoint=resume)
            end = "done"
        except (GrowthError, Terminated, KeyboardInterrupt) as error:
            end = f"{type(error).__name__} {error}".strip()
    dist.barrier()
    return trainer, {
        "end": end,
        "step": trainer.state.global_step,
        "warned": [str(w.message) for w in caught if w.category is GrowthWarning],
        "checkpoints": [path.name for path in checkpoints_in(folder)],
    }


def only(rank, act):
    return act if dist.get_rank() == rank else lambda model: None


def send(number):
    return lambda model: os.kill(os.getpid(), number)


GROWTH = {"growth": [GrowthStep(at_step=4, sizes={"num_hidden_layers": 3}, moments="reset")]}


def same(weights, trainer):
    ours = weights_of(trainer)
    return all(torch.equal(ours[name], value) for name, value in weights.items())


class Sender(Everywhere):
    """Sends a signal at one event of the training loop. Counts the events."""

    def __init__(self, place, how, number, rank):
        super().__init__(self.count)
        self.place, self.how, self.number, self.rank = place, how, number, rank
        self.seen, self.trainer = 0, None

    def count(self):
        self.seen += 1
        if self.seen != self.place:
            return
        if not self.trainer.stops.signals.deferred:
            # the processes do not talk now: a launcher ends all of them
            os.kill(os.getpid(), self.number)
        elif dist.get_rank() == self.rank:
            SENDERS[self.how](self.number)


def walk(folder):
    """Signals at random events of runs that grow, to one process; what became of each run."""
    rounds, seed = json.loads((folder / "walk.json").read_text())
    draw, everyone = random.Random(seed), range(dist.get_world_size())
    straight, counting = folder / "grown", Sender(0, "", 0, 0)
    weights = weights_of(run(straight, callbacks=[counting], **GROWTH)[0])
    found = []
    for i in range(rounds):
        moment = draw.randint(1, counting.seen), draw.choice([*SENDERS]), draw.choice(everyone)
        number = draw.choice([signal.SIGINT, signal.SIGTERM])
        sender = Sender(moment[0], moment[1], number, moment[2])
        _, stopped = run(folder / f"walk{i}", callbacks=[sender], **GROWTH)
        resume = bool(stopped["checkpoints"]) or None
        trainer, resumed = run(folder / f"walk{i}", resume=resume, **GROWTH)
        found.append({"moment": moment, "number": number, **stopped, "resumed": resumed["end"]})
        found[-1]["same"] = same(weights, trainer)
    return found


FULL_DISK = contextlib.ExitStack()


def fill_disk(model):
    """From here on this process can write no more than ten bytes to a file."""
    FULL_DISK.enter_context(small_files(10))


def main(folder):
    rank = dist.get_rank()
    found = {}
    trainer, found["straight"] = run(folder / "straight")
    weights = weights_of(trainer)

    for number in (signal.SIGTERM, signal.SIGINT):
        name = number.name
        stop = [At(4, only(1, send(number)))]
        _, found[name] = run(folder / name, callbacks=stop)
        again, found[f"{name} resumed"] = run(folder / name, resume=True)
        found[f"{name} resumed"]["same"] = same(weights, again)

    # after the processes have talked in the last step before a growth
    before_growth = [At(3, only(1, send(signal.SIGTERM)), "on_optimizer_step")]
    _, found["growth"] = run(folder / "growth", callbacks=before_growth, **GROWTH)
    found["walk"] = walk(folder)

    # 12 batches on each process, which ask each other after the eighth
    long = {"eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 1}
    stop = At(4, only(1, send(signal.SIGTERM)), "on_prediction_step")
    _, found["evaluation"] = run(folder / "evaluation", callbacks=[stop], args=long)

    _, found["nan"] = run(folder / "nan", callbacks=[At(5, only(1, poison(float("nan"))))])

    disk = [At(3, only(1, fill_disk), "on_optimizer_step")]
    disk += [At(4, lambda model: FULL_DISK.close())]
    trainer, found["disk"] = run(folder / "disk", callbacks=disk)
    found["disk"]["same"] = same(weights, trainer)

    # the clock of one process is enough
    slow = {"save_steps": 100}
    minutes = 1e-9 if rank == 1 else 60.0
    _, found["clock"] = run(folder / "clock", args=slow, save_minutes=minutes)

    if rank == 0:
        newest = folder / "straight" / "checkpoint-8" / "rng_state_1.pth"
        newest.write_bytes(newest.read_bytes()[:-1])
    dist.barrier()
    _, found["damaged"] = run(folder / "straight", resume=True)
    (folder / f"{rank}.json").write_text(json.dumps(found))
