"""Estimates the time of the linear loss on an H200 from its matrix products and memory traffic.

    python -m bench.shared.time_model
    python -m bench.shared.time_model --shape 9830 30522 768 512 --bias

Nothing is measured. The GEMMs run at 788 TFLOP/s in bfloat16, and everything else moves its bytes
at 4.3 TB/s; both rates are estimates, good to 15 %. "GEMMs" is the limit: no loss from hidden
states can leave them out. The other lines are what this library adds to them.

Shape letters used in this file: N rows, V vocabulary, H and H_t widths of student and teacher.
"""

import argparse
import sys
from typing import NamedTuple

import torch

from growkern.ops.loss.linear.gemm import BALANCE
from growkern.ops.loss.linear.heads import rows_of_chunk

FLOPS, BANDWIDTH = 788e12, 4.3e12
# bytes per logit of the row kernels: float32 logits of both heads, a bfloat16 gradient
ROW_KERNELS = {"Triton": 22, "CUDA": 10}
SHAPES = ((8192, 128_256, 4096, 2048), (256, 128_256, 4096, 2048), (9830, 30_522, 768, 512))


class Estimate(NamedTuple):
    """One shape.

    Attributes:
        chunks: how many chunks the rows make.
        gemms: seconds of the matrix products.
        passes: name -> seconds of each other pass.
        extra_bytes: the most memory that the loss needs beside its inputs.
    """

    chunks: int
    gemms: float
    passes: dict[str, float]
    extra_bytes: int

    @property
    def seconds(self) -> float:
        return self.gemms + sum(self.passes.values())


def estimate(
    shape: tuple[int, int, int, int], *, bias: bool = False, row_kernel: str = "Triton"
) -> Estimate:
    """The time of a forward and backward pass in bfloat16 with one teacher."""
    N, V, H, H_t = shape
    size = rows_of_chunk(H, [H_t], BALANCE["cuda", torch.bfloat16.itemsize])
    chunks = -(-N // size)
    logits = N * V
    moved = {
        # the rate of a GEMM includes writing 2 bytes
        "logits in float32 instead of bfloat16": 2 * 2 * logits,
        f"row kernel, {row_kernel}": ROW_KERNELS[row_kernel] * logits,
        # one chunk writes bfloat16. Of several the first writes float32, the others read and write
        # it, and then it becomes bfloat16
        "sums of dW": (8 * (chunks - 1) + 2 + 6) * V * H if chunks > 1 else 0,
        "dW times the incoming gradient": 4 * V * H,
    }
    if bias:
        moved |= {"adding the biases": 2 * 8 * logits, "db": 2 * logits}
    held = 8 * -(-N // chunks) * V + (2 if chunks == 1 else 4 + 2) * V * H
    passes = {name: size / BANDWIDTH for name, size in moved.items()}
    return Estimate(chunks, 2 * N * V * (3 * H + H_t) / FLOPS, passes, held)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", type=int, nargs=4, metavar=("N", "V", "H", "H_T"), help="one shape"
    )
    parser.add_argument("--bias", action="store_true", help="heads with biases")
    parser.add_argument("--row-kernel", choices=ROW_KERNELS, default="Triton")
    args = parser.parse_args(argv)
    for shape in [tuple(args.shape)] if args.shape else SHAPES:
        made = estimate(shape, bias=args.bias, row_kernel=args.row_kernel)
        print("{} rows, V {}, widths {} and {}".format(*shape), f"in {made.chunks} chunks:")
        lines = {"GEMMs": made.gemms, **made.passes, "together": made.seconds}
        for name, seconds in lines.items():
            print(f"  {name:<40} {1e3 * seconds:7.2f} ms  {seconds / made.gemms:5.2f} of the GEMMs")
        print(f"  {'extra memory':<40} {made.extra_bytes / 1e9:7.2f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
