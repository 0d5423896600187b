"""Compares training on 1, 2 and 4 processes, and measures the memory of a start by growing.

    python -m bench.distributed

The processes are CPU processes that talk through gloo. Each case trains a tiny model through both
stages. The table holds the largest differences from a single process that trains the whole model:
of losses, of other logged numbers, and of weights. No speed is measured.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.shared.harness import Rows, machine, show_and_save
from tests.forked_ranks import on_ranks
from tests.train.distributed.parity import Case, differences, found_in

FAMILIES = ("bert", "gpt2", "llama", "t5")
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"accumulation": 2},
    {"checkpointing": True},
    {"teacher": "sharded"},
    {"accumulation": 2, "checkpointing": True, "teacher": "sharded"},
)
PROCESSES = (2, 4)


def cases() -> list[Case]:
    """All families with every variant in two dtypes, and once in bfloat16."""
    found = [
        Case(family, dtype, **variant)
        for family in FAMILIES
        for dtype in ("float64", "float32")
        for variant in VARIANTS
    ]
    # the loop of T5 has no autocast to compare with
    return found + [Case(family, "bf16", teacher="sharded") for family in FAMILIES[:3]]


def parity(family: str) -> Iterator[dict[str, Any]]:
    """The differences of the cases of a family between several processes and one."""
    chosen = [case for case in cases() if case.family == family]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = [found_in(folder / f"{number}", case) for number, case in enumerate(chosen)]
        for processes in PROCESSES:
            ours = folder / f"on{processes}"
            ours.mkdir()
            (ours / "cases.json").write_text(json.dumps([dataclasses.asdict(c) for c in chosen]))
            on_ranks(processes, "tests.train.distributed.parity", ours)
            for number, case in enumerate(chosen):
                found = torch.load(ours / f"{number}.pt", weights_only=True)
                apart = differences(found, alone[number])
                yield {"what": case.name, "processes": processes, **apart}


def memory(processes: int) -> dict[str, Any]:
    """Memory of a process that starts a sharded run by growing, beyond its own parts."""
    command = [sys.executable, "-m", "bench.distributed.start_memory", str(processes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout.splitlines()[-1])
    return {"what": "memory of a start by growing", "processes": processes, **facts}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", choices=("all", "parity", "memory"), default="all")
    part = parser.parse_args().part
    facts, rows = machine(), Rows()
    for family in FAMILIES if part in ("all", "parity") else ():
        for row in parity(family):
            rows.append(row)
    if part in ("all", "memory"):
        rows.append(memory(2))
    print(show_and_save("distributed", facts, rows) if part == "all" else rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
