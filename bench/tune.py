"""Finds the best block sizes and numbers of warps for every Triton kernel on a GPU.

Two steps:

1. As pieces of `bench.gpu` it times every candidate beside the default. It also checks that both
   give the same result.
2. `python -m bench.tune bench/results/<gpu>` writes the faster choices into the table that ships
   with the library, growkern/ops/backend/tuned.json.
"""

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.launches.driver import absent_gpu
from bench.launches.fill import in_processes
from bench.shared import results
from bench.shared.harness import interleaved_ms, parser_of
from bench.shared.inputs import make_case, make_heads, make_labels, make_logits
from bench.shared.loss_measure import frobenius
from bench.shared.recorder import Recorder
from growkern.ops.backend import tuned
from growkern.ops.backend.tuned import TUNED_FILE, tuned_choices, tuned_key
from growkern.ops.expand.call import ExpandCall
from growkern.ops.expand.many import expand_many
from growkern.ops.expand.op import expand
from growkern.ops.loss.kl_mlm_loss import kl_mlm_loss
from growkern.ops.loss.linear_kl_mlm_loss import linear_kl_mlm_loss
from growkern.ops.loss.topk_kl_mlm_loss import topk_kl_mlm_loss

# A choice must save at least this share of the time. Less may be noise.
WORTH = 0.03
# rows and vocabulary
SHAPES = ((9830, 30_522), (4096, 128_256))
Choice = dict[str, int]


