"""The first minutes on a GPU: every launch once, beside the reference in float64.

It begins with what only a GPU can show: products with float32 sums, NaN in a row without a label,
CUDA graphs, and a second device. Then it runs the calls of `bench.launches.cases`, which are small.
"""

import math

import torch
from torch import Tensor

from bench.launches.cases import SHAPES, Case, all_cases, captured, headline
from bench.shared import harness
from bench.shared.harness import largest_error
from bench.shared.inputs import make_heads
from bench.shared.recorder import Recorder, fill_new_memory
from growkern.ops.loss.linear.gemm import adds_wide, multiplies_wide
from growkern.ops.loss.linear_kl_mlm_loss import linear_kl_mlm_loss

# largest relative Frobenius error, by the dtype in the case's name
BARS = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-4, "float64": 1e-4}
TOY_SHAPES = ((3, 48), (2, 50), (16, 48), (16, 50))


def run(recorder: Recorder) -> None:
    shapes = recorder.pick(SHAPES, TOY_SHAPES)
    with recorder.attempt("products with float32 sums"):
        _products(recorder)
    with recorder.attempt("NaN in the last row"):
        _nan_in_the_last_row(recorder)
    if recorder.device == "cuda":
        rng = torch.Generator("cuda").manual_seed(0)
        for case in captured(rng, shapes):
            with recorder.attempt(f"CUDA graph, {case.name}"):
                _graph(recorder, case)
        with recorder.attempt("two devices"):
            _second_device(recorder, shapes)
    for number, case in enumerate(all_cases(recorder.device, shapes)):
        # an interpreted kernel takes a second, so a dry run takes a part of them
        if number % recorder.pick(1, 12) == 0:
            with recorder.attempt(case.name):
                check_case(recorder, case, BARS)


def distance(actual: Tensor, truth: Tensor) -> float:
    """Frobenius norm of the difference over that of the truth; absolute where the truth is 0."""
    truth = truth.double()
    return ((actual.double() - truth).norm() / (truth.norm() + 1e-6)).item()


def check_case(recorder: Recorder, case: Case, bars: dict[str, float]) -> None:
    """Compare a call with the op's reference in float64."""
    bar = next(bar for dtype, bar in bars.items() if dtype in case.name)
    truth = case.run("reference")
    actual = case.run("triton")
    # a work list has one more result, of the same call
    pairs = [(x, truth[min(i, len(truth) - 1)]) for i, x in enumerate(actual)]
    error = largest_error(distance(x, expected) for x, expected in pairs)
    recorder.check(case.name, error, bar)


def _products(recorder: Recorder) -> None:
    """Whether this PyTorch has them. Without them the loss is right, but slower."""
    device = torch.device(recorder.device, 0 if recorder.device == "cuda" else None)
    for dtype in (torch.bfloat16, torch.float16):
        products = {"mm": multiplies_wide(device, dtype), "addmm": adds_wide(device, dtype)}
        recorder.add({"case": f"out_dtype=float32 of {dtype}", **products})


def _nan_in_the_last_row(recorder: Recorder) -> None:
    """The rows of padding may hold NaN: dW must not see them."""
    fill_new_memory()
    rng = torch.Generator(recorder.device).manual_seed(1)
    N, V = recorder.pick((64, 30_522), (6, 50))
    student, teacher = make_heads(N, V, 32, 16, torch.bfloat16, rng)
    labels = torch.randint(V, (N,), generator=rng, device=rng.device)
    labels[N // 3 :] = -100
    grads = []
    for value in (0.0, math.nan):
        student[0][-1] = teacher[0][-1] = value
        given = [x.detach().requires_grad_() for x in student]
        loss = linear_kl_mlm_loss(*given, *teacher, labels, temperature=2.0, backend="triton")
        grads.append(torch.autograd.grad(loss, given))
    error = largest_error(distance(b, a) for a, b in zip(*grads, strict=True))
    recorder.check("NaN in the last row", error, 1e-6)


def _graph(recorder: Recorder, case: Case) -> None:
    """Forward and backward pass in a CUDA graph give what they give outside of it."""
    expected = [x.clone() for x in case.run("triton")]
    graph, made = harness.captured(lambda: case.run("triton"))
    graph.replay()
    error = largest_error(distance(x, y) for x, y in zip(made, expected, strict=True))
    recorder.check(f"CUDA graph, {case.name}", error, 1e-6)


def _second_device(recorder: Recorder, shapes: tuple[tuple[int, int], ...]) -> None:
    """Tensors on another device than the current one."""
    if torch.cuda.device_count() < 2:
        recorder.add({"case": "two devices", "why not": "there is one device"})
        return
    rng = torch.Generator("cuda:1").manual_seed(0)
    for case in headline(rng, shapes[-2:]):
        check_case(recorder, case._replace(name=f"on cuda:1, {case.name}"), BARS)
