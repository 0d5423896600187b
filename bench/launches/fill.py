"""Compiles every launch of the public ops without a GPU, into a cache that can be carried to one.

    python -m bench.launches.fill DIRECTORY
    python -m bench.gpu --cache DIRECTORY          # on the GPU machine

Triton's own launcher specialises every kernel for its arguments, as it would on a GPU. The machine
code is the same if the versions of Triton, and for CUDA C++ of NVRTC, are the same. The directory
then holds launches.json, with one row per call: its launches, or why it failed. The exit code is 1
if one failed.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from bench.shared import results

ROWS = "launches.json"


def cache_variables(directory: Path) -> dict[str, str]:
    """Environment variables that make Triton and growkern keep machine code in the directory."""
    directory = directory.resolve()
    return {"TRITON_CACHE_DIR": str(directory / "triton"), "XDG_CACHE_HOME": str(directory)}


def settle(directory: Path) -> int:
    """Make a cache that was moved here usable: Triton notes absolute paths in its groups of files.

    Returns:
        The number of groups.
    """
    groups = list((directory.resolve() / "triton").glob("*/__grp__*.json"))
    for path in groups:
        group = json.loads(path.read_text())
        group["child_paths"] = {name: str(path.parent / name) for name in group["child_paths"]}
        path.write_text(json.dumps(group))
    return len(groups)


def _of_the_loss(launches: list[Any]) -> list[tuple[int, float, str, str]]:
    """Number of teachers, temperature, and dtypes of logits and gradient, of the row kernel."""
    found = set()
    for _, source, _ in launches:
        kinds, place = source.signature, source.fn.arg_names.index
        if "logit_ptrs" in kinds:
            temperature = 1 / source.constants[(place("MATHS"),)][0]
            logits = kinds["logit_ptrs"]
            found.add((len(logits) - 1, temperature, logits[0], kinds["dstudent_ptr"]))
    return sorted(found)


def _compile_some(arch: str, only: str, first: int, step: int) -> list[dict[str, Any]]:
    """Every step-th case from the first one on, of those whose name contains `only`."""
    import torch

    from bench.launches.cases import all_cases
    from bench.launches.driver import absent_gpu
    from bench.launches.sources import all_cases as listed_cases
    from bench.launches.sources import is_same, source_of

    torch.set_num_threads(1)
    tables = [(case, source_of(case)) for case in listed_cases()]
    rows = []
    with absent_gpu(arch) as launches:
        named = (case for case in all_cases("cpu") if only in case.name)
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
    for kernel in kernels:
        nvrtc.cached_cubin(kernel, arch)
    return len(kernels)


def fill(directory: Path, arch: str, only: str, jobs: int) -> list[dict[str, Any]]:
    """Compile all cases into the directory.

    Returns:
        One row per case, in the order of their time.
    """
    os.environ.update(cache_variables(directory))
    os.environ.pop("TRITON_INTERPRET", None)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        parts = [pool.submit(_compile_some, arch, only, first, jobs) for first in range(jobs)]
        rows = [row for part in parts for row in part.result()]
    return sorted(rows, key=lambda row: -row["seconds"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="directory of the cache")
    parser.add_argument("--arch", default="sm_90", help="architecture (default: sm_90)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases that contain this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    args = parser.parse_args(argv)
    rows = fill(args.directory, args.arch, args.only, args.jobs)
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
