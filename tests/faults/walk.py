"""Fail every file operation of a piece of work in turn, and look at what is left.

This process imports everything and does the work once: another time takes milliseconds where a new
interpreter takes seconds. A case arms the library `shim.c` to fail the N-th file operation in one
of five ways and does the work; N goes from 1 to the end. Where more than seven operations in a row
read or write the same open file by the same call, it takes the first two, three in the middle and
the last two. A walk with a stride of five takes every fifth of those, others for each way.
With EVERY on the command line it takes all. A kill strikes a fork of this process.
Each case must end as "done", "refused in one line" or "killed", and without memory as "starved", in
one line too.
Then the work is repeated without a fault and must be done to the byte. A repeat depends on the disk
alone, so it is not run again where an earlier case left the same files.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import itertools
import json
import os
import shutil
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from growkern.errors import MOST, is_out_of_memory

KINDS = {"EIO": 1, "ENOSPC": 2, "EINTR": 3, "cut": 4, "kill": 5}
# of the operations that change the disk or take space on it, syncs among them, alone
CHANGES = {"EIO": 6, "ENOSPC": 2, "cut": 4, "kill": 5}
MEMORY = {"memory": 8}
EVERY = "--every"
# any number that no operation has
NEVER = 2**62
# is called with the name of an operation, and with its file's descriptor if it has one
WATCHER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int)
# of the command line: what `growkern` says in one line
REFUSALS = (ValueError, OSError)


@dataclass
class Work:
    """The work that a walk goes through.

    Attributes:
        name: of the folder that it lies in.
        prepare: fills a new folder; a target of an earlier time is called "target".
        run: does the work in the folder; makes, or replaces, "target".
        overwrite: whether there is a target at the start.
        kinds: of faults.
        cases: how many of each kind, and how they ended.
        operations: how many there are for each kind to fail.
    """

    name: str
    prepare: Callable[[Path], None]
    run: Callable[[Path], None]
    overwrite: bool = False
    kinds: Mapping[str, int] = field(default_factory=lambda: KINDS)
    cases: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)

    def report(self) -> str:
        """One line for the test."""
        fields = {"name": self.name, "cases": self.cases, "operations": self.operations}
        return json.dumps(fields)


def library() -> ctypes.CDLL:
    """The shim, which the environment has to preload."""
    shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
    shim.faults_arm.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long]
    shim.faults_fired.restype = ctypes.c_char_p
    shim.faults_moved.restype = shim.faults_count.restype = ctypes.c_long
    shim.faults_large.argtypes = [ctypes.c_size_t]
    shim.faults_watch.argtypes = [ctypes.c_char_p, WATCHER]
    shim.faults_continues.argtypes = [ctypes.c_long]
    return shim


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file and directory below a folder: its mode, and the bytes of a file."""
    found = {}
    for path in sorted(folder.rglob("*")):
        # the number of the process is another one in each case
        data = b"" if path.is_dir() or path.name.endswith(".lock") else path.read_bytes()
        found[str(path.relative_to(folder))] = path.stat().st_mode, data
    return found


def state(folder: Path) -> str:
    """A name for what lies in a folder; of inodes only the question which one is noted counts."""
    files = tree(folder)
    for name in [name for name in files if name.endswith("/swap")]:
        mode, note = files[name]
        same = [
            path for path in sorted(folder.rglob("*")) if note == f"{path.stat().st_ino}\n".encode()
        ]
        files[name] = mode, str(same).encode()
    return hashlib.sha256(repr(files).encode()).hexdigest()


def attempt(work: Work, folder: Path, shim: ctypes.CDLL) -> list[str]:
    """Do the work. The outcome, its message, and the operation that was struck, "" for none."""
    outcome = "done", ""
    try:
        with warnings.catch_warnings(record=True):
            work.run(folder)
    except Exception as error:
        said = str(error)
        outcome = type(error).__name__, " ".join(said.split())
        if is_out_of_memory(error):
            is_short = "\n" not in said and len(said) <= MOST
            outcome = "starved" if is_short else "starved at length", outcome[1]
        elif isinstance(error, REFUSALS):
            outcome = "refused", outcome[1]
    finally:
        shim.faults_disarm()
    return [*outcome, (shim.faults_fired() or b"").decode()]


