"""Memory of a growth: python -m tests.growth.disk.peak SOURCE TARGET LIMIT SIZES [OPTIMIZER]

By the system's own account, over what this process had after its imports and after planning.
"""

import json
import subprocess
import sys
from pathlib import Path

import growkern
from growkern.growth import grow


def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1e3


def measured(*args, **sizes):
    """Of a process of its own; the arguments but SIZES."""
    given = [str(x) for x in (*args[:3], json.dumps(sizes), *args[3:])]
    command = [sys.executable, "-m", "tests.growth.disk.peak", *given]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def main(source, target, limit, sizes, optimizer=None):
    how = json.loads(sizes)
    grow._shapes(growkern.plan(source, **how))
    Path("/proc/self/clear_refs").write_text("5")
    base, how["optimizer"] = status("VmRSS"), optimizer
    growkern.grow_checkpoint(source, target, memory_limit=limit, progress=False, **how)
    print(status("VmHWM") - base)


if __name__ == "__main__":
    main(*sys.argv[1:])
