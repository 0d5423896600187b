"""Writes the checkpoints of a run.

A checkpoint is written to a staging folder inside the run's directory. A manifest with the size and
the checksum of every file is written last, everything is synced, and one rename makes it appear as
`checkpoint-<step>`. A process that is killed at any moment leaves whole checkpoints only.

Several processes write to one staging folder, whose contents then appear at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from growkern.errors import GrowthError
from growkern.files import sync, sync_tree
from growkern.publish import MANIFEST, delete, move, open_ours, write_manifest
from growkern.train.safety.checkpoints import checkpoints_in

if TYPE_CHECKING:
    from accelerate import Accelerator

STAGING = ".saving"
# which run a directory belongs to
MARKER = "run.json"
# in the messages of Rust code, such as the tokenizer's, which raises plain exceptions
RUST_ERROR = re.compile(r"(.*) \(os error \d+\)$")
# in the messages of the C++ code that torch.save writes with, for every disk error
TORCH_SAVE = ("PytorchStreamWriter", "inline_container.cc", "iostream error")

Step = Callable[[], Any]


def open_staging(directory: Path) -> Path:
    """An empty staging folder in the directory of a run, for this user alone.

    Remains of a killed save are deleted.
    """
    directory.mkdir(parents=True, exist_ok=True)
    staging = directory / STAGING
    delete(staging)
    staging.mkdir(mode=0o700)
    os.close(open_ours(staging, private=True))
    return staging


def close_staging(directory: Path) -> None:
    """Delete the staging folder with everything in it. What cannot be deleted stays."""
    with contextlib.suppress(OSError):
        delete(directory / STAGING)


def publish(staged: Path, target: Path) -> None:
    """Write the manifest of a staged checkpoint, sync it, and rename it to its place.

    A checkpoint that is there already is replaced. If the disk fails, it is as it was.
    """
    write_manifest(staged)
    sync_tree(staged)
    # an old checkpoint is deleted with the staging folder
    move(staged, target)
    sync(target.parent)


def publish_into(staged: Path, directory: Path) -> None:
    """Write the manifest of a staged model, sync it, and move its files into a directory.

    The manifest moves last. Until then `damage(directory)` reports the directory as not whole.
    """
    marker = directory / MARKER
    write_manifest(staged, beside=[marker] if marker.is_file() else [])
    sync_tree(staged)
    (directory / MANIFEST).unlink(missing_ok=True)
    sync(directory)
    for path in sorted(staged.iterdir(), key=lambda path: path.name == MANIFEST):
        if path.name == MANIFEST:
            sync(directory)
        move(path, directory / path.name)
    sync(directory)


def rotate(newest: Path, limit: int | None, keep: Path | None) -> None:
    """Delete the checkpoints that were written first, beyond a number of checkpoints.

    Args:
        newest: the checkpoint that was just written; it is never deleted.
        limit: the number of checkpoints to leave, `newest` included; None or 0 leaves all.
        keep: another one that is never deleted, the best so far.
    """
    if not limit:
        return
    others = [p for p in checkpoints_in(newest.parent) if p not in (newest, keep)]
    # sort by time, because a repeated run may find later steps of an earlier run
    others.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    kept = 2 if keep is not None and keep != newest and keep.exists() else 1
    for path in others[max(0, limit - kept) :]:
        # renamed first: half a checkpoint would be reported as damaged
        trash = newest.parent / STAGING / f"old-{path.name}"
        trash.parent.mkdir(mode=0o700, exist_ok=True)
        move(path, trash)
        with contextlib.suppress(OSError):
            delete(trash)


# ------------------------------------------------------------------- together


@dataclass(frozen=True)
class Processes:
    """The processes that write together; `gather` gives each the objects of all of them."""

    first: bool
    gather: Callable[[Any], list[Any]]

    @classmethod
    def of_accelerator(cls, accelerator: Accelerator) -> Processes:
        """All processes of a training run."""
        from accelerate.utils import gather_object

        several = accelerator.num_processes > 1
        return cls(accelerator.is_main_process, lambda x: gather_object([x]) if several else [x])

    @classmethod
    def of_group(cls, group: dist.ProcessGroup) -> Processes:
        """The processes of a group that can exchange CPU tensors."""

        def gather(x: Any) -> list[Any]:
            objects: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(objects, x, group=group)
            return objects

        return cls(dist.get_rank(group) == 0, gather)


def begin_together(
    processes: Processes, run: Path, write: Callable[[Path], None]
) -> tuple[Path, str | None]:
    """Open a staging folder and write to it. All processes take part.

    Returns the folder; and None, or why a process could not write, the same for all. Nothing is
    left then.
    """
    staging = run / STAGING
    open_first = partial(open_staging, run) if processes.first else lambda: None
    failure = _take_together(processes, open_first, partial(write, staging))
    if failure is not None and processes.first:
        close_staging(run)
    return staging, failure


def finish_together(processes: Processes, run: Path, write: Step, appear: Step) -> str | None:
    """Write the rest to the staging folder; the first process lets its contents appear.

    Returns None, or why a process could not write, the same for all. Nothing is left then.
    """
    failure = _take_together(processes, write, appear if processes.first else lambda: None)
    if processes.first:
        close_staging(run)
    return failure


def _take_together(processes: Processes, *steps: Step) -> str | None:
    """Take steps on every process, until one fails on any; why, or None."""
    failures = (_try_together(processes, step) for step in steps)
    return next((failure for failure in failures if failure is not None), None)


def _try_together(processes: Processes, step: Step) -> str | None:
    """Do something on every process; the first failure to write of any of them, or None.

    Any other error ends this on all processes.
    """
    failure, unexpected = None, None
    try:
        step()
    except Exception as error:
        failure = _write_failure(error)
        if failure is None:
            unexpected = error
    name = None if unexpected is None else f"{type(unexpected).__name__}: {unexpected}"
    outcomes = processes.gather((failure, name))
    if unexpected is not None:
        raise unexpected
    for rank, (_, text) in enumerate(outcomes):
        if text is not None:
            raise GrowthError(f"process {rank} failed: {text}")
    return next((failed for failed, _ in outcomes if failed is not None), None)


def _write_failure(error: Exception) -> str | None:
    """Why a disk took no more bytes, or None if the error is another one."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    text = " ".join(str(error).split())
    if isinstance(error, SafetensorError):
        return text
    from_rust = RUST_ERROR.match(text)
    if from_rust and type(error) is Exception:
        return from_rust[1]
    return "the disk takes no more bytes" if any(part in text for part in TORCH_SAVE) else None


class BackgroundSave:
    """The write of one checkpoint in a thread, which begins at once while training continues.

    A process that outlived a killed run would write into the next one's staging folder.

    Args:
        write: writes it; returns why the disk took no more, or None.
    """

    def __init__(self, target: Path, write: Callable[[], str | None]) -> None:
        self.target = target
        self._write = write
        self._failure: str | None = None
        self._error: Exception | None = None
        accelerated = torch.accelerator.is_available()
        self._device = torch.accelerator.current_device_index() if accelerated else None
        # a daemon: a second Ctrl-C ends the process without waiting for the disk
        self._thread = threading.Thread(target=self._run, name=f"write {target.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._device is not None:
                # a new thread would take the first device, and memory there
                torch.accelerator.set_device_index(self._device)
            self._failure = self._write()
        except Exception as error:
            self._error = error

    @property
    def is_done(self) -> bool:
        """Whether the write has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> str | None:
        """Wait for the end of the write."""
        self._thread.join()
        if self._error is not None:
            raise GrowthError(f"{self.target} was not saved: {self._error}") from self._error
        return self._failure
