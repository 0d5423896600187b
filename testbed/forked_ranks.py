"""python -m testbed.forked_ranks N MODULE FOLDER: the `main(FOLDER)` of MODULE on N ranks.

`torchrun` starts a Python for every rank, and each imports PyTorch and transformers for seconds of
processor time. Here the ranks are forks of one process, itself a fork of the server of
`testbed.warm`. They form a group of gloo. The first rank that fails ends all of them.
"""

import importlib
import os
import signal
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from testbed import warm


def on_ranks(number: int, module: str, folder: Path, limit_s: float = 600) -> None:
    """Run a module on so many ranks, in processes of their own, for so many seconds at the most.

    Raises:
        AssertionError: a rank failed; with the end of what the ranks said.
    """
    # a rank that fails ends them all; the limit is for those that wait for each other
    done = warm.run("testbed.forked_ranks", number, module, folder, limit_s=limit_s)
    assert done.returncode == 0, done.stderr[-4000:]


def run_rank(rank: int, number: int, module: str, folder: Path) -> int:
    """The exit code of one rank."""
    # where accelerate looks
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number}
    os.environ.update({name: str(value) for name, value in where.items()})
    torch.set_num_threads(1)
    try:
        store = f"file://{folder / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=number)
        importlib.import_module(module).main(folder)
        if rank == 0:
            warm.note_modules()
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    number, module, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    importlib.import_module(module)
    ranks = set()
    for rank in range(number):
        child = os.fork()
        if not child:
            code = run_rank(rank, number, module, folder)
            sys.stdout.flush()
            sys.stderr.flush()
            # gloo's threads now and then abort a process that leaves in the ordinary way
            os._exit(code)
        ranks.add(child)
    while ranks:
        child, status = os.wait()
        ranks.discard(child)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a rank ended with {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
