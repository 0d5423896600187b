"""Compiles every launch of the public ops without using a GPU, with one process per core.

    python -m bench.launches.fill DIRECTORY

Triton's own launcher specialises every kernel for its arguments, as it would on a GPU. As a piece
of `bench.gpu` this fills the cache of all other pieces. By hand it fills a cache in DIRECTORY,
beside launches.json with one row per call: its launches, or why it failed. The exit code is 1 if
one failed.
"""

import itertools
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.shared import results
from bench.shared.harness import parser_of
from bench.shared.recorder import Recorder, Skip

ROWS = "launches.json"


def cache_variables(directory: Path) -> dict[str, str]:
    """Environment variables that make Triton and growkern keep machine code in the directory."""
    directory = directory.resolve()
    return {"TRITON_CACHE_DIR": str(directory / "triton"), "XDG_CACHE_HOME": str(directory)}


def _of_the_loss(launches: list[Any]) -> list[tuple[int, float, str, str]]:
    """Number of teachers, temperature, and dtypes of logits and gradient, of the row kernel."""
    kinds_of = set()
    for _, source, _ in launches:
        kinds, place = source.signature, source.fn.arg_names.index
        if {"logit_ptrs", "dstudent_ptr"} <= kinds.keys():
            temperature = 1 / source.constants[(place("MATHS"),)][0]
            logits = kinds["logit_ptrs"]
            kinds_of.add((len(logits) - 1, temperature, logits[0], kinds["dstudent_ptr"]))
    return sorted(kinds_of)


def _compile_some(arch: str, only: str, first: int, step: int) -> list[dict[str, Any]]:
    """Every step-th case from the first one on, of those whose name `only` matches."""
    from bench.launches.cases import all_cases, once
    from bench.launches.driver import absent_gpu
    from bench.launches.sources import all_cases as listed_cases, is_same, source_of

    torch.set_num_threads(1)
    tables = [(case, source_of(case)) for case in listed_cases()]
    rows = []
    with absent_gpu(arch) as launches:
        every = itertools.chain(all_cases("cpu"), once(torch.Generator().manual_seed(0)))
        named = (case for case in every if re.search(only, case.name))
        for number, case in enumerate(named):
            if number % step != first:
                continue
            row: dict[str, Any] = {"case": case.name}
            start, before = time.perf_counter(), len(launches)
            try:
                case.run("triton")
            except Exception as error:
                why = error.__cause__ or error
                row["why not"] = f"{type(error).__name__}: {why}"[-1000:]
            made = launches[before:]
            row["kernels"] = sorted({launch.kernel.__name__ for launch in made})
            row["shared bytes"] = max((launch.metadata.shared for launch in made), default=0)
            row["of the loss"] = _of_the_loss(made)
            row["in table"] = sorted(
                {of.name for of, s in tables for x in made if is_same(of, s, x.source, x.metadata)}
            )
            rows.append(row | {"launches": len(made), "seconds": time.perf_counter() - start})
    return rows


def compile_cuda(arch: str) -> int:
    """Compile the CUDA kernels of real sizes into growkern's own cache: how many there are."""
    from bench.shared.cuda_cases import cuda_cases
    from growkern.ops.backend import nvrtc

    if nvrtc.nvrtc() is None or not arch.startswith("sm_"):
        return 0
    kernels = {case.kernel for case in cuda_cases(arch)}
    # a compiler in the same process, which does not hold Python's lock
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda kernel: nvrtc.cached_cubin(kernel, arch), kernels))
    return len(kernels)


def in_processes(compile_some: Callable[..., Any], *args: Any) -> Iterator[Any]:
    """Compile a part of all in each process, into the caches that the environment names.

    Args:
        compile_some: takes `args` without the last, the first number of its part, and the step.
        args: its first arguments, then the number of processes.
    """
    *args, jobs = args
    # neither interpreted nor on the GPU: each process would take some of its memory
    without = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    without["CUDA_VISIBLE_DEVICES"] = ""
    context = multiprocessing.get_context("spawn")
    with (
        mock.patch.dict(os.environ, without, clear=True),
        ProcessPoolExecutor(jobs, mp_context=context) as pool,
    ):
        parts = [pool.submit(compile_some, *args, first, jobs) for first in range(jobs)]
        for part in as_completed(parts):
            yield part.result()


def fill(arch: str, only: str, jobs: int) -> Iterator[dict[str, Any]]:
    """Compile all cases: one row per case."""
    for rows in in_processes(_compile_some, arch, only, jobs):
        yield from rows


def run(recorder: Recorder) -> None:
    """As a piece of `bench.gpu`: compile for this GPU, into the cache of all pieces."""
    from bench.launches.driver import count_launchers
    from bench.launches.sources import TARGETS

    capability = torch.cuda.get_device_capability() if recorder.device == "cuda" else (9, 0)
    arch = "sm_{}{}".format(*capability)
    if arch not in TARGETS or torch.version.hip:
        raise Skip(
            f"compiles for {', '.join(TARGETS)}; here kernels compile when they are launched"
        )
    for row in fill(arch, *recorder.pick(("", os.cpu_count() or 1), ("adamw_step 30522", 1))):
        recorder.add(row)
        if "why not" in row:
            recorder.fail(f"{row['case']}: {row['why not']}")
    recorder.add({"case": "Triton's launchers in C", "compiled": count_launchers()})
    recorder.add({"case": "CUDA C++", "compiled": 0 if recorder.toy else compile_cuda(arch)})


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("directory", type=Path, help="directory of the cache")
    parser.add_argument("--arch", default="sm_90", help="architecture (default: sm_90)")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases with such a name")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    args = parser.parse_args(argv)
    os.environ.update(cache_variables(args.directory))
    rows = sorted(fill(args.arch, args.only, args.jobs), key=lambda row: -row["seconds"])
    failed = [row for row in rows if "why not" in row]
    for row in failed:
        print(f"{row['case']}: {row['why not']}")
    cuda = 0 if args.only else compile_cuda(args.arch)
    launches = sum(row["launches"] for row in rows)
    print(f"{len(rows)} calls, {launches} launches, {len(failed)} failed; {cuda} CUDA kernels")
    document = {"arch": args.arch, "rows": rows, "CUDA kernels": cuda}
    results.write(args.directory / ROWS, document)
    return int(bool(failed) or not rows)


if __name__ == "__main__":
    sys.exit(main())
