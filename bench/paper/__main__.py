"""The tables of the papers, at sizes that anyone can run.

    python -m bench.paper table5 --size tiny --seeds 1     train all systems, print the table
    python -m bench.paper report                           print the tables of all runs so far
    python -m bench.paper report --save                    also merge them into bench/results
    python -m bench.paper maps --save                      draw attention before and after training

Every run is a run file of `growkern train` in the output folder. Tables share runs. Start the
command again after an interruption: runs that are done are not repeated, and the one that was
interrupted resumes from its last checkpoint. Without runs in the output folder, `report` prints the
tables of bench/results/paper.json. Tables:

"""

from __future__ import annotations

import argparse
import difflib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.paper.compare import UNSAVED, best_rate, merged, of_text, save
from bench.paper.corpus import files_of, prepare
from bench.paper.jobs import Job
from bench.paper.page import report, write_page
from bench.paper.pictures import draw_maps
from bench.paper.plans import TABLES, Line, jobs_of_rates, jobs_of_seed, lines_of
from bench.paper.runs import Workplace, rows_of, take_over
from bench.paper.settings import SIZES
from bench.paper.systems import SYSTEMS
from bench.shared.results import RESULTS, read
from growkern.cli.app import silence_transformers
from growkern.cli.main import one_line
from growkern.errors import GrowthError

FOLDER = Path("runs/paper")
SEEDS = (1, 2, 3, 4, 5)
USUAL_SEEDS = 3


