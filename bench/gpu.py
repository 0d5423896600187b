"""Checks and measures every kernel on a GPU, from a bare source tree.

The work is split into pieces. Each piece is a process with a time limit. A piece that is done for
these sources on this GPU does not run again. Results are saved as runs/gpu/<gpu>/<piece>.json.
`python -m bench.report --take runs/gpu` brings them into bench/results, and makes tables and
pictures of them.

    python -m bench.gpu --list
    python -m bench.gpu --budget 540            # seconds in all; pieces cut short run again later
    python -m bench.gpu --only check_expand --only bench_expand      # in this order
    python -m bench.gpu --dry-run               # without a GPU: toy sizes, minutes of one core

Exit codes:

- 0: everything that ran is right
- 1: a check failed, a piece did not finish, nothing ran, or the last results could not be packed
- 2: it cannot start: a wrong argument, no GPU, a missing package, or no place for the results
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.launches import fill
from bench.on_gpu.pieces import PIECES, Piece, chosen
from bench.on_gpu.processes import (
    RUNNING,
    die_with_writer,
    gather,
    pack,
    packed,
    run_apart,
    run_here,
)
from bench.shared import results
from bench.shared.harness import parser_of

MARKS = {"ok": "[green]ok[/]", "skipped": "[yellow]skipped[/]", "done": "[dim]done before[/]"}
LOG_LINES = 12
# a dry run interprets and emulates kernels, on cores that others may use
DRY_LIMITS = 10


class CannotStart(Exception):
    """Why nothing can run here, in one line."""


# ------------------------------------------------------------------ all pieces


def environment(args: argparse.Namespace, scratch: Path) -> dict[str, str]:
    """The environment variables of the pieces."""
    # what one piece compiles, the others find
    env = {**fill.cache_variables(results.GPU_RUNS / "cache"), **os.environ}
    env |= {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    # With interpreted kernels a GPU would be neither checked nor measured.
    env |= {"TRITON_INTERPRET": "0", "TOKENIZERS_PARALLELISM": "false"}
    if args.commit:
        env["GROWKERN_COMMIT"] = args.commit
    if args.dry_run:
        env |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    if args.wheels:
        site = unpack_wheels(args.wheels, scratch / "site")
        env["PYTHONPATH"] = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    return env


def unpack_wheels(wheels: Path, site: Path) -> Path:
    """Unpack wheels, because Triton needs the source files of kernels and cannot read a zip."""
    for wheel in sorted(wheels.glob("*.whl")):
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
        except (OSError, zipfile.BadZipFile) as error:
            raise CannotStart(f"{wheel} is no wheel that can be unpacked: {error}") from error
    return site


def facts_of_this_machine(env: dict[str, str]) -> dict[str, Any]:
    """The machine's facts, from a child. This process never uses the GPU, so none can break it."""
    code = "import json; from bench.shared.results import machine; print(json.dumps(machine()))"
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, cwd=results.ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        # the last line of a traceback says which package is missing or broken
        why = (done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1]
        raise CannotStart(f"Python cannot read the facts of this machine: {why}")
    facts = json.loads(done.stdout.splitlines()[-1])
    if missing := [name for name in ("triton", "transformers") if not facts.get(name)]:
        raise CannotStart(f"{missing[0]} is not installed. Every piece needs it.")
    return facts


def prepare(running: Path, where: Path, archive: Path | None) -> None:
    """Save what a killed run left and pack once: nothing runs where that is impossible."""
    try:
        running.mkdir(parents=True, exist_ok=True)
        gather(running, where)
        if archive:
            pack(where, archive)
    except OSError as error:
        raise CannotStart(f"the results cannot be written: {error}") from error