def run(recorder: Recorder) -> None:
    topk = partial(_linear_rows, kernel="topk_kl_mlm_rows")
    sweeps = {"tune_expand": _expand, "tune_kl_mlm_rows": _kl_mlm_rows}
    sweeps["tune_topk_kl_mlm_rows"] = topk
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
    """Time every candidate of one kernel at one size, in turns with the default.

    Args:
        like: a tensor of the dtype and device that the table distinguishes.
        size: the size that the table distinguishes.
        tolerance: largest relative Frobenius distance from the default's result.
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
            error = frobenius(actual, expected.double())
            calls = {"default": call, "ms": lambda: chosen(choice)}  # noqa: B023
            ms = interleaved_ms(calls, recorder.pick(10, 1))
        except Exception as reason:
            # It needs too many registers or too much shared memory.
            recorder.add(row | {"refused": f"{type(reason).__name__}: {reason}"[:200]})
            continue
        recorder.add(row | {"default ms": ms["default"], "ms": ms["ms"], "difference": error})
        if not error <= tolerance:
            recorder.fail(f"{key} {choice}: the result differs by {error:.1e}")


def _products(**values: tuple[int, ...]) -> Iterator[Choice]:
    for choice in itertools.product(*values.values()):
        yield dict(zip(values, choice, strict=True))


def _expand_choices(toy: bool) -> list[Choice]:
    if toy:
        return [{"BLOCK_M": 4, "BLOCK_N": 32, "num_warps": 4}]
    choices = _products(BLOCK_M=(8, 16, 32), BLOCK_N=(512, 1024, 2048, 4096), num_warps=(4, 8, 16))
    # each thread takes 4 to 32 columns
    return [c for c in choices if 128 <= c["BLOCK_N"] // c["num_warps"] <= 1024]


def _expand_calls(device: str, toy: bool) -> Iterator[tuple[str, Tensor, Callable[[], Tensor]]]:
    """The default of growth, one tensor and as growth does: both axes gathered, routed columns."""
    rng = torch.Generator(device).manual_seed(0)
    sizes = [(9, 20, 17, 70)] if toy else [(4096, 4096, 8192, 8192), (8192, 2048, 12_288, 3072)]
    for size, dtype in itertools.product(sizes, (torch.bfloat16, torch.float32)):
        case = make_case(size, dtype, rng, routing="col", scales=False)
        out = torch.empty(size[2:], dtype=dtype, device=device)

        def call(case: dict[str, Any] = case, out: Tensor = out) -> Tensor:
            return expand(**case, out=out, backend="triton")

        def many(case: dict[str, Any] = case, out: Tensor = out) -> Tensor:
            expand_many([ExpandCall(out, **case)])
            return out

        yield "expand", out, call
        yield "expand_many", out, many


def _compile_some(arch: str, first: int, step: int) -> int:
    """Compile every step-th candidate of `expand`, from the first one on, without a GPU."""
    torch.set_num_threads(1)
    choices, done = _expand_choices(toy=False)[first::step], 0
    with absent_gpu(arch):
        for kernel, out, call in _expand_calls("cpu", toy=False):
            key = tuned_key(kernel, out, out.shape[1])
            for choice in choices:
                with (
                    mock.patch.dict(tuned_choices(), {key: choice}),
                    # the sweep names what does not compile
                    contextlib.suppress(Exception),
                ):
                    call()
                    done += 1
    return done


def _expand(recorder: Recorder) -> None:
    if not recorder.toy:
        start = time.perf_counter()
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
        jobs = min(os.cpu_count() or 1, len(_expand_choices(toy=False)))
        done = in_processes(_compile_some, arch, jobs)
        recorder.add({"compiled": sum(done), "seconds": time.perf_counter() - start})
    for kernel, out, call in _expand_calls(recorder.device, recorder.toy):
        # All choices do the same operations in the same order: the results must be equal.
        _sweep(recorder, kernel, out, out.shape[1], call, _expand_choices(recorder.toy), 0.0)


def _row_choices(recorder: Recorder) -> list[Choice]:
    """The candidates for kernels that read a row of logits block by block."""
    blocks, warps = recorder.pick(((1024, 2048, 4096, 8192, 16_384), (4, 8, 16, 32)), ((64,), (4,)))
    return [
        # a multiprocessor has 65536 registers
        choice | {"maxnreg": min(128, 65_536 // (32 * choice["num_warps"]))}
        for choice in _products(BLOCK_V=blocks, num_warps=warps)
        if 128 <= choice["BLOCK_V"] // choice["num_warps"] <= 1024 or recorder.toy
    ]


def _kl_mlm_rows(recorder: Recorder) -> None:
    """The rows of the linear loss, then forward and backward on ready logits."""
    _linear_rows(recorder, "kl_mlm_rows_at_once")
    rng = torch.Generator(recorder.device).manual_seed(0)
    choices = _row_choices(recorder)
    dtypes = (torch.float32, torch.bfloat16)
    for (N, V), dtype in itertools.product(recorder.pick(SHAPES, [(3, 300)]), dtypes):
        student, teacher = make_logits(N, V, dtype, rng)
        student.requires_grad_()
        labels = make_labels(N, V, rng)

        def call(z: Tensor = student, u: Tensor = teacher, y: Tensor = labels) -> Tensor:
            loss = kl_mlm_loss(z, u, y, alpha=0.5, temperature=2.0, backend="triton")
            return torch.autograd.grad(loss, z)[0]

        # Sums run in another order, so some values differ in the last digit of their dtype.
        _sweep(recorder, "kl_mlm_rows", student, V, call, choices, 1e-3)


def _linear_rows(recorder: Recorder, kernel: str) -> None:
    """Float32 logits, sums and gradient at once; narrow heads leave most of the time to rows."""
    rng = torch.Generator(recorder.device).manual_seed(0)
    for N, V in recorder.pick(SHAPES, [(3, 300)]):
        (hidden, weight), teacher = make_heads(N, V, 64, 60, torch.bfloat16, rng)
        hidden.requires_grad_()
        loss, options = linear_kl_mlm_loss, {"temperature": 2.0}
        if kernel == "topk_kl_mlm_rows":
            loss, options, k = topk_kl_mlm_loss, {"chunk_bytes": 1 << 34}, recorder.pick(64, 4)
            ids = torch.rand(N, 8 * k, generator=rng, device=recorder.device).topk(k).indices
            teacher = [ids, torch.full((N, k), 0.5 / k, device=recorder.device).log()]
        given = (hidden, weight, *teacher, make_labels(N, V, rng))
        options |= {"backend": "triton", "logits_dtype": torch.float32}
        make = partial(loss, *given, **options)

        def call(make: Callable[[], Tensor] = make, hidden: Tensor = hidden) -> Tensor:
            return torch.autograd.grad(make(), hidden)[0]

        # logits are float32 for all dtypes of the hidden states
        like = torch.empty(0, device=recorder.device)
        _sweep(recorder, kernel, like, V, call, _row_choices(recorder), 5e-3)


# -------------------------------------------------------------------- the table


def best_choices(documents: list[dict[str, Any]]) -> dict[str, tuple[Choice, str]]:
    """Pick the best choices from the documents of a sweep.

    Returns:
        Key of the table -> the fastest correct choice that saves at least WORTH, and a sentence on
        where it was measured.
    """
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
    return {key: entry[1:] for key, entry in sorted(best.items())}


CHOICES = ("BLOCK_M", "BLOCK_N", "BLOCK_V", "num_warps", "maxnreg")


def main(argv: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("results", type=Path, help="directory of results: bench/results/<gpu>")
    parser.add_argument("--table", type=Path, default=TUNED_FILE, help="file to update")
    args = parser.parse_args(argv)
    documents = [results.read(path) for path in sorted(args.results.glob("tune_*.json"))]
    documents = [d for d in documents if not d.get("toy") and d.get("machine", {}).get("gpu")]
    faster = best_choices(documents)
    table = json.loads(args.table.read_text())
    for key, (choice, words) in faster.items():
        table["choices"][key], table["measured"][key] = choice, words
        print(f"{key}: {choice}  {words}")
    results.write(args.table, table)
    if not faster:
        print("no choice was measured to be faster than the default")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
