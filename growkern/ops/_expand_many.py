"""`expand` of many tensors in few launches: a work list of blocks.

A launch for each of a model's few hundred tensors costs more than growing the small ones. Here all
tensors of one kind (dtypes, with or without `upper`, kind of noise) are one launch: a table of
addresses and sizes, and a list that says which tensor each block belongs to. Formulas (1) to (3) of
`expand.py`; R, C rows and columns of a weight, M, N those of its result; J jobs of a launch.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.ops._expand_triton import (
    BLOCK_M,
    COL_NOISE,
    GATHER,
    NO_NOISE,
    ROW_NOISE,
    columns_of_block,
    expand_block,
)
from growkern.ops._hash_noise import line_keys
from growkern.ops._launch import AotCase, acc_dtype, jit, tl


class ExpandJob(NamedTuple):
    """The arguments of one `expand`, 2-D and with `out`; what is None changes nothing."""

    out: Tensor
    weight: Tensor
    upper: Tensor | None = None
    rows: Tensor | None = None
    cols: Tensor | None = None
    row_scale: Tensor | None = None
    col_scale: Tensor | None = None
    row_noise: Tensor | None = None
    col_noise: Tensor | None = None
    seed: int = 0
    row_offset: int = 0
    col_offset: int = 0

    @property
    def noise_kind(self) -> int:
        given = self.col_noise is not None, self.row_noise is not None
        return COL_NOISE if given[0] else ROW_NOISE if given[1] else NO_NOISE

    @property
    def is_wide(self) -> bool:
        """Whether 16 bytes of the output can be written at a time, known before the kernel runs."""
        sources = [x for x in (self.weight, self.upper) if x is not None]
        places = (self.out.data_ptr(), self.out.stride(0), self.out.shape[1])
        return all(x.stride(1) == 1 for x in (self.out, *sources)) and not any(
            place % 16 for place in places
        )

    @property
    def kind(self) -> tuple[str, str, bool, int, bool]:
        """Jobs of one kind share a launch."""
        dtypes = str(self.out.dtype), str(self.weight.dtype)
        return (*dtypes, self.upper is not None, self.noise_kind, self.is_wide)


# columns of the table: addresses, then strides and sizes in elements, then the first block
N_FIELDS = 10 + 6 + 4 + 1


@jit
def _pointer(table_ptr, k, like):
    """Field k of a job as a pointer of the type of `like`; at least 16 bytes are aligned."""
    return tl.multiple_of(tl.load(table_ptr + k).to(like.dtype), 16)


@jit
def _expand_many_kernel(
    table_ptr,  # (J, N_FIELDS) int64
    job_ptr,  # (blocks,) int32, the job of each block
    like,  # pointers of the types of out, weight, index, factor and key; not read
    UPPER: tl.constexpr,
    NOISE: tl.constexpr,
    WIDE: tl.constexpr,  # what `ExpandJob.is_wide` says
    ACC: tl.constexpr,
    N_FIELDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    block = tl.program_id(0)
    t = table_ptr + tl.load(job_ptr + block) * N_FIELDS
    out_ptr = tl.load(t).to(like[0].dtype)
    weight_ptr = tl.load(t + 1).to(like[1].dtype)
    maps = (_pointer(t, 3, like[2]), _pointer(t, 4, like[2]))
    scales = (_pointer(t, 5, like[3]), _pointer(t, 6, like[3]))
    step_m = tl.load(t + 14)
    N = tl.load(t + 19)
    if WIDE:
        out_ptr = tl.multiple_of(out_ptr, 16)
        step_m = tl.multiple_of(step_m, 16)
        N = tl.multiple_of(N, 16)
        strides = (tl.load(t + 10), 1, tl.load(t + 12), 1, step_m, 1)
    else:
        steps = (tl.load(t + 11), tl.load(t + 13), tl.load(t + 15))
        strides = (tl.load(t + 10), steps[0], tl.load(t + 12), steps[1], step_m, steps[2])
    shape = (tl.load(t + 16), tl.load(t + 17), tl.load(t + 18), N)
    block = block - tl.load(t + 20)
    noise = (_pointer(t, 7, like[3]), _pointer(t, 8, like[4]), _pointer(t, 9, like[4]))
    sources = (weight_ptr, tl.load(t + 2).to(like[1].dtype)) if UPPER else (weight_ptr, None)
    expand_block(
        block, sources, maps, scales, noise, out_ptr, strides, shape,
        NOISE, ACC, BLOCK_M, BLOCK_N,
    )  # fmt: skip


class _Shared:
    """Identity maps and unit scales, made once for all jobs; keeps what the table points to."""

    def __init__(self, device: torch.device, acc: torch.dtype, longest: int) -> None:
        self.index = torch.arange(longest, device=device)
        self.ones = torch.ones(longest, device=device, dtype=acc)
        self.acc, self.kept = acc, [self.index, self.ones]

    def keep(self, x: Tensor) -> int:
        self.kept.append(x)
        return x.data_ptr()

    def map(self, x: Tensor | None) -> int:
        return self.keep(self.index if x is None else x.contiguous())

    def factor(self, x: Tensor | None) -> int:
        return self.keep(self.ones if x is None else x.detach().to(self.acc).contiguous())

    def row(self, job: ExpandJob, first_block: int) -> list[int]:
        """One row of the table."""
        (M, N), (R, C), device = job.out.shape, job.weight.shape, job.out.device
        noise = [0, 0, 0]
        if job.col_noise is not None:
            keys = line_keys(M, job.row_offset, job.seed, device)
            noise = [self.factor(job.col_noise), *map(self.keep, keys)]
        elif job.row_noise is not None:
            keys = line_keys(N, job.col_offset, job.seed, device)
            noise = [self.factor(job.row_noise), *map(self.keep, keys)]
        upper = job.weight if job.upper is None else job.upper
        pointers = [x.data_ptr() for x in (job.out, job.weight, upper)]
        pointers += [self.map(job.rows), self.map(job.cols)]
        pointers += [self.factor(job.row_scale), self.factor(job.col_scale), *noise]
        strides = (*job.weight.stride(), *upper.stride(), *job.out.stride())
        return [*pointers, *strides, R, C, M, N, first_block]


def _launches(jobs: Sequence[ExpandJob]) -> Iterator[list[ExpandJob]]:
    wanted = sorted((job for job in jobs if job.out.numel()), key=lambda job: job.kind)
    for _, same in groupby(wanted, key=lambda job: job.kind):
        yield list(same)


def expand_many(jobs: Sequence[ExpandJob]) -> int:
    """Fills `out` of every job, in one launch for each kind: how many there were.

    All tensors are on one device, indices are in range and outputs overlap nothing: this is below
    the door of `expand`, which checks.

    Raises:
        GrowthError: tensors of several devices.
    """
    if len({job.out.device for job in jobs} | {job.weight.device for job in jobs}) > 1:
        raise GrowthError("expand_many works on one device: move weights and outputs to one")
    launches = list(_launches(jobs))
    for same in launches:
        _launch(same)
    return len(launches)


def _launch(jobs: Sequence[ExpandJob]) -> None:
    first = jobs[0]
    acc, tl_acc = acc_dtype(first.weight)
    device, block_n = first.out.device, columns_of_block(first.out.element_size())
    shared = _Shared(device, acc, max(max(*job.out.shape) for job in jobs))
    counts = [-(-job.out.shape[0] // BLOCK_M) * -(-job.out.shape[1] // block_n) for job in jobs]
    table, n_blocks = [], 0
    for job, count in zip(jobs, counts, strict=True):
        table.append(shared.row(job, n_blocks))
        n_blocks += count
    job_of_block = torch.arange(len(jobs), dtype=torch.int32)
    job_of_block = job_of_block.repeat_interleave(torch.tensor(counts)).to(device)
    like = (first.out, first.weight, shared.index, shared.ones, job_of_block)
    _expand_many_kernel[(n_blocks,)](
        torch.tensor(table).to(device),
        job_of_block,
        like,
        UPPER=first.upper is not None,
        NOISE=first.noise_kind,
        WIDE=first.is_wide,
        ACC=tl_acc,
        N_FIELDS=N_FIELDS,
        BLOCK_M=BLOCK_M,
        BLOCK_N=block_n,
        # a fused 1 + noise * xi would differ from the other backends in the last bit
        enable_fp_fusion=False,
    )


def aot_cases() -> list[AotCase]:
    """What a growth in bfloat16 launches."""
    like = ("*bf16", "*bf16", "*i64", "*fp32", "*i32")
    signature: dict[str, Any] = {"table_ptr": "*i64", "job_ptr": "*i32", "like": like}
    constants = {"ACC": tl.float32, "N_FIELDS": N_FIELDS, "BLOCK_M": BLOCK_M}
    constants |= {"BLOCK_N": columns_of_block(2)}
    return [
        AotCase(
            f"expand many {name} bf16",
            _expand_many_kernel,
            signature,
            constants | {"UPPER": upper, "NOISE": noise, "WIDE": True},
            narrow=GATHER,
            traffic=2.5,
        )
        for name, upper, noise in (("FPI", False, NO_NOISE), ("AKI, noise", True, COL_NOISE))
    ]