def attempt_in_child(work: Work, folder: Path, shim: ctypes.CDLL) -> list[str]:
    """As `attempt`, by a process that may be killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        gc.disable()
        # Rust says more than a line when it aborts
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        try:
            os.write(writer, json.dumps(attempt(work, folder, shim)).encode()[:60_000])
        finally:
            os._exit(0)
    shim.faults_disarm()
    os.close(writer)
    report = b"".join(iter(lambda: os.read(reader, 1 << 16), b""))
    os.close(reader)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    # Rust has no other answer to a failed allocation than to abort
    if status in (-signal.SIGKILL, -signal.SIGABRT):
        return ["killed", "", "an operation"]
    return json.loads(report) if report else [f"exit {status}", "", "an operation"]


def _some(row: list[int]) -> list[int]:
    """The first two, three in the middle and the last two: a record of an archive takes three."""
    middle = len(row) // 2
    return row if len(row) <= 7 else row[:2] + row[middle - 1 : middle + 2] + row[-2:]


class Walk:
    """All faults of one kind of work, in a folder of its own.

    Attributes:
        armed: the folder below which operations fail.
        stride: one in so many operations is struck, unless EVERY is asked for.
    """

    stride = 1

    def __init__(self, work: Work, folder: Path, shim: ctypes.CDLL, without: int = 0) -> None:
        """Does the work once, unarmed.

        Args:
            without: the errno of a system without renameat2; 0: it has it.
        """
        self.work, self.shim, self.without = work, shim, without
        self.folder = self.armed = folder / work.name
        self.folder.mkdir(parents=True)
        work.prepare(self.folder)
        shutil.copytree(self.folder, folder / f"{work.name}.start", copy_function=shutil.copy2)
        self.start = folder / f"{work.name}.start"
        self.before = tree(self.folder)
        # here, so that all is imported and cached before the forks
        work.run(self.folder)
        self.after = tree(self.folder)
        assert self.after != self.before
        self.repeated: dict[str, list[str]] = {}
        gc.collect()
        gc.freeze()

    def run(self) -> Iterator[str]:
        """Every case; gives what is wrong."""
        self.shim.faults_without_renameat2(self.without)
        for kind in self.work.kinds:
            numbers = self._numbers(kind)
            # and those that a struck run has beyond the others: at the end nothing is struck
            for number in itertools.chain(numbers, itertools.count(numbers[-1] + 1)):
                struck, wrong = self._case(kind, number)
                self.work.cases[kind] += bool(struck)
                yield from (f"{self.work.name}: {kind} at {number}, {struck}: {w}" for w in wrong)
                if not struck and number > numbers[-1]:
                    break

    def _numbers(self, kind: str) -> list[int]:
        """Operations to strike, from a run in which none is."""
        self._reset()
        self.shim.faults_arm(os.fsencode(self.armed), self.work.kinds[kind], NEVER)
        attempt(self.work, self.folder, self.shim)
        last = self.work.operations[kind] = self.shim.faults_count()
        if EVERY in sys.argv:
            return list(range(1, last + 1))
        rows: list[list[int]] = []
        for number in range(1, last + 1):
            if self.shim.faults_continues(number):
                rows[-1].append(number)
            else:
                rows.append([number])
        # the ways share the operations among them
        first = list(self.work.kinds).index(kind) % self.stride
        return [number for row in rows for number in _some(row)][first :: self.stride]

    def _case(self, kind: str, number: int) -> tuple[str, list[str]]:
        self._reset()
        self.shim.faults_arm(os.fsencode(self.armed), self.work.kinds[kind], number)
        do = attempt_in_child if kind in ("kill", "memory") else attempt
        outcome, message, struck = do(self.work, self.folder, self.shim)
        self.shim.faults_disarm()
        self.work.cases[outcome] += bool(struck)
        wrong = list(self._check(outcome, message))
        left = state(self.armed)
        if left not in self.repeated:
            self.repeated[left] = list(self._repeat())
        return struck, wrong + self.repeated[left]

    def _reset(self) -> None:
        """The folder as it was, without touching what no work writes to."""
        for path in self.folder.iterdir():
            if path.is_dir() and (path.name.startswith(".") or path.name == "target"):
                shutil.rmtree(path)
            elif path.name.startswith("."):
                path.unlink()
        if self.work.overwrite:
            shutil.copytree(self.start / "target", self.folder / "target")

    def _part(self, files: dict[str, tuple[int, bytes]], target: bool) -> dict:
        """The target's files, or those beside it that were there at the start."""
        return {
            name: value
            for name, value in files.items()
            if not name.startswith(".") and (name.split("/")[0] == "target") == target
        }

    def _check(self, outcome: str, message: str) -> Iterator[str]:
        now = tree(self.folder)
        if self._part(now, False) != self._part(self.before, False):
            yield "the source was changed"
        target = self._part(now, True)
        is_old, is_new = (target == self._part(x, True) for x in (self.before, self.after))
        # without an exchange the old target is away for a moment, or on a disk that stays full
        is_away = (
            not target and self.without and (outcome == "killed" or "put them back" in message)
        )
        if outcome not in ("done", "refused", "killed", "starved"):
            yield f"{outcome}: {message}"
        elif not (is_old or is_new or is_away):
            yield f"{outcome}: the target is neither the old nor the new one: {sorted(target)}"
        elif outcome == "done" and not is_new:
            yield "it says it is done, and the target is not the new one"
        elif outcome == "refused" and is_new and not is_old and "is complete" not in message:
            yield f"the target is the new one, and it says {message}"

    def _repeat(self) -> Iterator[str]:
        there = self._part(tree(self.folder), True)
        is_complete = bool(there) and not self.work.overwrite
        outcome, message, _ = attempt(self.work, self.folder, self.shim)
        if is_complete:
            if outcome != "refused" or "exists" not in message:
                yield f"repeated after it was complete: {outcome} {message}"
        elif outcome != "done":
            yield f"repeated: {outcome} {message}"
        now = tree(self.folder)
        if now != self.after:
            names = {
                name for name in now.keys() | self.after if now.get(name) != self.after.get(name)
            }
            yield f"repeated: not the same to the byte: {sorted(names)}"


