"""A group of one process, on which models are sharded."""

import pytest
import torch.distributed as dist

from growkern.train.distributed.shard import make_mesh


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield make_mesh("cpu")
    finally:
        dist.destroy_process_group()
