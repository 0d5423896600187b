"""Measures `expand` on one matrix: 4096 x 4096 widened to 8192 x 8192, beside eager indexing.

    python -m bench.speed.expand

Columns of the table:

- "ours" returns a fresh tensor. On a CPU it pays for the first touch of that memory.
- "reused" writes to memory that exists (`out=`).
- "limit" is the fastest possible time. On a GPU it is a copy that moves as many bytes. On a CPU
  it is the faster of two ways to write the output without reading: `fill_`, and the library's
  streaming stores fed from a few source rows in the cache.
- "of limit" is the median over the turns.
"""

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from bench.shared.harness import (
    benchmark_parser,
    compiled,
    interleaved_ms,
    measure_all,
    name_of,
    options_of,
    relative_error,
    turns_ms,
)
from bench.shared.inputs import routing_of, truth_rows
from growkern.growth.plan.axes import RANDOM_SIGN
from growkern.ops.expand import expand

SOURCE, TARGET = 4096, 8192
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# calls of a padded hidden state, the default of growth where it is exact
PADDED = ("padded", "routing, scaled")
SCALED = ("no", "halved", "yes", "noise", "routing", *PADDED)
# what growth calls, and of that, what is compiled as well
GROWTH, COMPILED = ("no", "routing", *PADDED, "noise"), ("no", "routing")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def bytes_moved(weight: torch.Tensor, out: torch.Tensor) -> int:
    """Least bytes possible: read every source element once, write every target element once."""
    return weight.nbytes + out.nbytes


