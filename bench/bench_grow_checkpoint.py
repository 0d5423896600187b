"""python -m bench.bench_grow_checkpoint: grow Llama-like checkpoints of three sizes onto disk.

Beside it, in the same run: `cp` of the bytes that were written, with and without waiting for the
disk as growth does; and the script one would write without streaming, which holds both models in
memory and calls `save_pretrained`. Time and peak memory (VmHWM) of both are those of a child
process from after its imports, over what these take: Python, PyTorch and transformers add some
seconds and 300 to 450 MB to every run, which `bench_grow_optimizer` measures. `cp` is timed with
its start. Processor seconds, of all cores, tell more than the clock on a busy machine. "cold" means
that the files read were dropped from the page cache before; that row has one repeat.
"""

import argparse
import filecmp
import json
import mmap
import os
import resource
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
from bench.shared.harness import ROOT, Rows, machine, show_and_save

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


def status(field: str) -> float:
    """A line of /proc/self/status, MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e6


def child(way: str, source: str, target: str, hidden: int) -> None:
    """Grow in one of two ways; prints seconds and peak memory over what imports take."""
    import growkern.growth.grow

    growkern.plan(source, hidden_size=hidden).to_dict()
    with torch.device("meta"):
        transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(source))
    Path("/proc/self/clear_refs").write_text("5")
    base, start, used = status("VmRSS"), time.perf_counter(), time.process_time()
    if way == "stream":
        growkern.grow_checkpoint(
            source,
            target,
            hidden_size=hidden,
            memory_limit=MEMORY_LIMIT,
            max_shard_size=SHARD,
            progress=False,
        )
    else:
        grown = growkern.grow(source, hidden_size=hidden)
        grown.save_pretrained(target, max_shard_size=SHARD)
    seconds = time.perf_counter() - start
    used = time.process_time() - used
    print(json.dumps({"seconds": seconds, "used": used, "peak": status("VmHWM") - base}))


def run_child(way: str, source: Path, target: Path, hidden: int) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.bench_grow_checkpoint", "--child", way]
    command += [str(source), str(target), str(hidden)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# ------------------------------------------------------------------- measuring


def bytes_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())


def evict(directory: Path) -> None:
    """Drop a directory's files from the page cache."""
    for file in directory.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def settle(size: int) -> None:
    """Same start for all: nothing left for the disk, and memory for `size` bytes of files at hand.

    A virtual machine's free memory need not be there yet: what was freed last is, the rest its host
    has to find, which took up to ten times as long as writing to it.
    """
    os.sync()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
    mmap.mmap(-1, size, flags=flags).close()


def copy(source: Path, target: Path) -> tuple[float, float, float]:
    """Seconds of `cp`, until what it wrote is on disk, and of the processor."""
    start, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(["cp", "-r", source, target], check=True)
    copied, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    used_cp = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    for file in target.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return copied, time.perf_counter() - start, used_cp


def measure(where: Path, size: str, cold: bool, repeats: int) -> dict[str, Any]:
    """One row of the table; the ways take turns."""
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
            settle(bytes_of(source) * 5)
            if cold:
                evict(source)
            result = run_child(way, source, target, wide)
            times[way].append(result["seconds"])
            times[f"{way} used"].append(result["used"])
            peaks[way].append(result["peak"])
        weights = sorted(file.name for file in grown.glob("*.safetensors"))
        differ = filecmp.cmpfiles(grown, other, weights, shallow=False)[1:]
        shutil.rmtree(other)
        settle(bytes_of(source) * 5)
        if cold:
            evict(grown)
        for name, seconds in zip(ways[2:5], copy(grown, other), strict=True):
            times[name].append(seconds)
        shutil.rmtree(other)
    size_gb = bytes_of(grown) / 1e9
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=3, help="of the warm rows; cold has one")
    parser.add_argument("--dir", type=Path, help="where to work; a disk with 12 GB free")
    parser.add_argument("--no-cold", action="store_true", help="the warm rows alone")
    parser.add_argument("--no-test", action="store_true", help="the tests have just been run")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        way, source, target, hidden = args.child
        child(way, source, target, int(hidden))
        return
    if not args.no_test:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "tests/growth/test_stream.py"]
        if subprocess.run(command, cwd=ROOT).returncode:
            sys.exit("tests/growth/test_stream.py fails: no figures from wrong files")
    facts = {
        **machine(),
        "growkern": growkern.__version__,
        "transformers": transformers.__version__,
    }
    facts["memory_limit"] = MEMORY_LIMIT
    with tempfile.TemporaryDirectory(dir=args.dir) as where:
        rows = Rows()
        for size in args.sizes:
            rows.append(measure(Path(where), size, False, args.repeats))
        if not args.no_cold:
            rows.append(measure(Path(where), args.sizes[-1], True, 1))
    print(show_and_save("grow_checkpoint", facts, rows))


if __name__ == "__main__":
    main()
