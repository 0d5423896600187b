"""What a piece of `bench.gpu` is given: sizes to take, a place for its rows, a way to fail."""

import importlib.util
import os
import time
from pathlib import Path
from typing import Any

import torch

from bench.shared import results


class Skip(Exception):
    """The piece cannot run here, and says why; not a failure."""


def needs(*packages: str) -> None:
    """Skips the piece where a package is not installed that it cannot do without."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise Skip(f"needs {', '.join(missing)}")


class Recorder:
    """The document of one piece, written after every row: what is done survives a crash.

    Attributes:
        toy: toy sizes instead of real ones; the code is the same.
        device: "cuda", or "cpu" in a dry run.
        document: status "running", "ok", "failed" or "skipped"; machine, rows, failures.
    """

    def __init__(self, name: str, path: Path, *, toy: bool) -> None:
        self.path, self.toy = path, toy
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
        self.document["seconds"] = round(time.perf_counter() - self.started, 1)
        # with those of the processes it has waited for
        self.document["CPU seconds"] = round(sum(os.times()[:4]), 1)
        results.write(self.path, self.document)

    def pick(self, full: Any, toy: Any) -> Any:
        return toy if self.toy else full

    def add(self, row: dict[str, Any]) -> None:
        self.document["rows"].append(row)
        self.flush()

    def fail(self, why: str) -> None:
        self.document["failures"].append(why)
        self.flush()

    def check(self, case: str, error: float, bound: float, **facts: Any) -> None:
        """A row of a check. NaN and infinity fail."""
        good = error <= bound
        self.add({"case": case, **facts, "error": error, "bound": bound, "ok": good})
        if not good:
            self.fail(f"{case}: error {error:.3e}, allowed {bound:.3e}")

    def finish(self) -> str:
        if self.document["status"] == "running":
            if not self.document["rows"]:
                self.document["failures"].append("no rows: nothing was measured or checked")
            self.document["status"] = "failed" if self.document["failures"] else "ok"
        self.flush()
        return self.document["status"]
