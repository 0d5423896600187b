"""Measures growth of a GPT-2 and its AdamW state on disk, within a memory limit of 100 MB.

    python -m bench.speed.grow_optimizer

It is compared with growing the weights alone, and with the script one would write without
streaming, which holds both models and both states in memory. The ways take turns.

Every row has two times and two peaks of memory. One of each is of the whole process. The other is
of growth alone: it starts after the imports, and its peak counts above their memory ("base"). The
peaks are the system's own (VmHWM). Times are medians. Of the peaks the largest is kept.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import growkern
from bench.shared import system
from bench.shared.harness import Rows, benchmark_parser, machine, options_of, show_and_save

WIDTHS, LAYERS = (640, 1280), 12
MEMORY_LIMIT = "100MB"
WAYS = ("weights alone", "with optimizer.pt", "with optimizer.pt, in memory")


def make_source(directory: Path) -> None:
    """Write a float32 checkpoint with its optimizer state after one step on random gradients."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=WIDTHS[0], n_layer=LAYERS, n_head=10)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    model.save_pretrained(directory)
    torch.save(optimizer.state_dict(), directory / "optimizer.pt")


def child(way: str, source: Path, target: Path) -> None:
    """Grow in one of WAYS. Prints seconds and peaks of memory."""
    how = {"n_embd": WIDTHS[1]}
    system.warm_up(source, transformers.GPT2LMHeadModel, **how)
    before = system.status_mb("VmHWM")
    system.reset_peak()
    base, start, used = system.status_mb("VmRSS"), time.perf_counter(), time.process_time()
    file = source / "optimizer.pt"
    if way.endswith("in memory"):
        grown = growkern.grow(source, **how)
        grown.save_pretrained(target)
        state = torch.load(file, map_location="cpu", weights_only=True)
        grown_state = growkern.grow_optimizer(state, grown.growth_plan)
        torch.save(grown_state, target / "optimizer.pt")
    else:
        growkern.grow_checkpoint(
            source,
            target,
            memory_limit=MEMORY_LIMIT,
            progress=False,
            optimizer=None if way == WAYS[0] else file,
            **how,
        )
    result = {
        "seconds": time.perf_counter() - start,
        "processor s": time.process_time() - used,
        "base MB": base,
        "peak over base MB": system.status_mb("VmHWM") - base,
        "process peak MB": max(before, system.status_mb("VmHWM")),
    }
    print(json.dumps(result))


def timed_child(way: str, source: Path, target: Path) -> dict[str, float]:
    start = time.perf_counter()
    found = system.run_child("bench.speed.grow_optimizer", way, source, target)
    return {"process seconds": time.perf_counter() - start} | found


def measure(where: Path, repeats: int) -> list[dict[str, Any]]:
    """One row per way, each run `repeats` times in the directory `where`."""
    source, target = where / "source", where / "grown"
    make_source(source)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    sizes = {}
    for _ in range(repeats):
        for way in WAYS:
            shutil.rmtree(target, ignore_errors=True)
            system.settle(system.bytes_of(source) * 5)
            found[way].append(timed_child(way, source, target))
            sizes[way] = system.bytes_of(target) / 1e9
    rows = []
    for way, runs in found.items():
        row: dict[str, Any] = {"way": way, "written GB": sizes[way], "repeats": repeats}
        for name in runs[0]:
            pick = max if name.endswith("MB") else statistics.median
            row[name] = pick([run[name] for run in runs])
        rows.append(row)
    return rows


def main() -> None:
    parser = benchmark_parser(__doc__, repeats=3)
    parser.add_argument("--dir", type=Path, help="directory to work in, on a disk with 6 GB free")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = options_of(parser, "tests/growth/optimizer/test_optimizer_stream.py")
    if args.child:
        way, source, target = args.child
        child(way, Path(source), Path(target))
        return
    versions = {"growkern": growkern.__version__, "transformers": transformers.__version__}
    facts = {**machine(), **versions, "memory_limit": MEMORY_LIMIT}
    rows = Rows()
    with tempfile.TemporaryDirectory(dir=args.dir) as where:
        for row in measure(Path(where), args.repeats):
            rows.append(row)
    print(show_and_save("grow_optimizer", facts, rows))


if __name__ == "__main__":
    main()
