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
from bench.shared.harness import benchmark_parser, measure_all, options_of

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
    how: dict[str, Any] = {"n_embd": WIDTHS[1]}
    system.warm_up(source, transformers.GPT2LMHeadModel, **how)
    file = source / "optimizer.pt"
    with system.metered() as figures:
        if way.endswith("in memory"):
            grown = growkern.grow(source, **how)
            grown.save_pretrained(target)
            state = torch.load(file, map_location="cpu", weights_only=True)
            grown_state = growkern.grow_optimizer(state, grown.growth_plan)
            torch.save(grown_state, target / "optimizer.pt")
        else:
            state = None if way == WAYS[0] else file
            how |= {"memory_limit": MEMORY_LIMIT, "progress": False, "optimizer": state}
            growkern.grow_checkpoint(source, target, **how)
    print(json.dumps(figures))


def timed_child(way: str, source: Path, target: Path) -> dict[str, float]:
    start = time.perf_counter()
    figures = system.run_child("bench.speed.grow_optimizer", way, source, target)
    return {"process seconds": time.perf_counter() - start} | figures


def measure(where: Path, repeats: int) -> list[dict[str, Any]]:
    """One row per way, each run `repeats` times in the directory `where`."""
    source, target = where / "source", where / "grown"
    make_source(source)
    taken: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    sizes = {}
    for _ in range(repeats):
        for way in WAYS:
            shutil.rmtree(target, ignore_errors=True)
            system.settle(system.bytes_of(source) * 5)
            taken[way].append(timed_child(way, source, target))
            sizes[way] = system.bytes_of(target) / 1e9
    rows = []
    for way, runs in taken.items():
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
    facts = system.facts(MEMORY_LIMIT)
    with tempfile.TemporaryDirectory(dir=args.dir) as where:
        measure_all("grow_optimizer", measure(Path(where), args.repeats), facts)


if __name__ == "__main__":
    main()