@contextlib.contextmanager
def models_made_once(model_class: Any) -> Iterator[None]:
    """Inside, one model without weights is made per config, not three in each growth.

    Making one touches no file, and takes a sixth of the time of a small growth.
    """
    make, made = model_class._from_config, {}

    def once(config: Any, **how: Any) -> Any:
        if torch.get_default_device().type != "meta":
            return make(config, **how)
        key = config.to_json_string(use_diff=False), str(how)
        if key not in made:
            made[key] = make(config, **how)
        return made[key]

    model_class._from_config = once
    try:
        yield
    finally:
        del model_class._from_config


@contextlib.contextmanager
def only_one_thread(*modules: object) -> Iterator[None]:
    """Inside, these modules' thread pools work at once, so that operations have an order."""
    from concurrent.futures import Future

    class Pool:
        def __init__(self, *args: object, **kwargs: object) -> None:
            pass

        def submit(self, call: Callable, *args: object) -> Future:
            future: Future = Future()
            try:
                future.set_result(call(*args))
            except Exception as error:
                future.set_exception(error)
            return future

        def map(self, call: Callable, items: list) -> Iterator:
            return map(call, items)

        def shutdown(self, **kwargs: object) -> None:
            pass

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    kept = [(module, module.ThreadPoolExecutor) for module in modules]  # type: ignore
    for module, _ in kept:
        module.ThreadPoolExecutor = Pool  # type: ignore
    try:
        yield
    finally:
        for module, pool in kept:
            module.ThreadPoolExecutor = pool  # type: ignore
