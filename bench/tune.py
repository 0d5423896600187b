"""Block sizes and warps of every Triton kernel, swept on the device beside today's choice.

As a piece of `bench.gpu` it records every candidate's time, and whether its result is the
default's. `python -m bench.tune bench/results/<gpu>` then writes what is faster into the table
that the library ships, growkern/ops/backend/tuned.json.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.on_gpu.check_expand import make_case
from bench.on_gpu.check_loss import make_heads, make_labels, make_logits
from bench.on_gpu.recorder import Recorder
from bench.shared import results
from bench.shared.harness import interleaved_ms
from growkern.ops.backend import tuned
from growkern.ops.backend.tuned import TUNED_FILE, tuned_choices, tuned_key
from growkern.ops.expand.op import expand
from growkern.ops.loss.kl_mlm_loss import kl_mlm_loss
from growkern.ops.loss.topk_kl_mlm_loss import topk_kl_mlm_loss

# a choice must save this share of the time: less is noise
WORTH = 0.03
Choice = dict[str, int]


def run(recorder: Recorder) -> None:
    sweeps = {"tune_expand": _expand, "tune_kl_mlm_rows": _kl_mlm_rows}
    sweeps["tune_topk_kl_mlm_rows"] = _topk_kl_mlm_rows
    sweeps[recorder.document["piece"]](recorder)


def _sweep(
    recorder: Recorder,
    kernel: str,
    like: Tensor,
    size: int,
    call: Callable[[], Tensor],
    choices: list[Choice],
    tolerance: float,
) -> None:
    """One row per candidate. The default takes its turn beside each of them.

    Raises:
        LookupError: no launch of the call looks up a choice for `like` and `size`.
    """
    key = tuned_key(kernel, like, size)
    with mock.patch.object(tuned, "tuned_key", wraps=tuned_key) as asked:
        expected = call().clone()
    if key not in {tuned_key(*each.args) for each in asked.call_args_list}:
        raise LookupError(f"no launch looks up {key}, so no candidate would be used")

    def chosen(choice: Choice) -> Tensor:
        with mock.patch.dict(tuned_choices(), {key: choice}):
            return call()

    for choice in choices:
        row: dict[str, Any] = {"key": key, **choice}
        try:
            actual = chosen(choice)
            error = ((actual.double() - expected.double()).norm() / expected.double().norm()).item()
            calls = {"default": call, "ms": lambda: chosen(choice)}  # noqa: B023
            ms = interleaved_ms(calls, recorder.pick(10, 1))
        except Exception as reason:
            # too many registers or too much shared memory: not a choice
            recorder.add(row | {"refused": f"{type(reason).__name__}: {reason}"[:200]})
            continue
        recorder.add(row | {"default ms": ms["default"], "ms": ms["ms"], "difference": error})
        if not error <= tolerance:
            recorder.fail(f"{key} {choice}: the result differs by {error:.1e}")


def _products(**values: tuple[int, ...]) -> Iterator[Choice]:
    for found in itertools.product(*values.values()):
        yield dict(zip(values, found, strict=True))


def _expand(recorder: Recorder) -> None:
    """What growth does by default: both axes gathered, columns scaled and with noise."""
    rng = torch.Generator(recorder.device).manual_seed(0)
    sizes = recorder.pick([(4096, 4096, 8192, 8192), (8192, 2048, 12_288, 3072)], [(9, 20, 17, 70)])
    widths, warps = recorder.pick(((512, 1024, 2048, 4096), (2, 4, 8)), ((32,), (4,)))
    choices = list(
        _products(BLOCK_M=recorder.pick((4, 8, 16), (4,)), BLOCK_N=widths, num_warps=warps)
    )
    # 4 to 32 columns for each thread
    choices = [c for c in choices if 128 <= c["BLOCK_N"] // c["num_warps"] <= 1024 or recorder.toy]
    for size, dtype in itertools.product(sizes, (torch.bfloat16, torch.float32)):
        case = make_case(size, dtype, rng, noise="col") | {"row_scale": None}
        out = torch.empty(size[2:], dtype=dtype, device=recorder.device)

        def call(case: dict[str, Any] = case, out: Tensor = out) -> Tensor:
            return expand(**case, out=out, backend="triton")

        # the order of operations is the same: bit for bit
        _sweep(recorder, "expand", out, size[3], call, choices, 0.0)


def _row_choices(recorder: Recorder) -> list[Choice]:
    """Of the kernels that take a row of the vocabulary block by block."""
    blocks, warps = recorder.pick(((1024, 2048, 4096, 8192, 16_384), (4, 8, 16, 32)), ((64,), (4,)))
    return [
        # a multiprocessor has 65536 registers
        choice | {"maxnreg": min(128, 65_536 // (32 * choice["num_warps"]))}
        for choice in _products(BLOCK_V=blocks, num_warps=warps)
        if 128 <= choice["BLOCK_V"] // choice["num_warps"] <= 1024 or recorder.toy
    ]


def _kl_mlm_rows(recorder: Recorder) -> None:
    """Forward and backward on ready logits; the linear loss launches the same on float32 ones."""
    rng = torch.Generator(recorder.device).manual_seed(0)
    shapes = recorder.pick([(9830, 30_522), (4096, 128_256)], [(3, 300)])
    choices = _row_choices(recorder)
    for (N, V), dtype in itertools.product(shapes, (torch.float32, torch.bfloat16)):
        student, teacher = make_logits(N, V, dtype, rng)
        student.requires_grad_()
        labels = make_labels(N, V, rng)

        def call(z: Tensor = student, u: Tensor = teacher, y: Tensor = labels) -> Tensor:
            loss = kl_mlm_loss(z, u, y, alpha=0.5, temperature=2.0, backend="triton")
            return torch.autograd.grad(loss, z)[0]

        # sums run in another order: a step of the gradient's dtype here and there
        _sweep(recorder, "kl_mlm_rows", student, V, call, choices, 1e-3)


def _topk_kl_mlm_rows(recorder: Recorder) -> None:
    """Hidden states so narrow that the rows are most of the time."""
    rng = torch.Generator(recorder.device).manual_seed(0)
    k = recorder.pick(64, 4)
    for N, V in recorder.pick([(9830, 30_522), (4096, 128_256)], [(3, 300)]):
        student, _ = make_heads(N, V, 64, 60, torch.bfloat16, rng)
        # logits are float32 whatever the hidden states are
        like = torch.empty(0, device=recorder.device)
        labels = make_labels(N, V, rng)
        ids = torch.rand(N, 8 * k, generator=rng, device=recorder.device).topk(k).indices
        log_p = torch.full((N, k), 0.5 / k, device=recorder.device).log()
        hidden = student[0].requires_grad_()

        def call(
            x: Tensor = hidden, w: Tensor = student[1], teacher: Any = (ids, log_p), y: Any = labels
        ) -> Tensor:
            limits = {"chunk_bytes": 1 << 34, "logits_dtype": torch.float32}
            loss = topk_kl_mlm_loss(x, w, *teacher, y, backend="triton", **limits)
            return torch.autograd.grad(loss, x)[0]

        choices = _row_choices(recorder)
        _sweep(recorder, "topk_kl_mlm_rows", like, V, call, choices, 5e-3)


# -------------------------------------------------------------------- the table


def best_choices(documents: list[dict[str, Any]]) -> dict[str, tuple[Choice, str]]:
    """Key -> the fastest choice that is right and worth it, and what it was measured to save."""
    best: dict[str, tuple[float, Choice, str]] = {}
    for document in documents:
        facts = document["machine"]
        for row in document["rows"]:
            if "ms" not in row or any(row["key"] in why for why in document["failures"]):
                continue
            share = row["ms"] / row["default ms"]
            if share > 1 - WORTH or share >= best.get(row["key"], (1.0,))[0]:
                continue
            choice = {k: v for k, v in row.items() if k in CHOICES}
            words = f"{facts['gpu']}, {row['default ms']:.3g} to {row['ms']:.3g} ms"
            best[row["key"]] = share, choice, f"{words}, {facts['commit']}, {facts['date'][:10]}"
    return {key: found[1:] for key, found in sorted(best.items())}


CHOICES = ("BLOCK_M", "BLOCK_N", "BLOCK_V", "num_warps", "maxnreg")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="bench/results/<gpu>")
    parser.add_argument("--table", type=Path, default=TUNED_FILE)
    args = parser.parse_args(argv)
    documents = [results.read(path) for path in sorted(args.results.glob("tune_*.json"))]
    documents = [d for d in documents if not d.get("toy") and d.get("machine", {}).get("gpu")]
    found = best_choices(documents)
    table = json.loads(args.table.read_text())
    for key, (choice, words) in found.items():
        table["choices"][key], table["measured"][key] = choice, words
        print(f"{key}: {choice}  {words}")
    results.write(args.table, table)
    if not found:
        print("nothing was measured to be faster than the default")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
