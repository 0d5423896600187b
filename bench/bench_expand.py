"""python -m bench.bench_expand: widen 4096 x 4096 to 8192 x 8192 beside eager indexing.

On a CPU every call that returns a fresh tensor pays for the first touch of its memory; "reused"
writes to memory that exists (`out=`). The limit there is the fastest of two ways to write the
output and read nothing: `fill_`, and the library's streaming stores fed from one source row in
the cache. On a GPU it is a copy that moves as many bytes.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch

from bench.on_gpu.check_expand import truth_rows
from bench.shared.harness import (
    Rows,
    compiled,
    interleaved_ms,
    machine,
    relative_error,
    require_green,
    show_and_save,
)
from growkern.ops.expand.op import expand

SOURCE, TARGET = 4096, 8192
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def bytes_moved(source: int, target: int, element: int) -> int:
    """Least possible traffic: each source element read once, each target element written once."""
    return (source * source + target * target) * element


def index_maps(source: int, target: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    extra = torch.randint(source, (target - source,), generator=rng)
    mixed = torch.cat([torch.arange(source), extra])[torch.randperm(target, generator=rng)]
    # contiguous: two halves of the source, each twice; tiled: the whole source, twice
    halves = torch.arange(source).view(2, -1).repeat(1, target // source).flatten()
    return {"contiguous": halves, "tiled": torch.arange(target) % source, "arbitrary": mixed}


def peers(case: dict[str, Any], with_compile: bool) -> dict[str, Callable[[], Any]]:
    """What one writes without the library, by name."""
    weight, index = case["weight"], case["rows"]
    scale, noise = (case.get(name) for name in ("col_scale", "col_noise"))

    def eager() -> torch.Tensor:
        wide = weight[index][:, index]
        if scale is not None:
            wide = wide * scale.to(weight.dtype)
        if noise is not None:
            # a random number for each element: that they cancel would take more
            wide = wide * (1 + noise.to(weight.dtype) * torch.rand_like(wide))
        return wide

    named: dict[str, Callable[[], Any]] = {"eager": eager}
    if with_compile:
        named["compiled"] = compiled(eager)
    if DEVICE == "cpu" and scale is None:
        bits = weight.view(torch.int16) if weight.dtype == torch.bfloat16 else weight
        as_numpy, index_numpy = bits.numpy(), index.numpy()
        named["numpy"] = lambda: as_numpy.take(index_numpy, 0).take(index_numpy, 1)
    return named


def limits(out: torch.Tensor, weight: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """The fastest ways known to move the bytes that have to move."""
    if DEVICE == "cuda":
        half = bytes_moved(weight.shape[0], out.shape[0], weight.element_size()) // 2
        there, back = (torch.empty(half, dtype=torch.int8, device=DEVICE) for _ in range(2))
        there.random_(-128, 127)
        return {"copy": lambda: back.copy_(there)}
    one_row = torch.zeros(len(out), dtype=torch.long)
    tiled = torch.arange(len(out)) % len(weight)
    return {
        "fill": lambda: out.fill_(1),
        "stream": lambda: expand(weight, rows=one_row, cols=tiled, out=out),
    }


def measure(
    dtype: torch.dtype, kind: str, index: torch.Tensor, scaled: str, args: argparse.Namespace
) -> dict[str, Any]:
    """One row of the table; "noise" is what growth does by default: halves, and noise on them."""
    source, target = SOURCE, len(index)
    weight = torch.randn(source, source, generator=torch.Generator().manual_seed(1)).to(dtype)
    # even counts of FPI divide by a power of two, uneven ones by others too
    scale = torch.full((target,), source / target, device=DEVICE)
    if scaled == "yes":
        scale[::3] /= 3
    weight, index = weight.to(DEVICE), index.to(DEVICE)
    case: dict[str, Any] = {"weight": weight, "rows": index, "cols": index}
    if scaled != "no":
        case["col_scale"] = scale
    if scaled == "noise":
        half = torch.full((target // 2,), 0.5, device=DEVICE)
        case["col_noise"] = torch.cat([half, -half])
    out = torch.zeros(target, target, dtype=dtype, device=DEVICE)

    def ours(**kwargs: Any) -> torch.Tensor:
        return expand(**case, **kwargs)

    bounds = limits(out, weight)
    others = peers(case, args.compile)
    calls = {**bounds, **others, "ours": ours, "reused": lambda: ours(out=out)}
    ms = interleaved_ms(calls, args.repeats)
    part = torch.arange(64, device=DEVICE)
    truth = truth_rows(case, part)
    limit = min(ms[name] for name in bounds)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "maps": kind,
        "scaled": scaled,
        **{f"{name} ms": ms[name] for name in others},
        "ours ms": ms["ours"],
        "x eager": ms["eager"] / ms["ours"],
        "reused ms": ms["reused"],
        "limit ms": limit,
        "of limit": limit / ms["reused"],
        "GB/s": bytes_moved(source, target, weight.element_size()) / ms["reused"] / 1e6,
        "error": relative_error(ours()[part], truth),
        # its random numbers are others
        "eager error": relative_error(others["eager"]()[part], truth)
        if scaled != "noise"
        else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--compile", action="store_true", help="torch.compile of eager as well")
    parser.add_argument("--no-test", action="store_true", help="the tests have just been run")
    args = parser.parse_args()
    if not args.no_test:
        require_green("expand")
    facts = machine()
    rows = Rows()
    for dtype in DTYPES:
        for kind, index in index_maps(SOURCE, TARGET).items():
            for scaled in ("no", "halved", "yes", "noise"):
                rows.append(measure(dtype, kind, index, scaled, args))
    print(show_and_save("expand", facts, rows))


if __name__ == "__main__":
    main()
