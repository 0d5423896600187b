"""python -m tests.faults.training DIRECTORY [STRIDE]: fail file operations of a training run.

A run of two steps saves a checkpoint after each, deletes the first, and saves its model. The N-th
file operation in its directory fails or kills the process, for N = 1, 1 + STRIDE, ... to the end.
Then the run is started again without a fault. It must end with the same bytes of the model as a run
that nothing happened to.

STRIDE 1 goes through all operations; it takes some minutes:

    cc -shared -fPIC -O1 -D_LARGEFILE64_SOURCE -fno-builtin -o /tmp/shim.so tests/faults/shim.c -ldl
    mkdir /dev/shm/walk
    LD_PRELOAD=/tmp/shim.so OMP_NUM_THREADS=1 python -W ignore -m tests.faults.training \
        /dev/shm/walk

Each case is a fork of this process, which has imported everything and computed nothing.
"""

import contextlib
import importlib
import io
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

from growkern import run as train
from growkern.publish.calls import LOCK_FILE
from growkern.train.safety.checkpoints import damage
from testbed.tiny import build
from tests.faults.walk import CHANGES, Work, attempt_in_child, library
from tests.train.run.test_run import save_tokenizer

RUN = """
[model]
path = "model"
[data]
train = ["text.txt"]
sequence_length = 16
[training]
steps = 2
batch_size = 4
save_every = 1
keep_checkpoints = 1
[two_stage]
layers_per_block = 1
stage1_steps = 1
[output]
directory = "out"
tensorboard = false
"""
MODEL = "model.safetensors"


def prepare(folder: Path) -> None:
    build("bert", layers=2, width=4).save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    (folder / "text.txt").write_text(" ".join(f"w{i * i % 40}" for i in range(200)))
    (folder / "run.toml").write_text(RUN)


def run(folder: Path) -> None:
    # the log lines of the run
    with contextlib.redirect_stdout(io.StringIO()):
        train(folder / "run.toml", progress=False)


def run_and_list_modules(folder: Path) -> None:
    run(folder)
    (folder / "modules.json").write_text(json.dumps(sorted(sys.modules)))


class TrainingWalk:
    """All faults of a training run, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        """Trains once, unarmed."""
        self.folder, self.out, self.shim = folder, folder / "out", library()
        self.work = Work("training", prepare, run, kinds=CHANGES)
        prepare(folder)
        first = Work("first", prepare, run_and_list_modules)
        outcome = attempt_in_child(first, folder, self.shim)
        assert outcome[0] == "done", outcome
        self.model = (self.out / MODEL).read_bytes()
        # later forks find them imported
        for name in json.loads((folder / "modules.json").read_text()):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        self.repeated: dict[tuple, list[str]] = {}

    def cases(self, stride: int) -> Iterator[str]:
        """Every case; gives what is wrong."""
        for kind in self.work.kinds:
            number, struck = 1, "an operation"
            while struck:
                struck, wrong = self._case(kind, number)
                self.work.cases[kind] += bool(struck)
                yield from (f"{kind} at {number}, {struck}: {one}" for one in wrong)
                number += stride

    def _case(self, kind: str, number: int) -> tuple[str, list[str]]:
        shutil.rmtree(self.out, ignore_errors=True)
        self.shim.faults_arm(os.fsencode(self.out), self.work.kinds[kind], number)
        outcome, message, struck = attempt_in_child(self.work, self.folder, self.shim)
        self.shim.faults_disarm()
        self.work.cases[outcome] += bool(struck)
        wrong = []
        if outcome not in ("done", "refused", "killed"):
            wrong.append(f"{outcome}: {message}")
        if outcome == "done":
            wrong += self._of_the_end()
        left = tuple(sorted(self._files()))
        # a run that starts again looks at the disk alone
        if left not in self.repeated:
            outcome, message, _ = attempt_in_child(self.work, self.folder, self.shim)
            again = [] if outcome == "done" else [f"started again: {outcome} {message}"]
            ends = [*self._of_the_end(), *self._remains()]
            self.repeated[left] = again + [f"started again: {one}" for one in ends]
        return struck, wrong + self.repeated[left]

    def _files(self) -> Iterator[tuple[str, int]]:
        for path in self.out.rglob("*"):
            yield str(path.relative_to(self.out)), path.stat().st_size if path.is_file() else -1

    def _of_the_end(self) -> Iterator[str]:
        """What is wrong with the directory of a run that has ended."""
        wrong = damage(self.out)
        if wrong is not None:
            yield f"the model is damaged: {wrong}"
        elif (self.out / MODEL).read_bytes() != self.model:
            yield "the weights are not the same"

    def _remains(self) -> Iterator[str]:
        """Hidden files, which a run may leave only if they cannot be deleted."""
        hidden = {path.name for path in self.out.glob(".*")} - {LOCK_FILE}
        if hidden:
            yield f"left: {hidden}"


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    walk = TrainingWalk(Path(sys.argv[1]))
    for line in walk.cases(int(sys.argv[2]) if len(sys.argv) > 2 else 1):
        print(line, file=sys.stderr, flush=True)
    cases = walk.work.cases | {"states": len(walk.repeated)}
    print(json.dumps({"name": "training", "cases": cases}), flush=True)


if __name__ == "__main__":
    main()
