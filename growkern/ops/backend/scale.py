"""Multiplies gradients by the incoming scalar, in place, on the device that has it.

The gradient of an output matrix may take gigabytes. A factor of 1, the usual one, moves none of
them: the kernel reads the factor and ends. The host does not wait for it.
"""

from torch import Tensor

from growkern.ops.backend.launch import HAS_TRITON, jit, launch, tl

# elements of a block: 16 bytes of bfloat16 for each of 128 threads; as many programs as fit a GPU
BLOCK, MOST_PROGRAMS = 1024, 2048


@jit
def scale_kernel(
    x_ptr,  # (n,)  in and out
    factor_ptr,  # ()
    n,
    BLOCK_N: tl.constexpr,
):
    factor = tl.load(factor_ptr)
    if factor != 1:
        # int64: a gradient may have more than 2**31 elements
        first = tl.program_id(0).to(tl.int64) * BLOCK_N
        # their number is no constant: each size of a small gradient would be compiled anew
        for start in range(first, n, tl.num_programs(0) * BLOCK_N):
            at = start + tl.arange(0, BLOCK_N)
            x = tl.load(x_ptr + at, mask=at < n, other=0.0)
            # in the wider of both dtypes, rounded once
            tl.store(x_ptr + at, (x * factor).to(x_ptr.dtype.element_ty), mask=at < n)


def scale_in_place(x: Tensor, factor: Tensor, *, by_triton: bool) -> None:
    """Multiply a contiguous tensor by a 0-d tensor on its device, float32 or float64.

    `by_triton` says whether `x` is on a GPU with Triton, or Triton is interpreted.
    """
    if by_triton and HAS_TRITON and x.numel():
        programs = min(-(-x.numel() // BLOCK), MOST_PROGRAMS)
        launch(scale_kernel, programs, x, x, factor, x.numel(), BLOCK_N=BLOCK, num_warps=4)
    elif not x.is_cpu or factor != 1:
        # only a CPU is asked
        x.mul_(factor)
