"""python -m bench.bench_expand: widen 4096 x 4096 to 8192 x 8192 beside eager indexing and numpy.

Every call that returns a fresh tensor pays for the first touch of its memory; "reused" writes to
memory that exists (`out=`). The limit is the fastest of two ways to write the output and read
nothing: `fill_`, and the library's streaming stores fed from one source row in the cache.
"""

import argparse
from typing import Any

import torch

from bench.report import interleaved_ms, machine, relative_error, require_green, show_and_save
from growkern.ops.expand import expand

SOURCE, TARGET = 4096, 8192
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


def measure(
    dtype: torch.dtype, kind: str, index: torch.Tensor, scaled: bool, repeats: int
) -> dict[str, Any]:
    """One row of the table."""
    source, target = SOURCE, len(index)
    weight = torch.randn(source, source, generator=torch.Generator().manual_seed(1)).to(dtype)
    # uneven counts: what FPI divides by is not a power of two
    counts = torch.bincount(index, minlength=source)[index]
    scale = 1 / counts.float() if scaled else None
    if scaled:
        scale[::3] /= 3
    out = torch.zeros(target, target, dtype=dtype)
    one_row, tiled = torch.zeros(target, dtype=torch.long), torch.arange(target) % source
    as_numpy = weight.view(torch.int16).numpy() if dtype == torch.bfloat16 else weight.numpy()
    index_numpy = index.numpy()

    def eager():
        wide = weight[index][:, index]
        return wide if scale is None else wide * scale.to(dtype)

    def ours(**kwargs):
        return expand(weight, rows=index, cols=index, col_scale=scale, **kwargs)

    calls = {
        "fill": lambda: out.fill_(1),
        "stream": lambda: expand(weight, rows=one_row, cols=tiled, out=out),
        "eager": eager,
        "ours": ours,
        "reused": lambda: ours(out=out),
    }
    if not scaled:
        calls["numpy"] = lambda: as_numpy.take(index_numpy, 0).take(index_numpy, 1)
    ms = interleaved_ms(calls, repeats)
    part = slice(0, 64)
    truth = weight.double()[index[part]][:, index]
    truth = truth if scale is None else truth * scale.double()
    limit = min(ms["fill"], ms["stream"])
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "maps": kind,
        "scaled": "yes" if scaled else "no",
        "eager ms": ms["eager"],
        "numpy ms": ms.get("numpy"),
        "ours ms": ms["ours"],
        "x eager": ms["eager"] / ms["ours"],
        "reused ms": ms["reused"],
        "limit ms": limit,
        "of limit": limit / ms["reused"],
        "GB/s": bytes_moved(source, target, weight.element_size()) / ms["reused"] / 1e6,
        "error": relative_error(ours()[part], truth),
        "eager error": relative_error(eager()[part], truth),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-test", action="store_true", help="the tests have just been run")
    args = parser.parse_args()
    if not args.no_test:
        require_green("expand")
    facts = machine()
    rows = [
        measure(dtype, kind, index, scaled, args.repeats)
        for dtype in DTYPES
        for kind, index in index_maps(SOURCE, TARGET).items()
        for scaled in (False, True)
    ]
    print(show_and_save("expand", facts, rows))


if __name__ == "__main__":
    main()
