"""How many rows of the linear loss make a chunk.

Shape letters used in this file: C rows of one chunk, H and H_k widths of the heads, V vocabulary.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from growkern.ops.loss.linear.gemm import gemm_dtype
from growkern.ops.loss.linear.heads import Sizes, rows_of_chunk

# GEMM FLOPs per byte of memory traffic, from data sheets (H100 class: 60 TFLOP/s in float32, 400 of
# TF32 and 800 of 16 bits beside 4 TB/s). For a CPU: 100 GFLOP/s in float64 beside 6 GB/s of
# read-modify-write on two cores, and more in narrower dtypes
BALANCE = {("cuda", 4): 15, ("cuda", 2): 200, ("cuda", 8): 8, ("cpu", 2): 28, ("cpu", 4): 24}
CPU_BALANCE, TF32_BALANCE = 16, 100

# chunks of fewer rows than this waste the GEMMs: it is better to cut the vocabulary
LEAST_ROWS = 32


def chunk_size(
    rows: int, head_widths: Sequence[int], x: Tensor, element: int, sizes: Sizes
) -> tuple[int, int]:
    """Rows per chunk and columns per tile (0: all).

    A chunk has as many rows as `chunk_bytes` holds, or enough to make accumulating dW cheap. A
    chunk of C rows takes C V (6 H + 2 sum H_k) FLOPs and reads and writes dW, 8 V H bytes. The
    second takes under a tenth of the time of the first from C = 80 H balance / (6 H + 2 sum H_k)
    on. `element` is the size of a logit in bytes.
    """
    H, *others = head_widths
    size = rows_of_chunk(H, others, balance_of(x))
    tile = sizes.vocab_tile or sizes.columns
    held = sizes.chunk_bytes // (element * len(head_widths))  # logits of each head
    if held and (sizes.vocab_tile or held >= min(rows, LEAST_ROWS) * tile):
        size = max(1, held // tile)
    elif held:
        size = min(size, max(LEAST_ROWS, math.isqrt(held)))
        tile = max(1, held // min(size, rows))
    n_chunks = -(-max(rows, 1) // size)
    return max(1, -(-rows // n_chunks)), tile if tile < sizes.columns else 0


def balance_of(x: Tensor) -> int:
    """FLOPs of the products of a head per byte of memory traffic, see BALANCE."""
    itemsize = gemm_dtype(x).itemsize
    if (
        x.device.type != "cpu"
        and itemsize == 4
        and torch.get_float32_matmul_precision() != "highest"
    ):
        return TF32_BALANCE
    return BALANCE.get((x.device.type, itemsize), CPU_BALANCE)
