"""Loads grown directories in software that does not share code with growkern, and compares them.

    python -m bench.outside --packages DIR [--runtime NAME ...] [--save]

A DIR holds the packages of some runtimes, which growkern does not need. Without `--runtime` these
are transformers 4.57, ctranslate2 and onnxruntime. A DIR of its own have any other version of
transformers, and the runtimes that need transformers 5:

    pip install --target DIR "transformers==4.57.*" ctranslate2 onnx onnxscript onnxruntime
    pip install --target DIR --no-deps mlx mlx-cpu mlx-lm
    pip install --target DIR --no-deps torchtitan spmd_types tyro docstring_parser typeguard \\
        torch_checkpointing torchdata einops

llama-cpp-python compiles llama.cpp; its converter is in the source archive, as the nightly workflow
takes it from there.

A tiny source of each family is grown in several ways. A process that sees the packages of DIR
loads source and targets in each runtime, and compares the targets' outputs with the source's there.
The row of a source compares it with the transformers that growkern uses. Exit 1 if a target
differs, if a runtime that loads the source refuses a target, or if a runtime loads nothing at all.
`--save` puts the rows into `bench/results/outside.json`, from which `bench.report` makes a table.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.outside.models import EXPECTED, FAMILIES, FURTHER, GROWTHS, make
from bench.outside.runtimes import PACKAGES, RUNTIMES
from bench.shared.harness import parser_of
from bench.shared.results import RESULTS, machine, read as read_result, write
from bench.shared.tables import is_alike

TOGETHER = ("transformers", "ctranslate2", "onnxruntime")
# Differences that the plan names: there they do not divide the weights of experts by their sum
SAID = {("qwen2", "experts", "mlx"), ("qwen2", "experts", "llama.cpp")}


def read(place: Path, runtimes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What each runtime makes of each directory: `off` by the largest output, or `why` not."""
    for family in sorted(place.iterdir()):
        made = [growth for growth in GROWTHS if (family / growth).is_dir()]
        for runtime in runtimes:
            expected = torch.load(family / EXPECTED)
            for growth in ("source", *made):
                try:
                    outputs = RUNTIMES[runtime](family / growth)
                    off = (outputs - expected).abs().max() / expected.abs().max()
                    yield _row(family.name, growth, runtime, off=off.item())
                except Exception as error:
                    yield _row(family.name, growth, runtime, why=_line(error))
                    if growth == "source":
                        break
                else:
                    # a runtime may compute something else of the source: targets must do the same
                    expected = outputs if growth == "source" else expected


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:120]


def _row(family: str, growth: str, runtime: str, **more: Any) -> dict[str, Any]:
    package = PACKAGES.get(runtime, runtime)
    version = importlib.metadata.version(package)
    return {"family": family, "growth": growth, "runtime": runtime, "version": version, **more}


def failures(rows: list[dict[str, Any]], runtimes: Sequence[str]) -> list[str]:
    """What is wrong with the rows, one sentence each.

    A runtime may lack a family altogether, also that of the mixture which a dense model became.
    """
    wrong = [
        f"{row['family']}, {row['growth']}, {row['runtime']}: {row.get('why') or row['off']}"
        for row in rows
        if not is_alike(row) and row["growth"] != "source"
        if (row["family"], row["growth"], row["runtime"]) not in SAID
        if "off" in row or row["growth"] != "experts"
    ]
    loaded = {row["runtime"] for row in rows if "off" in row}
    return wrong + [f"{name} loaded nothing" for name in runtimes if name not in loaded]


def _table_line(row: dict[str, Any]) -> str:
    seen = f"{row['off']:.1e}" if "off" in row else f"refused: {row['why']}"
    return f"| {row['family']} | {row['growth']} | {row['runtime']} | {seen} |"


def save(rows: list[dict[str, Any]], path: Path = RESULTS / "outside.json") -> None:
    """Put rows in the place of those of a family in the same runtime and major version."""

    def column(row: dict[str, Any]) -> tuple[str, ...]:
        return row["runtime"], row["version"].split(".")[0], row["family"]

    new = {column(row) for row in rows}
    kept = [row for row in read_result(path).get("rows", []) if column(row) not in new]
    order = [*RUNTIMES]
    every = sorted([*kept, *rows], key=lambda row: (order.index(row["runtime"]), row["version"]))
    write(path, {"op": "outside", "status": "ok", "machine": machine(), "rows": every})


def main() -> None:
    every, parser = [*FAMILIES, *FURTHER], parser_of(__doc__)
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--runtime", nargs="+", choices=[*RUNTIMES], default=[*TOGETHER])
    parser.add_argument("--family", nargs="+", choices=every, help="these alone")
    parser.add_argument("--save", action="store_true", help="save the rows for the table")
    given = parser.parse_args()
    if given.read is not None:
        for row in read(given.read, given.runtime):
            print("ROW", json.dumps(row), flush=True)
        return
    rows = []
    with tempfile.TemporaryDirectory() as place:
        make(Path(place), given.family or every)
        command = [sys.executable, "-m", "bench.outside", "--packages", str(given.packages)]
        with subprocess.Popen(
            [*command, "--runtime", *given.runtime, "--read", place],
            env={**os.environ, "PYTHONPATH": str(given.packages.resolve())},
            stdout=subprocess.PIPE,
            text=True,
        ) as reader:
            for line in reader.stdout or ():
                if line.startswith("ROW "):
                    rows.append(json.loads(line.removeprefix("ROW ")))
                    print(_table_line(rows[-1]), flush=True)
        if reader.returncode:
            sys.exit(f"the process that loads the directories ended with {reader.returncode}")
    wrong = failures(rows, given.runtime)
    if given.save and not wrong:
        save(rows)
    print("\n".join(["", *wrong]) if wrong else "all agree")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
