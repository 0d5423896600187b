"""python -m testbed.torchrun N SCRIPT ARGUMENT...: as `torchrun --standalone --nproc_per_node N`.

The processes are forks of this one: they need not import everything once more. SCRIPT is a file or
the name of a module.
"""

import os
import runpy
import sys
from collections.abc import Callable

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def launch(number: int, work: Callable, *arguments: object, restarts: int = 0) -> None:
    """Call a function on so many processes, and again if one fails, `restarts` times at the most.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: one failed each time.
    """
    how = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=number, max_restarts=restarts, run_id="tests",
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork",
    )  # fmt: skip
    elastic_launch(how, work)(*arguments)


def script(*line: str) -> None:
    """Run a script or a module in this process; where it ends the process, it returns here."""
    sys.argv = [*line]
    leave, os._exit = os._exit, sys.exit
    try:
        run = runpy.run_path if line[0].endswith(".py") else runpy.run_module
        run(line[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{line[0]} ended with {end.code}") from end
    finally:
        os._exit = leave
        sys.stdout.flush()


if __name__ == "__main__":
    launch(int(sys.argv[1]), script, *sys.argv[2:])
