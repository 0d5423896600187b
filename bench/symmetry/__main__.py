"""How should growth tell copies apart? A study with small models on real text.

    python -m bench.symmetry run              make all runs, in the order of their importance
    python -m bench.symmetry run --most 10    make at most ten more
    python -m bench.symmetry report           print the tables
    python -m bench.symmetry report --save    also write the rows to bench/results
    python -m bench.symmetry moments          compare grown moments with the model's own

Byte-level GPT-2, Llama and BERT models are trained on Python's standard library, grown to twice
their width and trained further. Every run is one line of JSON in the output folder, written as soon
as the run ends. Start the command again after an interruption, and it resumes with the next run.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench.shared.results import RESULTS, append_row, read_rows, write
from bench.shared.symmetry_tables import report
from bench.symmetry.moments import compare
from bench.symmetry.plan import MASKED, SMALL, key_of, planned
from bench.symmetry.runs import carried_out

FOLDER = Path("runs/symmetry")


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def run_all(folder: Path, most: int | None) -> None:
    file = folder / "runs.jsonl"
    rows = read_rows(file, key_of)
    made = 0
    for run in planned(rows):
        key = key_of(run.settings())
        if key in rows:
            continue
        if most is not None and made >= most:
            return
        row = carried_out(run, folder / "sources", say)
        append_row(file, row)
        rows[key], made = row, made + 1
        last = list(row["losses"].items())[-1]
        say(f"{key}: loss {last[1]:.4f} at step {last[0]}, {row['seconds']:.0f} s")


def save(rows: list[dict[str, Any]]) -> None:
    """Write the rows to bench/results. Facts that many rows share stand there once."""
    shared, lean = list[dict[str, Any]](), []
    for row in rows:
        facts = {key: row[key] for key in ("machine", "text")}
        if facts not in shared:
            shared.append(facts)
        own = {key: value for key, value in row.items() if key not in facts}
        lean.append({**own, "facts": shared.index(facts)})
    document = {"op": "symmetry", "status": "ok", "facts": shared, "rows": lean}
    write(RESULTS / "symmetry.json", document)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "report", "moments"))
    parser.add_argument("--dir", type=Path, default=FOLDER, help="output (default: %(default)s)")
    parser.add_argument("--most", type=int, help="the most runs to make now")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="report: write to bench/results")
    args = parser.parse_args()
    if args.what == "report":
        rows = list(read_rows(args.dir / "runs.jsonl", key_of).values())
        print(report(rows))
        if args.save:
            save(rows)
        return 0
    torch.set_num_threads(args.threads)
    if args.what == "moments":
        for model in (*SMALL, MASKED[0]):
            print(compare(model, args.dir / "sources", say))
        return 0
    run_all(args.dir, args.most)
    return 0


if __name__ == "__main__":
    sys.exit(main())
