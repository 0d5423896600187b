"""`torchrun --max-restarts` resumes after a rank was killed, with the same losses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.train.distributed import elastic
from tests.train.distributed.test_run import GROWTH, SHARDED, grown_run, log_of, write
from tests.train.test_run import workplace  # noqa: F401

ROOT = Path(__file__).parents[3]


def torchrun(folder, name, *steps):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [f"--max-restarts={len(steps)}", "-m", elastic.__name__, str(folder), f"{name}.toml"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *map(str, steps)], cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
def test_a_killed_rank_costs_no_step(workplace):  # noqa: F811
    """Killed before the first checkpoint, when the run grows again, and after one."""
    for name in ("straight", "killed"):
        write(workplace, name, grown_run(GROWTH, SHARDED))
    torchrun(workplace, "straight")
    torchrun(workplace, "killed", 1, 5)
    assert len(list(workplace.glob("killed-at-*"))) == 2
    assert log_of(workplace / "killed") == log_of(workplace / "straight")
    killed = load_file(workplace / "killed" / "model.safetensors")
    for name, weight in load_file(workplace / "straight" / "model.safetensors").items():
        assert torch.equal(weight, killed[name]), name
