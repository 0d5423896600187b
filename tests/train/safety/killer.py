"""python -m tests.train.safety.killer DIRECTORY random|operations ROUNDS SEED: kill runs.

Each run is a child of this process, which has imported everything and computed nothing: a fork
takes milliseconds where a new interpreter takes seconds. A child is killed by SIGKILL at a random
moment, or when it is about to do its N-th file operation in the directory of the run. The run is
then started again, as often as needed. ROUNDS 0 with "operations" goes through all of them.

Prints one JSON line per round: the moment, whether the kill struck, what was left, and how it
ended: "same" if the trained weights are those of a run that was not killed.
"""

import contextlib
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
from safetensors.torch import load_file

from growkern import GrowthError, run as train
from growkern.publish.calls import LOCK_FILE

# what Python reports before it does them; writes of C++ and Rust code are hit at random moments
CHANGES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}


def kill_at(number, directory):
    """Kill this process when it is about to do a file operation below a directory.

    Returns the counter of these operations.
    """
    seen = itertools.count(1)

    def watch(event, arguments):
        if event not in CHANGES or isinstance(arguments[0], int):
            return
        path = os.fsdecode(arguments[0])
        # a relative path is one inside a folder that is being deleted
        is_ours = path.startswith(str(directory)) or not path.startswith("/")
        is_read = event == "open" and arguments[1] is not None and set(arguments[1]) <= set("rbt")
        if is_ours and not is_read and next(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    return seen


def child(file, number=None):
    """Start the run in a child process; it exits with 0, or with 2 after one line."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        if number is not None:
            os.dup2(null, 2)
        seen = kill_at(number, file.parent / "out")
        train(file, progress=False)
        found = {"modules": sorted(sys.modules), "operations": next(seen) - 1}
        (file.parent / "found.json").write_text(json.dumps(found))
        code = 0
    except GrowthError as error:
        print("refused:", error, file=sys.stderr)
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def status_of(process):
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def weights_of(run):
    return load_file(run / "out" / "model.safetensors")


def one_round(workplace, straight, folder, number, moment):
    """Kill a run at an operation or after some seconds, then let it end."""
    shutil.copytree(workplace, folder)
    process = child(folder / "run.toml", number)
    if number is None:
        time.sleep(moment)
        os.kill(process, signal.SIGKILL)
    struck = status_of(process) == -signal.SIGKILL
    left = sorted(path.name for path in (folder / "out").glob("*"))
    code = status_of(child(folder / "run.toml"))
    if code:
        return struck, left, f"exit code {code}"
    ours, theirs = weights_of(folder), weights_of(straight)
    same = all(torch.equal(ours[name], value) for name, value in theirs.items())
    if not same:
        return struck, left, "different"
    # the lock of a finished run is taken by nobody any more
    after = {path.name for path in (folder / "out").glob(".*")} - {LOCK_FILE}
    return struck, left, f"same, but {after} is left" if after else "same"


def main():
    workplace, how = Path(sys.argv[1]).resolve(), sys.argv[2]
    rounds, rng = int(sys.argv[3]), random.Random(int(sys.argv[4]))
    rooms = workplace.with_name(f"{workplace.name}-rooms")
    straight = rooms / "straight"
    shutil.copytree(workplace, straight)
    assert status_of(child(straight / "run.toml")) == 0
    # later children find what the first one had to import
    found = json.loads((straight / "found.json").read_text())
    for name in found["modules"]:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    shutil.copytree(workplace, rooms / "timed")
    begin = time.perf_counter()
    assert status_of(child(rooms / "timed" / "run.toml")) == 0
    duration = time.perf_counter() - begin
    numbers = itertools.count(1) if rounds == 0 else iter(range(rounds))
    for i in numbers:
        number = None
        if how == "operations":
            number = i if rounds == 0 else rng.randint(1, found["operations"])
        struck, end, folder = False, "same", rooms / f"round{i}"
        while not struck and end == "same":
            moment = duration * rng.random()
            struck, left, end = one_round(workplace, straight, folder, number, moment)
            shutil.rmtree(folder)
            if number is not None:
                break
            if not struck:
                # the machine has less other work than when the run was timed
                duration = moment
        print(json.dumps([number or round(moment, 2), struck, left, end]), flush=True)
        if rounds == 0 and not struck:
            break


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    main()