def run_all(args: argparse.Namespace, scratch: Path, console: Console) -> int:
    """Run the chosen pieces and save their results: the exit code."""
    end, pieces = time.perf_counter() + args.budget, chosen(args.only)
    env = environment(args, scratch)
    facts = facts_of_this_machine(env)
    if "gpu" not in facts and not args.dry_run:
        raise CannotStart("PyTorch finds no GPU. --dry-run runs the same code on the CPU.")
    where = args.results or results.GPU_RUNS / (results.slug(facts) or "dry-run")
    if args.dry_run:
        # forks take their environment from this process
        os.environ.update(env)
    console.print("  ".join(f"{key} {value}" for key, value in facts.items()), style="dim")
    # Pieces write here while they run. It lies beside the results, so that a kill loses no rows.
    running = where / RUNNING
    prepare(running, where, args.archive)

    def run_piece(piece: Piece) -> dict[str, Any]:
        kept = where / f"{piece.name}.json"
        if not args.again and results.is_done(kept, facts):
            return {"status": "done"}
        left = end - time.perf_counter()
        limit_s = piece.limit_s * (DRY_LIMITS if args.dry_run else 1)
        if left < min(limit_s, args.shortest):
            return {
                "status": "skipped",
                "reason": f"only {max(left, 0):.0f} s of the budget are left",
            }
        return run_apart(
            piece,
            running / kept.name,
            env=env,
            toy=args.dry_run,
            limit_s=min(limit_s, left),
            console=console if args.jobs == 1 else None,
            forked=args.dry_run,
        )

    failed, statuses, cpu_seconds = [], set(), 0.0
    with packed(where, args.archive, console) as again, ThreadPoolExecutor(args.jobs) as pool:
        for piece, document in zip(pieces, pool.map(run_piece, pieces), strict=True):
            try:
                _report(piece, document, where / f"{piece.name}.json", console)
                (running / f"{piece.name}.json").unlink(missing_ok=True)
            except OSError as error:
                # what the piece wrote remains in `running`, for the archive and the next run
                document["status"] = f"not saved: {' '.join(str(error).split())}"
                console.print(f"{piece.name} {document['status']}", markup=False, soft_wrap=True)
            again()
            statuses.add(document["status"])
            cpu_seconds += document.get("CPU seconds", 0.0)
            if document["status"] not in MARKS:
                failed.append(piece.name)
    console.print(f"{cpu_seconds:.0f} s of CPU time", style="dim")
    is_packed = again()
    if args.archive and is_packed:
        console.print(f"{args.archive}: {args.archive.stat().st_size} bytes", style="dim")
    if failed:
        console.print(f"[red]{len(failed)} failed:[/] {', '.join(failed)}")
    if nothing_ran := statuses == {"skipped"}:
        console.print("[red]nothing ran[/]")
    return int(bool(failed) or nothing_ran or not is_packed)


def _report(piece: Piece, document: dict[str, Any], path: Path, console: Console) -> None:
    status = document["status"]
    line = f"{MARKS.get(status, f'[red]{status}[/]')} {piece.name}"
    # a piece that did not run has no document to save
    kept = results.keep(path, document) if "rows" in document else path
    if "rows" not in document or status == "skipped":
        console.print(f"{line}  {document.get('reason', '')}")
        return
    line += f": {document['seconds']:.0f} s, {len(document['rows'])} rows"
    console.print(f"{line}  see {kept.name}" if kept != path else line)
    for failure in document["failures"][:10]:
        console.print(f"    {failure}", markup=False, highlight=False)
    for text in document.get("log", [])[-LOG_LINES:]:
        console.print(f"    | {text}", markup=False, highlight=False, style="dim")


def positive(text: str) -> float:
    """A positive number, as an argument."""
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def wheels_in(text: str) -> Path:
    """A directory of wheels, as an argument."""
    if not any(path.is_file() for path in Path(text).glob("*.whl")):
        raise argparse.ArgumentTypeError(f"{text} holds no *.whl")
    return Path(text)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("--list", action="store_true", help="list the pieces and stop")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        choices=[piece.name for piece in PIECES],
        help="run this piece; may be repeated",
    )
    parser.add_argument("--dry-run", action="store_true", help="run on the CPU at toy sizes")
    parser.add_argument("--again", action="store_true", help="also run pieces that are done")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        choices=range(1, 257),
        metavar="N",
        help="pieces at a time; more than 1 disturbs the timings",
    )
    parser.add_argument("--budget", type=positive, default=7200.0, help="seconds for all pieces")
    parser.add_argument(
        "--shortest", type=positive, default=15.0, help="start no piece with fewer seconds left"
    )
    parser.add_argument(
        "--archive", type=Path, help="file to pack the results into, again and again"
    )
    parser.add_argument("--wheels", type=wheels_in, help="directory of wheels for the pieces")
    parser.add_argument("--results", type=Path, help="directory to write (default: runs/gpu/<gpu>)")
    parser.add_argument("--commit", help="commit of these sources, if there is no git")
    # this command starts itself with these options to run one piece
    parser.add_argument("--here", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--document", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--toy", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=math.inf, help=argparse.SUPPRESS)
    parser.add_argument("--alive", type=int, metavar="FD", help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if args.here:
        if args.alive is not None:
            die_with_writer(args.alive)
        (piece,) = chosen([args.here])
        status = run_here(piece, args.document, toy=args.toy, limit_s=args.limit)
        return int(status not in ("ok", "skipped"))
    if args.list:
        for piece in PIECES:
            console.print(f"{piece.name:<26}{piece.limit_s:>4} s  {piece.about}", highlight=False)
        return 0
    try:
        with tempfile.TemporaryDirectory(prefix="growkern-gpu-") as scratch:
            return run_all(args, Path(scratch), console)
    except CannotStart as reason:
        console.print(str(reason), markup=False, highlight=False, soft_wrap=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
