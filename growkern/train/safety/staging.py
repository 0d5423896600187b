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
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

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

X = TypeVar("X")
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

    def take(self, run: Path, *steps: Step) -> str | None:
        """Take steps on every process, until one fails to write on any.

        Any other error ends this on all processes.

        Returns:
            None, or why a process could not write, the same for all. Nothing is staged then.
        """
        for step in steps:
            failure, unexpected = None, None
            try:
                step()
            except Exception as error:
                failure = _write_failure(error)
                unexpected = error if failure is None else None
            name = None if unexpected is None else f"{type(unexpected).__name__}: {unexpected}"
            outcomes = self.gather((failure, name))
            if unexpected is not None:
                raise unexpected
            for rank, (failed, text) in enumerate(outcomes):
                if text is not None:
                    raise GrowthError(f"process {rank} failed: {text}")
                failure = failure or failed
            if failure is not None:
                if self.first:
                    close_staging(run)
                return failure
        return None


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


def in_background(name: str, work: Callable[[], X]) -> Future[X]:
    """Begin work in a thread, while training continues.

    A process that outlived a killed run would write into the next one's staging folder.
    """
    done: Future[X] = Future()
    accelerated = torch.accelerator.is_available()
    device = torch.accelerator.current_device_index() if accelerated else None

    def run() -> None:
        try:
            if device is not None:
                # a new thread would take the first device, and memory there
                torch.accelerator.set_device_index(device)
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    # a daemon: a second Ctrl-C ends the process without waiting for the disk
    threading.Thread(target=run, name=name, daemon=True).start()
    return done
