"""Runs on data sets on several ranks, for `tests.forked_ranks`; and one that is refused."""

import torch.distributed as dist

from growkern import GrowthError
from growkern.train.dataset import together
from growkern.train.run import train
from tests.train.distributed import run_ranks


def main(folder):
    # the processes that wait ask after every step of the work
    together.SECONDS = 0.0
    run_ranks.main(folder)
    try:
        train(folder / "refused.toml", progress=False)
    except GrowthError as error:
        (folder / f"refused-{dist.get_rank()}").write_text(str(error))
