"""A rank that starts by growing needs little memory besides its shards of model and optimizer.

`python -m tests.train.distributed.test_start_memory DIR` saves a source in DIR. With KIND behind
DIR it prints the memory of the first of 4 ranks. Growth does not communicate, so there need not be
other ranks.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.distributed.start_memory import GROWN, PLAIN, SOURCE, measure, save_source
from growkern.ops.backend import native
from testbed import warm

RANKS, MOST_MB = 4, 300
# 14 times the memory of a rank's part of the output matrix would be too much
LARGE = {**SOURCE, "vocab_size": 32_000, "num_hidden_layers": 3}


def said_by(*arguments):
    done = warm.run(__name__, *arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    said_by(folder)
    return folder


@pytest.mark.parametrize("kind", [GROWN, GROWN + PLAIN])
def test_a_start_takes_the_shard_and_300_mb(source, kind):
    """By the system's own account, while the model and then its moments grow."""
    if kind == GROWN and native.loaded() is None:
        pytest.skip(native.reason())
    found = json.loads(said_by(source, kind).splitlines()[-1])
    assert found["library"] == (kind == GROWN)
    # a copy of the whole model would not fit
    assert found["model_mb"] - found["shard_mb"] > MOST_MB
    assert found["growing_beyond_shard_mb"] <= MOST_MB
    assert found["optimizer_beyond_shard_mb"] <= MOST_MB


def main(folder, kind=None):
    torch.set_num_threads(1)
    if kind is None:
        save_source(folder, LARGE)
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    found = measure(folder, kind)
    print(json.dumps(found | {"library": native.loaded() is not None}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
