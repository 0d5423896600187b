"""Estimates the time of the linear loss on a GPU from its matrix products and memory traffic.

    python -m bench.shared.time_model
    python -m bench.shared.time_model --shape 9830 30522 768 512 --bias --gpu H100
    python -m bench.shared.time_model --dtype tf32

The times are predictions, to compare a measurement with. The GEMMs run at 788 TFLOP/s in bfloat16,
395 in TF32 and 54 in float32, 0.8 of the data sheet of an H100 and of an H200. Copies move 0.9 of
the bandwidth there.

Measured once, on an H200 (`bench/results/nvidia-h200/timeline.json`, commit db4503e): the row
kernel took 4.553 ms for 18 bytes of each logit, 0.97 of a copy. Beside products and row kernel the
device was busy or idle for 2.35 ms. The result does not say with how many launches. About 350 are
assumed, so 6.7 us each, with the gap before it. No H100 has measured either: both are assumed to be
the same there.

"GEMMs" is the limit: no loss from hidden states can leave them out. The other lines are what this
library adds to them. A bias of a head adds nothing: the row kernel reads it from the cache. Nor
does an incoming gradient of 1.

Shape letters used in this file: N rows, V vocabulary, H and H_t widths of student and teacher.
"""

import sys
from typing import NamedTuple

from bench.shared.harness import parser_of
from growkern.ops.loss.linear.heads import held_rows

# bytes per second of a copy
COPY = {"H100": 3.0e12, "H200": 4.3e12}
# what the row kernel reaches of it, and seconds of a small launch
ROWS, LAUNCH = 0.97, 6.7e-6
# small launches before the first row kernel, and after the last one. There are none in between:
# `tests/ops/backend/test_loss_launches.py` counts them
LAUNCHES = (30, 32)
# bytes per logit that the row kernel reads, by the size of a number of the gradient: float32 logits
# of both heads, twice, and once more to correct a float32 gradient
ROW_BYTES = {2: 16, 4: 24}
# of heads and gradients: FLOPs of a GEMM per second, and bytes of a number
DTYPES = {"bfloat16": (788e12, 2), "tf32": (395e12, 4), "float32": (54e12, 4)}
SHAPES = ((8192, 128_256, 4096, 2048), (256, 128_256, 4096, 2048), (9830, 30_522, 768, 512))


class Estimate(NamedTuple):
    """One shape.

    Attributes:
        gemms: seconds of the matrix products.
        passes: name -> seconds of each other pass.
        extra_bytes: the most memory that the loss needs beside its inputs.
    """

    chunks: int
    products: int
    gemms: float
    passes: dict[str, float]
    extra_bytes: int

    @property
    def seconds(self) -> float:
        return self.gemms + sum(self.passes.values())


def estimate(
    shape: tuple[int, int, int, int],
    *,
    dtype: str = "bfloat16",
    bias: bool = False,
    gpu: str = "H200",
) -> Estimate:
    """The time of a forward and backward pass with one teacher."""
    N, V, H, H_t = shape
    flops, size = DTYPES[dtype]
    # a row of logits has a multiple of 64 columns in memory
    chunk, held = held_rows(N, [H, H_t], size, V + -V % 64)
    products = -(-N // (held or N))
    logits = N * V
    # several products: the first writes float32, the others read and write it
    summed = 8 * (products - 1) if products > 1 else 0
    if products > 1 and size == 2:
        # it becomes bfloat16 in the end. The rate of a GEMM includes writing 2 bytes
        summed += 2 + 6
    moved = {
        # the rate of a GEMM includes writing as many bytes as the inputs have
        f"logits in float32 instead of {dtype}": 2 * (4 - size) * logits,
        "row kernel": (ROW_BYTES[size] + size) * logits,
        "sums of dW": summed * V * H,
    }
    if bias:
        moved |= {"db": size * logits}
    dw = (4 + 2 if products > 1 and size == 2 else size) * V * H
    # logits are in the memory of dW if one product writes it, and they fit
    in_dw = products == 1 and 8 * chunk * V <= dw
    dz = size * V * (min(held, N) or (N if in_dw else 0))
    memory = dz + dw + (0 if in_dw else 8 * chunk * V)
    rate = dict.fromkeys(moved, COPY[gpu]) | {"row kernel": ROWS * COPY[gpu]}
    passes = {name: n / rate[name] for name, n in moved.items() if n or size == 2}
    passes["small launches"] = sum(LAUNCHES) * LAUNCH
    gemms = 2 * N * V * (3 * H + H_t) / flops
    return Estimate(-(-N // chunk), products, gemms, passes, memory)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--shape", type=int, nargs=4, metavar=("N", "V", "H", "H_T"), help="one shape"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the heads")
    parser.add_argument("--bias", action="store_true", help="heads with biases")
    parser.add_argument("--gpu", choices=COPY, default="H200")
    args = parser.parse_args(argv)
    for shape in [tuple(args.shape)] if args.shape else SHAPES:
        made = estimate(shape, dtype=args.dtype, bias=args.bias, gpu=args.gpu)
        print("{} rows, V {}, widths {} and {}".format(*shape), f"in {made.chunks} chunks:")
        lines = {"GEMMs": made.gemms, **made.passes, "together": made.seconds}
        for name, seconds in lines.items():
            print(f"  {name:<40} {1e3 * seconds:7.2f} ms  {seconds / made.gemms:5.2f} of the GEMMs")
        print(f"  {'extra memory':<40} {made.extra_bytes / 1e9:7.2f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
