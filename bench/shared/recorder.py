"""Records the rows and failures of one piece of `bench.gpu`, and picks its sizes."""

import contextlib
import math
import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.shared import results


class Skip(Exception):
    """Raised by a piece that cannot run here. The message says why. It is not a failure."""


def fill_new_memory() -> None:
    """Make PyTorch fill new tensors with NaN, so that values a kernel does not write show up."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


class Recorder:
    """The document of one piece. It is written after every row, so that a crash loses none.

    Attributes:
        toy: whether to take toy sizes. The code is the same.
        device: "cuda", or "cpu" in a dry run.
        limit_s: seconds after which the piece is killed.
        document: status ("running", "ok", "failed" or "skipped"), machine, rows and failures.
    """

    def __init__(self, name: str, path: Path, *, toy: bool, limit_s: float = math.inf) -> None:
        self.path, self.toy, self.limit_s = path, toy, limit_s
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.started = time.perf_counter()
        self.document: dict[str, Any] = {
            "piece": name,
            "status": "running",
            "toy": toy,
            "machine": results.machine(),
            "seconds": 0.0,
            "failures": [],
            "rows": [],
        }
        self.flush()

    def flush(self) -> None:
        """Write the document."""
        self.document["seconds"] = round(time.perf_counter() - self.started, 1)
        # including child processes that have ended
        self.document["CPU seconds"] = round(sum(os.times()[:4]), 1)
        results.write(self.path, self.document)

    def pick(self, full: Any, toy: Any) -> Any:
        """One of two values: `toy` in a run at toy sizes, otherwise `full`."""
        return toy if self.toy else full

    def add(self, row: dict[str, Any]) -> None:
        """Record a row."""
        self.document["rows"].append(row)
        self.flush()

    def unfinished(self, rows: list[dict[str, Any]]) -> None:
        """Record the rows of a measurement that goes on; they replace those recorded so before."""
        self.document["unfinished"] = rows
        self.flush()

    def fail(self, why: str) -> None:
        """Record a failure. The piece continues, and its status will be "failed"."""
        self.document["failures"].append(why)
        self.flush()

    def check(self, case: str, error: float, bound: float, **facts: Any) -> None:
        """Record the row of a check, which fails unless error <= bound. NaN fails, too."""
        good = error <= bound
        self.add({"case": case, **facts, "error": error, "bound": bound, "ok": good})
        if not good:
            self.fail(f"{case}: error {error:.3e}, allowed {bound:.3e}")

    @contextlib.contextmanager
    def attempt(self, case: str) -> Iterator[None]:
        """Record an exception as the failure of one case, so that the others are still checked."""
        try:
            yield
        except Skip:
            raise
        except Exception as error:
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            why = f"{type(error).__name__}: {lines[0]}"[:500]
            self.add({"case": case, "why not": why})
            self.fail(f"{case}: {why}")

    def finish(self) -> str:
        """Write the final status and return it. A piece without rows has failed."""
        self.document["rows"] += self.document.pop("unfinished", [])
        if self.document["status"] == "running":
            if not self.document["rows"]:
                self.document["failures"].append("no rows: nothing was measured or checked")
            self.document["status"] = "failed" if self.document["failures"] else "ok"
        if self.device == "cuda":
            self.document["clocks at the end"] = results.clocks()
        self.flush()
        return self.document["status"]
