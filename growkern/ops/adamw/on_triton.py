"""The Triton backend of `adamw_step`.

Equations are numbered in `step.py`. Shape letters used in this file: M, N rows and columns.
"""

from growkern.ops.adamw.factors import Factors, StatePart, UpdateRule
from growkern.ops.backend import jit, next_power_of_2, tl
from growkern.ops.backend.launch import launch

# Four entries of a thread in each of two rows: loads of 16 bytes. With four rows sm_100 spills
BLOCK_M, BLOCK_N = 2, 512
# the order of the arguments that are tuples: `StatePart`, `VECTORS` (rows, columns), `_numbers`
VALUE, GRADIENT, MEAN, SQUARE, LARGEST = map(tl.constexpr, range(5))
LR_FACTOR, EPS_FACTOR, OLD, CENTRE = map(tl.constexpr, range(4))
LR, ADD1, ADD2, EPS, WEIGHT_DECAY, INVERSE1, INVERSE2, MORE = map(tl.constexpr, range(8))
ROW_VECTORS = 3


@jit
def adamw_kernel(
    tensors,  # (M, N) each; without amsgrad the last one is None
    rows,  # (M,) each
    cols,  # (N,) each
    numbers,  # float32
    M,
    N,
    AMSGRAD: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    n_blocks = tl.cdiv(N, BLOCK_N)
    block = tl.program_id(0)
    i = block // n_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    j = block % n_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows, in_cols = i < M, j < N
    here = in_rows[:, None] & in_cols[None, :]
    # int64: i * N passes 2**31
    at = i.to(tl.int64)[:, None] * N + j[None, :]
    row_lr = tl.load(rows[LR_FACTOR] + i, mask=in_rows, other=1.0)[:, None]
    row_eps = tl.load(rows[EPS_FACTOR] + i, mask=in_rows, other=1.0)[:, None]
    row_old = tl.load(rows[OLD] + i, mask=in_rows, other=1.0)[:, None]
    col_lr = tl.load(cols[LR_FACTOR] + j, mask=in_cols, other=1.0)[None, :]
    col_eps = tl.load(cols[EPS_FACTOR] + j, mask=in_cols, other=1.0)[None, :]
    col_old = tl.load(cols[OLD] + j, mask=in_cols, other=1.0)[None, :]
    centre = tl.load(cols[CENTRE] + j, mask=in_cols, other=0.0)[None, :]

    g = tl.load(tensors[GRADIENT] + at, mask=here, other=0.0).to(tl.float32)
    if MAXIMIZE:
        g = -g
    m = tl.load(tensors[MEAN] + at, mask=here, other=0.0).to(tl.float32)
    v = tl.load(tensors[SQUARE] + at, mask=here, other=0.0).to(tl.float32)
    w = tl.load(tensors[VALUE] + at, mask=here, other=0.0).to(tl.float32)
    m += (g - m) * numbers[ADD1]
    v += (g * g - v) * numbers[ADD2]
    tl.store(tensors[MEAN] + at, m, mask=here)
    tl.store(tensors[SQUARE] + at, v, mask=here)
    if AMSGRAD:
        largest = tl.load(tensors[LARGEST] + at, mask=here, other=0.0).to(tl.float32)
        v = tl.maximum(v, largest)
        tl.store(tensors[LARGEST] + at, v, mask=here)
    root = tl.sqrt(v * numbers[INVERSE2]) + numbers[EPS] * row_eps * col_eps
    step = row_lr * col_lr * numbers[INVERSE1] * m / root + numbers[WEIGHT_DECAY] * (w - centre)
    share = 1 + numbers[MORE] * (1 - row_old * col_old)
    tl.store(tensors[VALUE] + at, w - numbers[LR] * share * step, mask=here)


def _numbers(rule: UpdateRule, ratio: float) -> tuple[float, ...]:
    """The numbers of the kernel. 1 - beta is made here, because float32 would lose its digits."""
    return (
        *(rule.lr, 1 - rule.beta1, 1 - rule.beta2, rule.eps, rule.weight_decay),
        *(1 / (1 - rule.beta1**rule.step), 1 / (1 - rule.beta2**rule.step), ratio - 1),
    )


def adamw_step_on_triton(part: StatePart, factors: Factors, ratio: float, rule: UpdateRule) -> None:
    """As `adamw_step`."""
    M, N = part.sizes()
    vectors = tuple(factors.matrix.values())
    choice = {"BLOCK_M": BLOCK_M, "BLOCK_N": min(BLOCK_N, next_power_of_2(N)), "num_warps": 4}
    launch(
        adamw_kernel,
        -(-M // choice["BLOCK_M"]) * -(-N // choice["BLOCK_N"]),
        part.value,
        tuple(part),
        vectors[:ROW_VECTORS],
        vectors[ROW_VECTORS:],
        _numbers(rule, ratio),
        M,
        N,
        AMSGRAD=part.largest is not None,
        MAXIMIZE=rule.maximize,
        **choice,
    )
