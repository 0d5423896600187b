"""The tables of the papers, at sizes that anyone can run.

    python -m bench.paper table5 --size tiny --seeds 1     train all systems, print the table
    python -m bench.paper report                           print the tables of all runs so far
    python -m bench.paper report --save                    also write them to bench/results

Tables: table2 (BERT) and table5 (GPT-2) compare all systems. Every run is a run file of `growkern
train` in the output folder. Start the command again after an interruption: runs that are done are
not repeated, and the one that was interrupted resumes from its last checkpoint.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from bench.paper.corpus import prepare
from bench.paper.runs import Workplace, best_rate, rows_of
from bench.paper.settings import SETTINGS, Setting
from bench.paper.systems import RATE_SEED, SYSTEMS, job_of
from bench.paper.tables import report
from bench.shared.results import RESULTS, write
from growkern.cli.app import silence_transformers

FOLDER = Path("runs/paper")
TABLES = {"table2": "bert", "table5": "gpt2"}
SEEDS = (1, 2, 3, 4, 5)


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def compare(place: Workplace, setting: Setting, seeds: int, systems: list[str]) -> None:
    """Choose a rate for each system on a seed of its own, then train it on the others."""
    rates = {}
    for system in systems:
        jobs = [
            job_of(setting, system, RATE_SEED, rate, setting.rate_steps) for rate in setting.rates
        ]
        rates[system] = best_rate([place.row(job) for job in jobs])
        say(f"{setting.name}, {SYSTEMS[system].title}: learning rate {rates[system]:g}")
    for seed in SEEDS[:seeds]:
        for system in systems:
            place.row(job_of(setting, system, seed, rates[system], setting.steps))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.paper",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("table", choices=[*TABLES, "report"])
    parser.add_argument("--size", choices=("micro", "tiny", "small", "base"), default="tiny")
    parser.add_argument("--seeds", type=int, default=3, choices=range(1, len(SEEDS) + 1))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--text", nargs="+", default=[], help="text files in place of Python's")
    parser.add_argument("--dir", type=Path, default=FOLDER, help=f"default: {FOLDER}")
    parser.add_argument("--save", action="store_true", help="write to bench/results")
    options = parser.parse_args()
    silence_transformers()
    if options.table != "report":
        setting = SETTINGS.get((options.size, TABLES[options.table]))
        if setting is None:
            parser.error(f"{options.table} has no size {options.size!r}")
        facts = prepare(options.dir, setting, options.text)
        place = Workplace(options.dir, facts, say)
        compare(place, setting, options.seeds, options.systems)
    rows = list(rows_of(options.dir).values())
    if options.save:
        write(RESULTS / "paper.json", {"op": "paper", "status": "ok", "rows": rows})
    print(report(rows))


if __name__ == "__main__":
    main()
