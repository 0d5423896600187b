"""The agent of `torchrun --max-restarts` resumes after ranks were killed, with the same losses.

Three kills are planned. `pytest --walks 30` adds 29 at random moments, `--seed 7` others.
"""

import pytest
import torch
from safetensors.torch import load_file

from testbed import warm
from tests.shared import walks
from tests.train.distributed import elastic
from tests.train.distributed.test_run import SCHEDULE, SHARDED, grown_run, log_of, write
from tests.train.run.test_run import workplace  # noqa: F401

# Before the first checkpoint, when the run grows again; while the checkpoint before a growth is
# written; and in the first step after a growth
PLANNED = ["step-1", "write-3", "step-3"]
KILLS = PLANNED + ["random"] * (walks.times - 1)
STEPS = 4 + 2 * walks.times


def launch(folder, name, *kills):
    seed, seconds = walks.start or 0, 600 + 60 * len(kills)
    done = warm.run(elastic.__name__, folder, f"{name}.toml", seed, *kills, limit_s=seconds)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
def test_killed_ranks_cost_no_step(workplace):  # noqa: F811
    for name in ("straight", "killed"):
        text = grown_run(SCHEDULE, SHARDED).replace("steps = 6", f"steps = {STEPS}")
        write(workplace, name, text)
    launch(workplace, "straight")
    launch(workplace, "killed", *KILLS)
    struck = [number for number in range(len(KILLS)) if (workplace / f"kill-{number}").exists()]
    assert len(struck) == len(KILLS)
    # step 1 grew again, and a checkpoint that was half written is not there
    assert (workplace / "kill-1-from-0").exists() and (workplace / "kill-2-from-2").exists()
    assert (workplace / "kill-3-from-3").exists()
    assert log_of(workplace / "killed") == log_of(workplace / "straight")
    killed = load_file(workplace / "killed" / "model.safetensors")
    for name, weight in load_file(workplace / "straight" / "model.safetensors").items():
        assert torch.equal(weight, killed[name]), name
