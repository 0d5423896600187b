"""Damaged sources, models, lineages, optimizer files, caches and run files.

Each is refused in one line, or gives the right result.

`python -m tests.fuzz.fuzz DIRECTORY --cases 2000` takes more of them.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests import walks

ROOT = Path(__file__).parents[2]
CASES = 100


def test_what_is_damaged_is_refused_or_right(tmp_path):
    cases, seed = str(CASES * walks.times), str(walks.start or 0)
    command = [sys.executable, "-m", "tests.fuzz.fuzz", str(tmp_path), "--cases", cases]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--seed", seed], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
