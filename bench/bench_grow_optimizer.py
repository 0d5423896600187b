"""python -m bench.bench_grow_optimizer: a GPT-2 and its AdamW state grown onto disk, in a limit.

Beside it: the weights alone, and the script one would write without streaming, which holds both
models and both states in memory. A row has two clocks and two peaks: of the whole process, from its
start to its end; and of growth, from after its imports, over what they take (base). The peaks are
the system's own (VmHWM). The ways take turns; medians, the largest peak.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import growkern
from bench.bench_grow_checkpoint import bytes_of, settle, status
from bench.shared.harness import ROOT, Rows, machine, show_and_save

WIDTHS, LAYERS = (640, 1280), 12
MEMORY_LIMIT = "100MB"
WAYS = ("weights alone", "with optimizer.pt", "with optimizer.pt, in memory")


def make_source(directory: Path) -> None:
    """A float32 checkpoint after one step with random gradients."""
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
    """Grow in one of the ways; prints seconds and peaks."""
    import growkern.growth.grow

    how = {"n_embd": WIDTHS[1]}
    growkern.growth.grow._shapes(growkern.plan(source, **how))
    before = status("VmHWM")
    Path("/proc/self/clear_refs").write_text("5")
    base, start, used = status("VmRSS"), time.perf_counter(), time.process_time()
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
        "peak over base MB": status("VmHWM") - base,
        "process peak MB": max(before, status("VmHWM")),
    }
    print(json.dumps(result))


def run_child(way: str, source: Path, target: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.bench_grow_optimizer", "--child", way]
    start = time.perf_counter()
    done = subprocess.run(
        [*command, str(source), str(target)], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}\n{done.stderr[-3000:]}")
    whole = {"process seconds": time.perf_counter() - start}
    return whole | json.loads(done.stdout.splitlines()[-1])


def measure(where: Path, repeats: int) -> list[dict[str, Any]]:
    source, target = where / "source", where / "grown"
    make_source(source)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    sizes = {}
    for _ in range(repeats):
        for way in WAYS:
            shutil.rmtree(target, ignore_errors=True)
            settle(bytes_of(source) * 5)
            found[way].append(run_child(way, source, target))
            sizes[way] = bytes_of(target) / 1e9
    rows = []
    for way, runs in found.items():
        row: dict[str, Any] = {"way": way, "written GB": sizes[way], "repeats": repeats}
        for name in runs[0]:
            pick = max if name.endswith("MB") else statistics.median
            row[name] = pick([run[name] for run in runs])
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="where to work; a disk with 6 GB free")
    parser.add_argument("--no-test", action="store_true", help="the tests have just been run")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        way, source, target = args.child
        child(way, Path(source), Path(target))
        return
    test = "tests/growth/test_optimizer_stream.py"
    if not args.no_test:
        command = [sys.executable, "-m", "pytest", "-q", "-x", test]
        if subprocess.run(command, cwd=ROOT).returncode:
            sys.exit(f"{test} fails: no figures from wrong files")
    versions = {"growkern": growkern.__version__, "transformers": transformers.__version__}
    facts = {**machine(), **versions, "memory_limit": MEMORY_LIMIT}
    rows = Rows()
    with tempfile.TemporaryDirectory(dir=args.dir) as where:
        for row in measure(Path(where), args.repeats):
            rows.append(row)
    print(show_and_save("grow_optimizer", facts, rows))


if __name__ == "__main__":
    main()
