"""Measures `grow_checkpoint`: Llama-like checkpoints of three sizes grown on disk.

    python -m bench.speed.grow_checkpoint

Each growth is compared, in the same run, with:

- "cp": `cp` of the files that were written. "cp, on disk" also waits until they are on disk, as
  growth does.
- "load all": the script one would write without streaming. It holds both models in memory and
  calls `save_pretrained`.

Growth runs in a child process. Time and peak memory (VmHWM) count from after its imports. Python,
PyTorch and transformers add some seconds and 300 to 450 MB to every run, which
`grow_optimizer` measures. The time of `cp` includes starting it. On a busy machine the
processor seconds, summed over all cores, tell more than the clock. "cold" means that the source
files were dropped from the page cache first. That row has one repeat.
"""

import argparse
import filecmp
import json
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import growkern
from bench.shared import system
from bench.shared.harness import benchmark_parser, measure_all, options_of

# hidden size of source and target, layers, vocabulary
SIZES = {
    "small": (192, 384, 10, 5_000),
    "medium": (512, 1024, 14, 16_000),
    "large": (1536, 3072, 18, 32_000),
}
MEMORY_LIMIT = "1GiB"
SHARD = "2GB"


def make_source(directory: Path, hidden: int, layers: int, vocabulary: int) -> None:
    """A sharded bfloat16 checkpoint with random weights."""
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=vocabulary,
        architectures=["LlamaForCausalLM"],
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory, max_shard_size="500MB")


# -------------------------------------------------------------------- children


def child(way: str, source: str, target: str, hidden: int) -> None:
    """Grow in one of two ways. Prints seconds, and peak memory above what the imports take."""
    system.warm_up(source, transformers.LlamaForCausalLM, hidden_size=hidden)
    with system.metered() as figures:
        if way == "stream":
            how = {"memory_limit": MEMORY_LIMIT, "max_shard_size": SHARD, "progress": False}
            growkern.grow_checkpoint(source, target, hidden_size=hidden, **how)
        else:
            grown = growkern.grow(source, hidden_size=hidden)
            grown.save_pretrained(target, max_shard_size=SHARD)
    print(json.dumps(figures))


# ------------------------------------------------------------------- measuring


def copy(source: Path, target: Path) -> tuple[float, float, float]:
    """Time `cp`: seconds until it ends, until its files are on disk, and of the processor."""
    start, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(["cp", "-r", source, target], check=True)
    copied, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    used_cp = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    system.sync_files(target)
    return copied, time.perf_counter() - start, used_cp


def measure(where: Path, size: str, cold: bool, repeats: int) -> dict[str, Any]:
    """Measure one row of the table. The ways take turns.

    Args:
        cold: drop the source files from the page cache first.
        repeats: runs of each way; medians are returned, and the largest peaks.
    """
    hidden, wide, layers, vocabulary = SIZES[size]
    source, grown, other = where / f"source-{size}", where / "grown", where / "other"
    if not source.exists():
        make_source(source, hidden, layers, vocabulary)
    ways = ("stream", "load all", "cp", "cp, on disk", "cp used", "stream used", "load all used")
    times: dict[str, list[float]] = {way: [] for way in ways}
    peaks: dict[str, list[float]] = {"stream": [], "load all": []}
    for _ in range(repeats):
        for way, target in (("stream", grown), ("load all", other)):
            shutil.rmtree(target, ignore_errors=True)
            system.settle(system.bytes_of(source) * 5)
            if cold:
                system.evict(source)
            result = system.run_child("bench.speed.grow_checkpoint", way, source, target, wide)
            times[way].append(result["seconds"])
            times[f"{way} used"].append(result["processor s"])
            peaks[way].append(result["peak over base MB"])
        weights = sorted(file.name for file in grown.glob("*.safetensors"))
        differ = filecmp.cmpfiles(grown, other, weights, shallow=False)[1:]
        shutil.rmtree(other)
        system.settle(system.bytes_of(source) * 5)
        if cold:
            system.evict(grown)
        for name, seconds in zip(ways[2:5], copy(grown, other), strict=True):
            times[name].append(seconds)
        shutil.rmtree(other)
    size_gb = system.bytes_of(grown) / 1e9
    shutil.rmtree(grown)
    s = {name: statistics.median(values) for name, values in times.items()}
    return {
        "target GB": size_gb,
        "cache": "cold" if cold else "warm",
        "stream s": s["stream"],
        "GB/s": size_gb / s["stream"],
        "cp s": s["cp"],
        "cp, on disk s": s["cp, on disk"],
        "x cp": s["stream"] / s["cp"],
        "x cp, on disk": s["stream"] / s["cp, on disk"],
        "load all s": s["load all"],
        "stream processor s": s["stream used"],
        "cp processor s": s["cp used"],
        "stream peak MB": max(peaks["stream"]),
        "load all peak MB": max(peaks["load all"]),
        "same bytes": "no" if any(differ) else "yes",
    }


def main() -> None:
    parser = benchmark_parser(__doc__, repeats=3)
    parser.add_argument(
        "--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="checkpoints to grow"
    )
    parser.add_argument("--dir", type=Path, help="directory to work in, on a disk with 12 GB free")
    parser.add_argument("--no-cold", action="store_true", help="leave out the row with cold files")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = options_of(parser, "tests/growth/disk/test_stream.py")
    if args.child:
        way, source, target, hidden = args.child
        child(way, source, target, int(hidden))
        return
    runs = [(size, False, args.repeats) for size in args.sizes]
    runs += [] if args.no_cold else [(args.sizes[-1], True, 1)]
    with tempfile.TemporaryDirectory(dir=args.dir) as where:
        rows = (measure(Path(where), *run) for run in runs)
        measure_all("grow_checkpoint", rows, system.facts(MEMORY_LIMIT))


if __name__ == "__main__":
    main()
