"""python -m tests.fuzz.fuzz DIRECTORY --cases 2000 --seed 0: damage files and use them.

Everything is imported once; each case is a fork that changes the files of its kind, uses them, and
compares what was accepted with the truth. A case must end as "refused" in one line or as "right",
within two seconds of processor time, and nothing may be written outside its folder. Prints a line
for every case that does not, then the counts.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from growkern.errors import GrowthError
from tests.fuzz.kinds import KINDS, Kind, Wrong

# seconds: of processor time for an answer, and until a case that hangs is killed
MOST_SECONDS, HANGS = 2.0, 60
GOOD = ("refused", "right")


def judged(read: Callable[[], Any], check: Callable[[Any], None]) -> tuple[str, str, float]:
    """How a reading ended, why, and the processor seconds until there was an answer."""
    start = time.process_time()
    seconds = 0.0
    try:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = read()
        finally:
            seconds = time.process_time() - start
        check(result)
    except GrowthError as error:
        said = str(error)
        brief = "\n" not in said and len(said) <= 1000
        return "refused" if brief else "long", said[:2000], seconds
    except Wrong as error:
        return "wrong", str(error), seconds
    except BaseException:
        return "traceback", traceback.format_exc()[-1500:], seconds
    return "right", "", seconds


def problem(read: Callable[[], Any]) -> str | None:
    """What is wrong with how a reading ended; None: it was refused or read, and soon."""
    found, why, seconds = judged(read, lambda _: None)
    if found in GOOD and seconds <= MOST_SECONDS:
        return None
    return f"{found}, {seconds:.1f} s: {why}"


def outcome(kind: Kind, draw: random.Random) -> tuple[str, str, float]:
    """How a case ended, why, and the processor seconds until there was an answer."""
    kind.change(draw)
    return judged(kind.use, kind.check)


def in_child(kind, draw: random.Random) -> tuple[str, str, float]:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            signal.alarm(HANGS)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            os.write(writer, json.dumps(outcome(kind, draw)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as report:
        data = report.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return tuple(json.loads(data)) if data else ("hangs or crashes", f"exit {status}", 0.0)


def beside(place: Path) -> dict[Path, int]:
    """The files beside a folder, and when they were written."""
    others = (path for path in place.parent.iterdir() if path != place)
    return {file: file.stat().st_mtime_ns for path in others for file in [path, *path.rglob("*")]}


def run(directory: Path, cases: int, seed: int, names) -> Counter:
    """All cases; the same for the same seed, whatever other kinds are fuzzed."""
    counts: Counter = Counter()
    for name in names:
        kind = KINDS[name]()
        place = directory / name
        with contextlib.redirect_stderr(None):
            kind.prepare(place)
        shutil.copytree(place, directory / f"{name}.start")
        for number in range(cases // len(KINDS)):
            shutil.rmtree(place)
            shutil.copytree(directory / f"{name}.start", place)
            draw, around = random.Random(f"{seed} {name} {number}"), beside(place)
            found, why, seconds = in_child(kind, draw)
            if beside(place) != around:
                found, why = "written outside", ""
            counts[f"{name} {found}"] += 1
            slow = seconds > MOST_SECONDS
            if found not in GOOD or slow:
                counts["bad"] += 1
                print(
                    f"{name} {number} of seed {seed}: {found}, {seconds:.1f} s: {why}", flush=True
                )
    return counts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    counts = run(given.directory, given.cases, given.seed, given.kinds)
    print(json.dumps(dict(sorted(counts.items()))))
    sys.exit(bool(counts["bad"]))


if __name__ == "__main__":
    main()