def index_maps(source: int, target: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    extra = torch.randint(source, (target - source,), generator=rng)
    mixed = torch.cat([torch.arange(source), extra])[torch.randperm(target, generator=rng)]
    # contiguous: each half of the source twice in a row; tiled: the whole source twice
    halves = torch.arange(source).view(2, -1).repeat(1, target // source).flatten()
    return {"contiguous": halves, "tiled": torch.arange(target) % source, "arbitrary": mixed}


def padded_read(weight: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Fill `out` as growth fills a weight that reads a padded hidden state.

    Half of the columns read what they read before. The others read nothing yet and get the weights
    with random signs, in calls of their own.
    """
    source = weight.shape[1]
    expand(weight, rows=rows, out=out[:, :source])
    for first in range(source, out.shape[1], source):
        free = out[:, first : first + source]
        scale = torch.full((free.shape[1],), 1 / RANDOM_SIGN, device=out.device)
        noise = torch.full_like(scale, RANDOM_SIGN)
        expand(weight, rows=rows, col_scale=scale, col_noise=noise, seed=first, out=free)
    return out


def peers(case: dict[str, Any], with_compile: bool) -> dict[str, Callable[[], Any]]:
    """The ways to do the same without the library, by name."""
    weight: torch.Tensor = case["weight"]
    rows, cols = case.get("rows"), case.get("cols")
    scale, noise, routing = (case.get(name) for name in ("col_scale", "col_noise", "routing"))
    row_scale = case.get("row_scale")

    def eager() -> torch.Tensor:
        wide = weight if rows is None else weight[rows]
        if cols is None:
            # a random sign per element, beside the copies
            signs = torch.empty_like(wide).bernoulli_().mul_(2).sub_(1)
            return torch.cat([wide, wide * signs], 1)
        wide = wide[:, cols]
        if row_scale is not None:
            wide = wide * row_scale.to(weight.dtype)[:, None]
        if scale is not None:
            wide = wide * scale.to(weight.dtype)
        if noise is not None:
            # Plain noise: one random number per element. Noise that cancels would cost more.
            wide = wide * (1 + noise.to(weight.dtype) * torch.rand_like(wide))
        if routing is not None:
            # A random bit per element. Copies that add up would take more.
            wide = wide * torch.empty_like(wide).bernoulli_()
        return wide

    named: dict[str, Callable[[], Any]] = {"eager": eager}
    if with_compile:
        named["compiled"] = compiled(eager)
    if DEVICE == "cpu" and scale is None and routing is None and cols is not None:
        bits = weight.view(torch.int16) if weight.dtype == torch.bfloat16 else weight
        as_numpy, index_numpy = bits.numpy(), cols.numpy()
        named["numpy"] = lambda: as_numpy.take(index_numpy, 0).take(index_numpy, 1)
    return named


def limits(out: torch.Tensor, weight: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """The fastest known ways to move the bytes that must move."""
    if DEVICE == "cuda":
        half = bytes_moved(weight, out) // 2
        there, back = (torch.empty(half, dtype=torch.int8, device=DEVICE) for _ in range(2))
        there.random_(-128, 127)
        return {"copy": lambda: back.copy_(there)}
    # a thread takes 4 source rows at a time: of a single row, one thread would write everything
    few_rows = torch.arange(len(out)) % 32
    tiled = torch.arange(out.shape[1]) % weight.shape[1]
    return {
        "fill": lambda: out.fill_(1),
        "stream": lambda: expand(weight, rows=few_rows, cols=tiled, out=out),
    }


def measure(
    dtype: torch.dtype, kind: str, index: torch.Tensor, scaled: str, args: argparse.Namespace
) -> dict[str, Any]:
    """Measure one row of the table.

    Args:
        index: the map, used for rows and columns.
        scaled: "no", "halved", "yes" (halves and sixths), or as growth does it: "noise", halves
            with noise on them, "routing", every weight whole in one of the copies, and for a padded
            hidden state "padded" (`padded_read`) or "routing, scaled", with a factor on every row.
    """
    source, target = SOURCE, len(index)
    weight = torch.randn(source, source, generator=torch.Generator().manual_seed(1)).to(dtype)
    # With even replica counts FPI divides by powers of two, with uneven ones also by others.
    scale = torch.full((target,), source / target, device=DEVICE)
    if scaled == "yes":
        scale[::3] /= 3
    weight, index = weight.to(DEVICE), index.to(DEVICE)
    case: dict[str, Any] = {"weight": weight, "rows": index, "cols": index}
    if scaled in ("halved", "yes", "noise"):
        case["col_scale"] = scale
    if scaled == "noise":
        half = torch.full((target // 2,), 0.5, device=DEVICE)
        case["col_noise"] = torch.cat([half, -half])
    if scaled.startswith("routing"):
        case["routing"] = routing_of(index, 1)
    if scaled == "routing, scaled":
        # into a padded hidden state: rows are no copies, and new ones are 0
        del case["rows"]
        case["row_scale"] = torch.full((source,), 2**0.5, device=DEVICE)
    if scaled == "padded":
        del case["cols"]
    out = torch.zeros(len(case.get("rows", weight)), target, dtype=dtype, device=DEVICE)

    def ours(out: torch.Tensor | None = None) -> torch.Tensor:
        if scaled == "padded":
            wide = weight.new_empty(target, target) if out is None else out
            return padded_read(weight, index, wide)
        return expand(**case, out=out)

    bounds = limits(out, weight)
    others = peers(case, args.compile and scaled in COMPILED)
    ms = interleaved_ms({**others, "ours": ours}, args.repeats)
    # in turns of their own: after a second of eager indexing, memory is as fast as it happens to be
    turns = turns_ms({**bounds, "reused": lambda: ours(out=out)}, 3 * args.repeats)
    reused = turns.pop("reused")
    limit = [min(times) for times in zip(*turns.values(), strict=True)]
    part = torch.arange(64, device=DEVICE)
    truth = truth_rows(case, part)
    return {
        "dtype": name_of(dtype),
        "maps": kind,
        "scaled": scaled,
        **{f"{name} ms": ms[name] for name in others},
        "ours ms": ms["ours"],
        "x eager": ms["eager"] / ms["ours"],
        "reused ms": median(reused),
        "limit ms": median(limit),
        "of limit": median(least / own for least, own in zip(limit, reused, strict=True)),
        "GB/s": bytes_moved(weight, out) / median(reused) / 1e6,
        # of a padded read, the error of the copies
        "error": relative_error(ours()[part, : truth.shape[1]], truth),
        # eager draws other random numbers
        "eager error": relative_error(others["eager"]()[part], truth)
        if scaled in ("no", "halved", "yes")
        else None,
    }


def main() -> None:
    parser = benchmark_parser(__doc__, repeats=7)
    parser.add_argument(
        "--compile",
        action="store_true",
        help="also measure torch.compile of eager indexing, where nothing is scaled",
    )
    parser.add_argument(
        "--growth", action="store_true", help="only what growth calls, in bfloat16 and float32"
    )
    args = options_of(parser, "tests/ops/expand/test_expand.py")
    rows = (
        measure(dtype, kind, index, scaled, args)
        for dtype in DTYPES[: 2 if args.growth else None]
        for kind, index in index_maps(SOURCE, TARGET).items()
        for scaled in (GROWTH if args.growth else SCALED)
    )
    measure_all("expand", rows)


if __name__ == "__main__":
    main()
