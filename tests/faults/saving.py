"""python -m tests.faults.saving DIRECTORY: fail each change of the disk while a run saves.

A run that has a checkpoint saves the next one, deletes the first, and saves its model. The code is
that of the trainer, its model is tiny, and no step is trained in between. So all operations of all
files can fail in turn in this process; a kill strikes a fork of it.

Whatever happens, there is a whole checkpoint, and none that is not. A run that starts again then
saves the same bytes.
"""

import contextlib
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

from growkern.train.safety.checkpoints import checkpoints_in, damage
from testbed.tiny import build
from tests.faults.walk import CHANGES, Walk, Work, attempt, library, tree
from tests.train.safety.runs import small_trainer

SETTINGS = {"max_steps": 2, "save_strategy": "no", "save_total_limit": 1}


def new_trainer(folder: Path) -> object:
    trainer = small_trainer(
        folder / "out", build("bert", layers=1, width=4, tied=True), args=SETTINGS
    )
    with contextlib.redirect_stdout(None):
        trainer.train()
    return trainer


class SavingWalk(Walk):
    """All faults of a save. The trainer is made once, and only its directory is made anew."""

    def __init__(self, folder: Path) -> None:
        """Trains once and saves once, unarmed."""
        self.folder, self.shim, self.without = folder, library(), 0
        self.out = self.armed = folder / "out"
        self.trainer = new_trainer(folder)
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()
        self._save(1)
        shutil.copytree(self.out, folder / "start", copy_function=shutil.copy2)
        self.work = Work("saving", lambda _: None, self._go_on, kinds=CHANGES)
        self._go_on(folder)
        self.after = tree(self.out)
        self.repeated: dict[str, list[str]] = {}

    def _save(self, step: int) -> None:
        self.trainer.state.global_step = step
        self.trainer._save_checkpoint(self.trainer.model, None)

    def _go_on(self, _folder: Path) -> None:
        """As a run that starts with a checkpoint: clean up, save, save the model."""
        self.trainer.saver.newest_whole()
        self._save(2)
        self.trainer.save_final_model(torch.float32)

    def _reset(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        shutil.copytree(self.folder / "start", self.out, copy_function=shutil.copy2)

    def _check(self, outcome: str, message: str) -> Iterator[str]:
        if outcome not in ("done", "refused", "killed") or "\n" in message:
            yield f"{outcome}: {message}"
        found = checkpoints_in(self.out)
        if not found:
            yield "no checkpoint is left"
        for checkpoint in found:
            if damage(checkpoint) is not None:
                yield f"{checkpoint.name}: {damage(checkpoint)}"
        if outcome == "done" and damage(self.out) is not None:
            yield f"it says it is done, and the model is damaged: {damage(self.out)}"

    def _repeat(self) -> Iterator[str]:
        with warnings.catch_warnings(record=True):
            outcome, message, _ = attempt(self.work, self.folder, self.shim)
        if outcome != "done":
            yield f"repeated: {outcome} {message}"
        now = tree(self.out)
        names = {name for name in now.keys() | self.after if now.get(name) != self.after.get(name)}
        if names:
            yield f"repeated: not the same to the byte: {sorted(names)}"


def main(kind: type = SavingWalk) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    walk = kind(Path(sys.argv[1]))
    for line in walk.run():
        print(line, file=sys.stderr, flush=True)
    print(walk.work.report(), flush=True)


if __name__ == "__main__":
    main()
