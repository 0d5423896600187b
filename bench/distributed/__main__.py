"""Compares training on 1, 2 and 4 processes, and measures the memory of a start by growing.

    python -m bench.distributed

The processes are CPU processes that talk through gloo. Each case trains a tiny model through both
stages. The table holds the largest differences from a single process that trains the whole model:
of losses, of other logged numbers, and of weights. No speed is measured.

Cases that are done are kept in build/, so the same command resumes after an interruption. After a
change of the sources all of them run again.
"""

import dataclasses
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch

from bench.distributed.start_memory import KINDS
from bench.shared.harness import machine, measure_all, parser_of
from bench.shared.results import ROOT
from testbed.forked_ranks import on_ranks
from testbed.parity import Case, differences, moved_apart

FAMILIES = ("bert", "gpt2", "llama", "t5")
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"accumulation": 2},
    {"checkpointing": True},
    {"teacher": "sharded"},
    {"accumulation": 2, "checkpointing": True, "teacher": "sharded"},
)
PROCESSES = (1, 2, 4)
WORK = ROOT / "build" / "distributed"
MOST_SECONDS = 3600


def cases() -> list[Case]:
    """All families with every variant in two dtypes, and once in bfloat16."""
    made = [
        Case(family, dtype, **variant)
        for family in FAMILIES
        for dtype in ("float64", "float32")
        for variant in VARIANTS
    ]
    # Adam divides by the size of a gradient, so its steps do not tell how large an error was
    narrow = {"accumulation": 2, "teacher": "sharded", "optim": "sgd"}
    return made + [Case(family, "bf16", **narrow) for family in FAMILIES]


def parity(sources: str) -> Iterator[dict[str, Any]]:
    """The differences of all cases between several processes and one."""
    for old in WORK.glob("*"):
        if old.name != sources:
            shutil.rmtree(old)
    chosen = cases()
    for processes in PROCESSES:
        folder = WORK / sources / f"on{processes}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "store").unlink(missing_ok=True)
        (folder / "cases.json").write_text(json.dumps([dataclasses.asdict(c) for c in chosen]))
        if not all((folder / f"{number}.pt").exists() for number in range(len(chosen))):
            on_ranks(processes, "testbed.parity", folder, MOST_SECONDS)
    for number, case in enumerate(chosen):
        alone, *others = (
            torch.load(WORK / sources / f"on{n}" / f"{number}.pt", weights_only=True)
            for n in PROCESSES
        )
        for processes, weights in zip(PROCESSES[1:], others, strict=True):
            apart = differences(weights, alone)
            if case.dtype == "bf16":
                apart["weights, of their change"] = moved_apart(weights, alone)
            yield {"what": case.name, "processes": processes, **apart}


def memory(processes: int, kind: str) -> dict[str, Any]:
    """Memory of a process that starts a sharded run by growing, beyond its own parts."""
    command = [sys.executable, "-m", "bench.distributed.start_memory", str(processes), kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout.splitlines()[-1])
    return {"what": f"memory of a start by growing, {kind}", "processes": processes, **facts}


def main() -> int:
    parser_of(__doc__).parse_args()
    facts = machine()
    rows = itertools.chain(parity(facts["sources"]), (memory(2, kind) for kind in KINDS))
    measure_all("distributed", rows, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
