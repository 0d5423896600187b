"""`expand` of many tensors in few launches: a work list of blocks.

A launch for each of a model's few hundred tensors costs more than growing the small ones. Here all
tensors of one kind (dtypes, with or without `upper`, kind of noise) are one launch: a table of
addresses and sizes, and a list that says which tensor each block belongs to. Formulas (1) to (4) of
`expand.py`; R, C rows and columns of a weight, M, N those of its result; J jobs of a launch.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.ops.backend.launch import AotCase, acc_dtype, jit, tl
from growkern.ops.expand.call import ExpandJob
from growkern.ops.expand.noise import keys_of_lines, seed_words
from growkern.ops.expand.on_triton import (
    BLOCK_M,
    COL_NOISE,
    GATHER,
    NO_NOISE,
    columns_of_block,
    expand_block,
)

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


class _Packed:
    """Vectors of many jobs as one tensor, so that they reach the device in one copy."""

    def __init__(self, dtype: torch.dtype, *shared: Tensor) -> None:
        self.dtype, self.length, self.pieces = dtype, 0, list[Tensor]()
        for x in shared:
            self.add(x)

    def add(self, x: Tensor) -> int:
        """Takes a vector in; the place of its first element, at a multiple of 16 bytes."""
        at, rest = self.length, -len(x) % (16 // self.dtype.itemsize)
        piece = x.detach().to(self.dtype)
        self.pieces += [piece, piece.new_zeros(rest)]
        self.length += len(x) + rest
        return at

    def add_if(self, x: Tensor | None) -> int:
        """The first vector stands for None."""
        return 0 if x is None else self.add(x)

    def on(self, device: torch.device) -> Tensor:
        here = all(x.device.type == "cpu" for x in self.pieces)
        return torch.cat(self.pieces if here else [x.to(device) for x in self.pieces]).to(device)


class _Lines:
    """`line_keys` of many jobs at once: a score of small launches is the price of each call."""

    def __init__(self) -> None:
        self.length, self.ranges = 0, list[tuple[int, ...]]()

    def add(self, n_lines: int, offset: int, seed: int) -> int:
        """The place of the first key, at a multiple of 16 bytes."""
        at, length = self.length, -(-n_lines // 4) * 4
        self.ranges.append((length, offset - at, *seed_words(seed)))
        self.length += length
        return at

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        ranges = torch.tensor(self.ranges, dtype=torch.int64).reshape(-1, 4).to(device)
        each = ranges[:, 1:].repeat_interleave(ranges[:, 0], 0, output_size=self.length)
        line = torch.arange(self.length, device=device) + each[:, 0]
        return keys_of_lines(*(x.to(torch.int32) for x in (line, each[:, 1], each[:, 2])))


def _row(
    job: ExpandJob, index: _Packed, factors: _Packed, lines: _Lines, first_block: int
) -> list[int]:
    """One row of the table, with places in the packed vectors where their addresses will be."""
    (M, N), (R, C) = job.out.shape, job.weight.shape
    noise = [0, 0, 0]
    if job.col_noise is not None:
        noise = [factors.add(job.col_noise), *[lines.add(M, job.row_offset, job.seed)] * 2]
    elif job.row_noise is not None:
        noise = [factors.add(job.row_noise), *[lines.add(N, job.col_offset, job.seed)] * 2]
    upper = job.weight if job.upper is None else job.upper
    places = [x.data_ptr() for x in (job.out, job.weight, upper)]
    places += [index.add_if(job.rows), index.add_if(job.cols)]
    places += [factors.add_if(job.row_scale), factors.add_if(job.col_scale), *noise]
    strides = (*job.weight.stride(), *upper.stride(), *job.out.stride())
    return [*places, *strides, R, C, M, N, first_block]


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
    longest = max(max(*job.out.shape) for job in jobs)
    index = _Packed(torch.int64, torch.arange(longest))
    factors, lines = _Packed(acc, torch.ones(longest)), _Lines()
    counts = [-(-job.out.shape[0] // BLOCK_M) * -(-job.out.shape[1] // block_n) for job in jobs]
    rows, n_blocks = [], 0
    for job, count in zip(jobs, counts, strict=True):
        rows.append(_row(job, index, factors, lines, n_blocks))
        n_blocks += count
    table = torch.tensor(rows)
    packed = (index.on(device), factors.on(device), *lines.on(device))
    for x, (first_field, end) in zip(packed, ((3, 5), (5, 8), (8, 9), (9, 10)), strict=True):
        fields = slice(first_field, end)
        table[:, fields] = table[:, fields] * x.element_size() + x.data_ptr()
    job_of_block = torch.arange(len(jobs), dtype=torch.int32)
    job_of_block = job_of_block.repeat_interleave(torch.tensor(counts)).to(device)
    like = (first.out, first.weight, packed[0], packed[1], job_of_block)
    _expand_many_kernel[(n_blocks,)](
        table.to(device),
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


# ---------------------------------------------------------------- collecting


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
