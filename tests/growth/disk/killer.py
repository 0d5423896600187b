"""python -m tests.growth.disk.killer SOURCE DIRECTORY ROUNDS SEED: kill growths at random.

Each is run again to its end. A growth is a child of this process, which has imported and planned
everything and used no thread yet: a fork takes milliseconds where a new interpreter takes seconds.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import growkern
import growkern.growth.grow
from tests.growth.disk.small_pieces import cut_small

HOW = {"hidden_size": 24, "max_shard_size": "30kB", "progress": False}


def start(source, target):
    """A child that grows; its report's `bytes_kept` comes through the pipe."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    os.close(reader)
    try:
        report = growkern.grow_checkpoint(source, target, **HOW)
        os.write(writer, str(report.bytes_kept).encode())
    finally:
        os._exit(0)


def finish(child, reader):
    kept = os.read(reader, 100).decode()
    os.close(reader)
    os.waitpid(child, 0)
    return int(kept) if kept else None


def wait_for(target):
    """Until the work on a target has begun; planning, which leaves nothing behind, is over then."""
    staging = target.parent / f".{target.name}.growing"
    while not (staging / "journal.jsonl").exists() and not target.exists():
        time.sleep(0.0005)


def main():
    source, directory = map(Path, sys.argv[1:3])
    rounds, seed = map(int, sys.argv[3:])
    cut_small(setattr)
    growkern.plan(source, hidden_size=HOW["hidden_size"]).to_dict()
    child = start(source, directory / "first")
    wait_for(directory / "first")
    begin = time.perf_counter()
    finish(*child)
    duration = time.perf_counter() - begin
    rng = random.Random(seed)
    results = [("first", False, 0)]
    for i in range(1, rounds + 1):
        target = directory / f"round{i}"
        child, reader = start(source, target)
        wait_for(target)
        time.sleep(duration * rng.random())
        os.kill(child, signal.SIGKILL)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        os.close(reader)
        if not killed:
            # the machine was busier when the first one ran
            duration /= 2
        was_complete = target.exists()
        # refused where the target is there, but what the killed run left is tidied up
        kept = finish(*start(source, target))
        results.append((target.name, killed, 0 if was_complete else kept))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
