"""`bench.paper` with one length, and saves every four steps, where a usual run saves every minute.

    python -m tests.bench.paper.saving PATTERN ARGUMENT...

The process is killed as soon as a file fits the pattern.
"""

import glob
import os
import signal
import sys
import threading
import time
from dataclasses import replace

from bench.paper import __main__ as command
from bench.paper import plans, runs

run_of = runs.run_of


def saving(job):
    run = run_of(job)
    return replace(run, training=replace(run.training, save_every=4, save_minutes=0))


def die_at(pattern):
    while not glob.glob(pattern):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    runs.run_of = saving
    plans.PARTS = (1.0,)
    threading.Thread(target=die_at, args=(sys.argv.pop(1),), daemon=True).start()
    command.main()
