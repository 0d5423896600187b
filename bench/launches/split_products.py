"""Measures which matrix products of narrow factors leave float32 logits good enough.

    python -m bench.launches.split_products

A float32 factor is the sum of narrower ones: two or three numbers of TF32 or bfloat16. The products
of the larger ones are added up in float32 (Henry, Tang and Heinecke, 2019, arXiv 1904.06376).
Narrow tensors are emulated here, so errors are those of a GPU up to the order of its sums. Times
are not: "TFLOP/s" is 0.8 of the rate of an H200's data sheet, divided by the number of products.

Only the logits of both heads are computed like this, the rest in float64. The errors are those of
the KL gradients at temperature 1.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.shared.harness import measure_all, parser_of
from bench.shared.loss_measure import frobenius, make_inputs

SHAPE = (256, 32_000, 768, 512)
DRIFTS = (0.01, 0.05, 0.2)
# bits of a significand, without the first
TF32, BFLOAT16 = 10, 7
THREE = ((0, 0), (0, 1), (1, 0))
SIX = (*THREE, (1, 1), (0, 2), (2, 0))
# TFLOP/s of one product
RATES = {"float32": 54, "tf32": 395, "bfloat16": 788}
# name -> bits of a factor, the products, and the rate of one
WAYS = {
    "float32": (23, ((0, 0),), "float32"),
    "TF32": (TF32, ((0, 0),), "tf32"),
    "three of TF32": (TF32, THREE, "tf32"),
    "three of bfloat16": (BFLOAT16, THREE, "bfloat16"),
    "six of bfloat16": (BFLOAT16, SIX, "bfloat16"),
}


def rounded(x: Tensor, bits: int) -> Tensor:
    """float32 numbers, rounded to nearest, ties to even, with so many bits of a significand."""
    cut = 23 - bits
    if not cut:
        return x
    whole = x.view(torch.int32)
    half = (1 << (cut - 1)) - 1 + (whole >> cut & 1)
    return (whole + half >> cut << cut).view(torch.float32)


def split(x: Tensor, bits: int, parts: int) -> list[Tensor]:
    """Numbers of so many bits whose sum is nearly `x`, the largest first."""
    numbers = []
    for _ in range(parts):
        numbers.append(rounded(x, bits))
        x = x - numbers[-1]
    return numbers


def product(
    hidden: Tensor, weight: Tensor, bits: int, pairs: tuple[tuple[int, int], ...]
) -> Tensor:
    """``hidden @ weight.t()`` from products of parts; the smallest are added first."""
    parts = 1 + max(max(pair) for pair in pairs)
    left, right = split(hidden, bits, parts), split(weight, bits, parts)
    return sum(left[i] @ right[j].t() for i, j in sorted(pairs, key=sum, reverse=True))


def gradients(heads: list[list[Tensor]], logits: list[Tensor]) -> tuple[Tensor, Tensor]:
    """dX and dW of the divergence, in float64."""
    z, u = (x.double().softmax(-1) for x in logits)
    hidden, weight = (x.double() for x in heads[0])
    return (z - u) @ weight, (z - u).t() @ hidden


def main() -> None:
    parser_of(__doc__).parse_args()
    measure_all("split_products", measured())


def measured() -> Iterator[dict[str, Any]]:
    for drift in DRIFTS:
        student, teacher, _ = make_inputs(*SHAPE, torch.float32, drift=drift)
        heads = [[x.detach() for x in student], teacher]
        truth = gradients(heads, [x.double() @ weight.double().t() for x, weight in heads])
        for name, (bits, pairs, rate) in WAYS.items():
            made = gradients(heads, [product(*head, bits, pairs) for head in heads])
            dx, dw = (frobenius(x, exact) for x, exact in zip(made, truth, strict=True))
            row = {"drift": drift, "products": name, "error of dX": dx, "error of dW": dw}
            yield row | {"TFLOP/s": round(RATES[rate] / len(pairs), 1)}


if __name__ == "__main__":
    main()