def say(text: str) -> None:
    """Show a line of progress."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def compare(place: Workplace, lines: Sequence[Line], seeds: int) -> list[Job]:
    """Choose a rate for each line on a seed of its own, then train it on the others.

    Returns:
        The longest run of each line and seed.
    """
    tried = {line: jobs_of_rates(line) for line in lines}
    place.make([job for jobs in tried.values() for job in jobs])
    runs = []
    for line in lines:
        rate = line.rate or best_rate(place.make(tried[line]))
        say(f"{line.setting.name}, {SYSTEMS[line.system].title}: learning rate {rate:g}")
        runs += [jobs_of_seed(line, seed, rate) for seed in SEEDS[:seeds]]
    place.make(
        [job for of_seed in sorted(runs, key=lambda of_seed: of_seed[0].seed) for job in of_seed]
    )
    return [of_seed[-1] for of_seed in runs]


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a call."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.paper",
        description=__doc__ + "\n".join(f"    {k:12} {table.title}" for k, table in TABLES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("table", choices=[*TABLES, "report", "maps"])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument(
        "--seeds",
        type=int,
        choices=range(len(SEEDS) + 1),
        help=f"default: {USUAL_SEEDS}; 0: only the runs that choose learning rates",
    )
    parser.add_argument(
        "--systems",
        nargs="+",
        metavar="SYSTEM",
        help="some of the table's systems, such as fpi (default: all)",
    )
    parser.add_argument(
        "--row",
        metavar="NAME",
        help="train only the run of this name, as bench/results/paper.json has it, and print its "
        "loss beside the one there",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=1 if torch.cuda.is_available() else max(1, torch.get_num_threads()),
        help="runs at a time (default: 1 on a GPU, else one per core)",
    )
    parser.add_argument("--text", nargs="+", default=[], help="text files in place of Python's")
    parser.add_argument("--domain", nargs="+", default=[], help="the same in place of C++ headers")
    parser.add_argument("--dir", type=Path, default=FOLDER, help=f"default: {FOLDER}")
    parser.add_argument(
        "--known",
        action="store_true",
        help="take over the runs in bench/results/paper.json with their accuracies, and train only "
        "the others",
    )
    parser.add_argument(
        "--save", action="store_true", help="merge the runs into bench/results/paper.json"
    )
    options = parser.parse_args(arguments)
    _check(options, parser)
    return options


def _check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """End a call with a message if its options contradict each other."""
    if options.save and options.size == UNSAVED:
        parser.error(f"--save: runs of size {UNSAVED!r} are for tests and are never saved")
    if options.workers < 1:
        parser.error(f"--workers {options.workers}: at least one run at a time")
    if options.dir.exists() and not options.dir.is_dir():
        parser.error(f"--dir {options.dir}: this is no folder")
    if options.table in TABLES:
        _check_table(options, parser)
    elif (
        options.systems
        or options.text
        or options.domain
        or options.row
        or options.seeds is not None
    ):
        parser.error(
            f"{options.table} shows the runs that are there: it takes no --systems, --seeds, "
            "--row, --text or --domain"
        )


def _check_table(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """End a call with a message if its table has no such systems."""
    own = list(dict.fromkeys(line.system for line in lines_of(options.table, options.size)))
    for name in options.systems or ():
        if name not in own:
            parser.error(f"{name}: no system of {options.table}. It has: {', '.join(own)}")


def train_table(options: argparse.Namespace) -> None:
    """Train the runs of a table that are not done yet."""
    named = {"corpus": files_of(options.text), "domain": files_of(options.domain)}
    lines = lines_of(options.table, options.size)
    wanted = named_job(lines, options.row) if options.row else None
    facts = prepare(options.dir, lines[0].setting, named)
    if options.known or options.save:
        known = of_text(RESULTS, facts, options.size)
        take_over(options.dir, known if options.known else ())
    place = Workplace(options.dir, facts, say, options.workers)
    if wanted:
        repeat(place, wanted)
        return
    chosen = [line for line in lines if line.system in (options.systems or SYSTEMS)]
    longest = compare(place, chosen, USUAL_SEEDS if options.seeds is None else options.seeds)
    if TABLES[options.table].classifies:
        # a known run has no model here, and to train it again takes hours
        place.classify([job for job in longest if not options.known or place.has_model(job.name)])


def named_job(lines: Sequence[Line], name: str) -> Job:
    """The run of a table with this name."""
    jobs = [job for line in lines for job in jobs_of_rates(line)]
    for line in lines:
        rates = {line.rate or 0.0, *line.setting.rates, *(line.like or line).setting.rates} - {0.0}
        jobs += [job for seed in SEEDS for rate in rates for job in jobs_of_seed(line, seed, rate)]
    by_name = {job.name: job for job in jobs}
    if name not in by_name:
        near = difflib.get_close_matches(name, by_name, n=1, cutoff=0)
        raise GrowthError(f"--row {name}: no run of this table. The nearest is {near[0]}")
    return by_name[name]


def repeat(place: Workplace, job: Job) -> None:
    """Train a run, and what it needs before, and print its loss beside the committed one."""
    (row,) = place.make([job])
    known = {run["name"]: run for run in read(RESULTS / "paper.json").get("rows", ())}
    print(f"{job.name}: loss {row['losses'][-1]:.4f}, {row['flops'][-1]:.4g} FLOPs")
    if job.name in known:
        print(f"in bench/results/paper.json: loss {known[job.name]['losses'][-1]:.4f}")


def run(options: argparse.Namespace) -> None:
    """Do what a call asks for, and print its tables or the names of its pictures."""
    if options.table == "maps":
        out = RESULTS if options.save else options.dir
        pictures = draw_maps(options.dir, rows_of(options.dir), options.size, out)
        if not pictures:
            raise GrowthError(
                f"{options.dir} has no trained models of size {options.size!r} to draw: train a "
                "table first, such as table2"
            )
        print(*pictures, sep="\n")
        return
    if options.table != "report":
        train_table(options)
    if options.row:
        return
    rows = rows_of(options.dir)
    if options.save:
        save(RESULTS, rows.values())
        write_page(RESULTS)
    if options.table == "report" and (options.known or not rows):
        rows = merged(RESULTS, rows.values())
    text = report(rows.values())
    print(text)
    if not text:
        say("no table has two lines yet: train its first system and another one")


def main() -> None:
    """Run a call. Errors that the user can correct become one line and exit code 2."""
    options = options_of()
    silence_transformers()
    try:
        run(options)
    except GrowthError as error:
        print(one_line(error), file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
