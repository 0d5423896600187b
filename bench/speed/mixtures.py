"""Measures growth of mixtures on disk: many small experts, and a dense model that becomes one.

    python -m bench.speed.mixtures

- "experts": a Qwen3-MoE of 20,000 tensors of experts, beside a dense Qwen3 of the same bytes in as
  many files. Both grow in turns, twice in one process: "fresh" is the first growth, with all that
  it imports, and "warm" the second.
- "upcycle": a dense Qwen3 that becomes a mixture of 16 copies, beside `cp` of the files that were
  written. Both wait until the files are on disk.

On a busy machine the processor seconds, summed over all cores, tell more than the clock. Medians
are kept. "of the other" is the speed of growth relative to the dense model's, or to that of `cp`.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

import growkern
from bench.shared import system
from bench.shared.harness import benchmark_parser, measure_all, options_of
from bench.speed.grow_checkpoint import MEMORY_LIMIT, copy

EXPERTS, LAYERS = 128, 52
SHARED = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1000,
    "architectures": ["Qwen3ForCausalLM"],
}
# hidden size, and units of an expert
SMALL = (64, 64)
WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 6,
    "architectures": ["Qwen3ForCausalLM"],
}
BECOMES = {"to": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 2}


def make(directory: Path, config: Any, shards: int) -> None:
    """A bfloat16 checkpoint with random weights, in about this many files."""
    torch.manual_seed(0)
    model = getattr(transformers, config.architectures[0])._from_config(
        config, dtype=torch.bfloat16
    )
    size = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(directory, max_shard_size=size // shards)


def make_experts(mixture: Path, dense: Path) -> None:
    """A mixture of 20,000 tensors of experts, and a dense model of the same bytes."""
    hidden, units = SMALL
    own = {"num_experts": EXPERTS, "moe_intermediate_size": units}
    names = ["Qwen3MoeForCausalLM"]
    config = transformers.Qwen3MoeConfig(
        **{**SHARED, "architectures": names}, hidden_size=hidden, intermediate_size=units, **own
    )
    make(mixture, config, 8)
    wide = EXPERTS * units
    make(dense, transformers.Qwen3Config(**SHARED, hidden_size=hidden, intermediate_size=wide), 8)


def child(source: str, target: str, times: int, how: dict[str, Any]) -> None:
    """Grow some times. Prints the clock, the processor's and the peak above the imports of each."""
    runs = []
    for _ in range(times):
        shutil.rmtree(target, ignore_errors=True)
        with system.metered() as figures:
            growkern.grow_checkpoint(
                source, target, memory_limit=MEMORY_LIMIT, progress=False, resume=False, **how
            )
        runs.append([figures[x] for x in ("seconds", "processor s", "peak over base MB")])
    print(json.dumps({"runs": runs}))


def grown(source: Path, target: Path, times: int, **how: Any) -> list[tuple[float, float, float]]:
    """The runs of a child."""
    system.settle(system.bytes_of(source) * 2)
    name = "bench.speed.mixtures"
    return system.run_child(name, source, target, times, json.dumps(how))["runs"]


def measure_experts(where: Path, repeats: int) -> list[dict[str, Any]]:
    """One row for the first and one for the second growth of a process."""
    ways = {"mixture": where / "mixture", "dense": where / "dense"}
    make_experts(*ways.values())
    how = {"hidden_size": 2 * SMALL[0], "max_shard_size": "50MB"}
    taken: dict[str, list[Any]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, source in ways.items():
            taken[way].append(grown(source, where / "grown", 2, **how))
    size = system.bytes_of(where / "grown") / 1e9
    rows = []
    for number, kind in enumerate(("fresh", "warm")):
        median = {
            way: [statistics.median(run[number][i] for run in runs) for i in range(3)]
            for way, runs in taken.items()
        }
        rows.append(row(f"experts, {kind}", size, median["mixture"], median["dense"][:2]))
    return rows


def measure_upcycling(where: Path, repeats: int) -> list[dict[str, Any]]:
    """One row: growth of a dense model into a mixture, in turns with `cp` of what it wrote."""
    source, target, other = where / "wide", where / "grown", where / "other"
    make(source, transformers.Qwen3Config(**WIDE), 1)
    runs, copies = [], []
    for _ in range(repeats):
        # the second one of a process: `cp` imports nothing
        runs.append(grown(source, target, 2, **BECOMES)[1])
        system.settle(system.bytes_of(target))
        copies.append(copy(target, other)[1:])
        shutil.rmtree(other)
    size = system.bytes_of(target) / 1e9
    grow, cp = ([statistics.median(x) for x in zip(*y, strict=True)] for y in (runs, copies))
    return [row("upcycle", size, grow, cp)]


def row(what: str, size: float, own: list[float], other: list[float]) -> dict[str, Any]:
    """A row of the table: clock and processor of growth and of what it is compared with."""
    return {
        "what": what,
        "target GB": size,
        "s": own[0],
        "other s": other[0],
        "of the other": other[0] / own[0],
        "processor s": own[1],
        "other processor s": other[1],
        "of the other, processor": other[1] / own[1],
        "peak MB": own[2],
    }


def main() -> None:
    parser = benchmark_parser(__doc__, repeats=3)
    parser.add_argument("--dir", type=Path, help="directory to work in, on a disk with 6 GB free")
    parser.add_argument("--only", choices=("experts", "upcycle"), help="one of both")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = options_of(parser, "tests/growth/disk/test_stream.py")
    if args.child:
        source, target, times, how = args.child
        child(source, target, int(times), json.loads(how))
        return

    def measured() -> Iterator[dict[str, Any]]:
        for name, measure in (("experts", measure_experts), ("upcycle", measure_upcycling)):
            if args.only in (None, name):
                with tempfile.TemporaryDirectory(dir=args.dir) as where:
                    yield from measure(Path(where), args.repeats)

    measure_all("mixtures", measured(), system.facts(MEMORY_LIMIT))


if __name__ == "__main__":
    main()
