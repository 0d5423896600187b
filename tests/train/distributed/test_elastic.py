"""The agent of `torchrun --max-restarts` resumes after a rank was killed, with the same losses."""

import pytest
import torch
from safetensors.torch import load_file

from tests import warm
from tests.train.distributed import elastic
from tests.train.distributed.test_run import GROWTH, SHARDED, grown_run, log_of, write
from tests.train.test_run import workplace  # noqa: F401


def launch(folder, name, *steps):
    done = warm.run(elastic.__name__, folder, f"{name}.toml", *steps)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
def test_a_killed_rank_costs_no_step(workplace):  # noqa: F811
    """Killed before the first checkpoint, when the run grows again, and after one."""
    for name in ("straight", "killed"):
        write(workplace, name, grown_run(GROWTH, SHARDED))
    launch(workplace, "straight")
    launch(workplace, "killed", 1, 5)
    assert len(list(workplace.glob("killed-at-*"))) == 2
    assert log_of(workplace / "killed") == log_of(workplace / "straight")
    killed = load_file(workplace / "killed" / "model.safetensors")
    for name, weight in load_file(workplace / "straight" / "model.safetensors").items():
        assert torch.equal(weight, killed[name]), name
