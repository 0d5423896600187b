"""One sweep of the linear loss over its live rows, chunk by chunk, on a GPU or a CPU.

Equations are numbered in `linear_kl_mlm_loss.py`. Shape letters used in this file: N rows, R live
rows (capacity on a GPU), C rows of one chunk, H width, V vocabulary, K teachers, W = 1 + K terms,
T = 2 W numbers of a row that `terms` gives.
"""

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from growkern.errors import GrowthError
from growkern.ops.backend.launch import acc_torch_dtype
from growkern.ops.backend.native import advise_huge_pages
from growkern.ops.loss.linear.gemm import add_dw, add_dx, gemm_dtype, project
from growkern.ops.loss.linear.heads import Settings, Sizes
from growkern.ops.loss.rows.options import Maths, Rows
from growkern.ops.loss.rows.read import ROW_FUNCTIONS, read_slices
from growkern.ops.loss.rows.state import Steps, n_numbers, needs_second_reading, terms
from growkern.ops.loss.rows.vocab_parallel import add_up

# GEMM FLOPs per byte of memory traffic, from data sheets (H100 class: 60 and 800 TFLOP/s beside
# 4 TB/s) and, for a CPU, from 100 GFLOP/s beside 6 GB/s of read-modify-write on two cores, twice
# the GFLOP/s in bfloat16
BALANCE = {("cuda", 4): 15, ("cuda", 2): 200, ("cuda", 8): 8, ("cpu", 2): 28}
CPU_BALANCE = 16

# fewer rows than this in a chunk waste the GEMMs: better to cut the vocabulary
LEAST_ROWS = 32


def chunk_size(
    rows: int, head_widths: Sequence[int], x: Tensor, element: int, sizes: Sizes
) -> tuple[int, int]:
    """Rows per chunk, columns per tile (0: all): what `chunk_bytes` holds or makes dW cheap.

    A chunk of C rows takes C V (6 H + 2 sum H_k) FLOPs and reads and writes dW, 8 V H bytes. The
    second is under a tenth of the first from C = 80 H balance / (6 H + 2 sum H_k) on. `element`
    is the size of a logit in bytes.
    """
    H, *others = head_widths
    balance = BALANCE.get((x.device.type, gemm_dtype(x).itemsize), CPU_BALANCE)
    size = max(1, round(80 * H * balance / (6 * H + 2 * sum(others))))
    tile = sizes.vocab_tile or sizes.columns
    held = sizes.chunk_bytes // (element * len(head_widths))  # logits of everybody
    if held and (sizes.vocab_tile or held >= min(rows, LEAST_ROWS) * tile):
        size = max(1, held // tile)
    elif held:
        size = min(size, max(LEAST_ROWS, math.isqrt(held)))
        tile = max(1, held // min(size, rows))
    n_chunks = -(-max(rows, 1) // size)
    return max(1, -(-rows // n_chunks)), tile if tile < sizes.columns else 0


def may_ask(device: torch.device) -> bool:
    """Whether the data may be asked how many rows are live: on a GPU that waits for the stream."""
    return device.type == "cpu"


def live_rows(kind_N: Tensor, max_rows: int) -> tuple[Tensor, int]:
    """Indices of the rows of some kind, (R,), and their number; N stands for an unused place.

    A GPU is not asked how many there are: a prefix sum puts them into `max_rows` (or N) places.
    """
    N = kind_N.numel()
    live_N = kind_N > 0
    if may_ask(kind_N.device):
        rows_R = live_N.nonzero().squeeze(1)
        if max_rows and rows_R.numel() > max_rows:
            raise GrowthError(
                f"{rows_R.numel()} rows carry a term, max_rows={max_rows}: raise max_rows"
            )
        return rows_R, rows_R.numel()
    R = min(max_rows, N) if max_rows else N
    place_N = live_N.cumsum(0) - 1
    if max_rows:
        torch._assert_async(live_N.sum() <= R, "more rows carry a term than max_rows")
    # places from R on are a dump for the rows that carry nothing
    rows_R = torch.full((R + 1,), N, dtype=torch.int64, device=kind_N.device)
    place_N = torch.where(live_N, place_N.clamp(max=R), R)
    rows_R.scatter_(0, place_N, torch.arange(N, device=kind_N.device))
    return rows_R[:R], R


class Chunk:
    """Some rows of all heads, whose logits are made tile by tile.

    `memory` holds the logits of `shape` of each head, and one number more.
    """

    def __init__(
        self,
        heads: Sequence[Sequence[Tensor]],
        rows_C: Tensor,
        row_inputs: Sequence[Tensor],
        settings: Settings,
        memory: Sequence[Tensor],
        shape: tuple[int, int],
    ) -> None:
        # an unused place reads the last row
        self.source_C = rows_C.clamp(max=len(heads[0][0]) - 1)
        self.hidden = [head[0].index_select(0, self.source_C) for head in heads]
        self.heads, self.settings = heads, settings
        self.maths = Maths(*settings.maths[: len(Maths._fields)])
        self.labels_C, self.kind_C, self.drows_WC = row_inputs
        # tiles stand side by side in memory, so that rows of one are next to each other
        self.buffers = [flat[:-1].view(shape)[: len(rows_C)] for flat in memory]
        self.made: slice | None = None

    def tile(self, columns: slice) -> Rows:
        """The logits of some columns; made again unless they still are what the buffers hold."""
        logits = [buffer[:, : columns.stop - columns.start] for buffer in self.buffers]
        if self.made != columns:
            for x_CH, (_, weight, bias), z_CV in zip(self.hidden, self.heads, logits, strict=True):
                project(x_CH, weight[columns], bias[columns], z_CV)
            self.made = columns
        z_CV, *teachers_CV = logits
        labels_C = self.labels_C - columns.start
        V = z_CV.shape[1]
        return Rows(z_CV, teachers_CV, labels_C, self.kind_C, V, self.maths, self.settings.parts)

    def place(self, z_CV: Tensor) -> Tensor:
        """Where the gradient overwrites the logits: the head of each row if it is narrower."""
        dtype = gemm_dtype(self.hidden[0])
        return z_CV if dtype == z_CV.dtype else z_CV.view(dtype)[:, : z_CV.shape[1]]

    def read(self, tiles: Sequence[slice], wanted: bool) -> None:
        """Sum the rows up; of whole rows that `write` comes to next it reads and writes at once."""
        K, group = len(self.heads) - 1, self.settings.group
        self.run = ROW_FUNCTIONS[self.settings.backend]
        self.state_SC = self.buffers[0].new_empty(n_numbers(K), len(self.kind_C))
        whole = len(tiles) == 1 and not group
        self.steps = Steps(whole, whole and needs_second_reading(K, self.maths))
        if not whole:
            read_slices(self.run, functools.partial(map, self.tile, tiles), group, self.state_SC)
        elif not wanted:
            self.run(self.tile(tiles[0]), self.state_SC, self.steps)

    def write(self, columns: slice) -> Tensor:
        """The gradient of some columns, in the place of their logits."""
        rows = self.tile(columns)
        dz_CV = self.place(rows.student_NV)
        self.made = None
        self.run(rows, self.state_SC, self.steps._replace(grad=True), self.drows_WC, dz_CV)
        return dz_CV

    def terms(self) -> Tensor:
        """The rows' terms, (2 W, C), after all else."""
        return terms(self.state_SC, self.kind_C, self.maths, self.settings.parts)


def sweep(
    heads: Sequence[Sequence[Tensor]],
    row_inputs: Sequence[Tensor],
    settings: Settings,
    grads: Sequence[Tensor | None],
    make_chunk: Callable[..., Chunk] = Chunk,
) -> Tensor:
    """The terms of all rows, (2 W, N), and the wanted ones of dX, dW, db; dX is zeros on entry."""
    labels_N, kind_N, weight_WN = row_inputs
    x_NH, (W, N) = heads[0][0], weight_WN.shape
    sizes = Sizes(*settings.sizes)
    rows_R, R = live_rows(kind_N, sizes.max_rows)
    widths = [head[0].shape[1] for head in heads]
    C, size = chunk_size(R, widths, x_NH, settings.logits_dtype.itemsize, sizes)
    vocab = sizes.vocab
    size = size or max(vocab, 1)
    tiles = [slice(v, min(vocab, v + size)) for v in range(0, max(vocab, 1), size)]
    shape = (min(C, R), tiles[0].stop)
    memory = [x_NH.new_empty(math.prod(shape) + 1, dtype=settings.logits_dtype) for _ in heads]
    for flat in memory:
        advise_huge_pages(flat)
    sums = _Sums(grads, vocab if R else 0, not may_ask(x_NH.device))
    # row N: what an unused place reads (a row of no kind) and where it writes
    weight_WN, unscale = _fit_to_dtype(weight_WN, x_NH.dtype)
    padded = [F.pad(x, (0, 1)) for x in (labels_N, kind_N, weight_WN)]
    terms_TP = weight_WN.new_zeros(2 * W, N + 1, dtype=settings.logits_dtype)
    for rows_C in rows_R.split(C) if R else ():
        inputs_C = [x[..., rows_C] for x in padded]
        chunk = make_chunk(heads, rows_C, inputs_C, settings, memory, shape)
        chunk.read(tiles, sums.wanted)
        # backwards: the logits of the last tile are still there
        for columns in reversed(tiles) if sums.wanted else ():
            sums.add(chunk.write(columns), chunk.hidden[0], heads[0][1], columns)
        terms_TP[:, rows_C] = chunk.terms().to(terms_TP.dtype)
        sums.store_rows(rows_C, settings.group, unscale)
    sums.store(unscale)
    return terms_TP[:, :N]


def _fit_to_dtype(weight_WN: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Row weights times a power of two that keeps float16 gradients clear of its 6e-8 floor.

    A row's gradient is at most its weight and, on a close teacher, 1e-6 of it: 2^12 leaves both
    inside float16. The inverse goes onto the float32 sums.
    """
    if dtype != torch.float16:
        return weight_WN, None
    power = (12 - weight_WN.abs().amax().clamp(min=1e-30).log2()).floor()
    return weight_WN * power.exp2(), (-power).exp2()


def _in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` itself if it is of that dtype, else fresh memory of its shape."""
    if x.dtype == dtype:
        return x
    fresh = torch.empty_like(x, dtype=dtype)
    advise_huge_pages(fresh)
    return fresh


class _Sums:
    """dX, dW and db of (2) while the chunks come by; dW and db are summed wide.

    Chunks come with columns 0 .. vocab - 1 of dW and db; the others are 0.
    """

    def __init__(self, grads: Sequence[Tensor | None], vocab: int, padded: bool) -> None:
        self.grads, self.first_chunk = grads, True
        dx, *by_column = grads
        self.wanted = any(grad is not None for grad in grads)
        self.dx = F.pad(dx, (0, 0, 0, 1)) if dx is not None and padded else dx
        self.dw, self.db = (x if x is None else _in_dtype(x, acc_torch_dtype(x)) for x in by_column)
        # what is not is written by the first chunk: clearing 94 MiB takes as long as adding a chunk
        for total in (self.dw, self.db):
            if total is not None:
                total[vocab:].zero_()
        self.dx_CH: Tensor | None = None

    def add(self, dz_CV: Tensor, x_CH: Tensor, weight_VH: Tensor, columns: slice) -> None:
        acc = acc_torch_dtype(x_CH)
        if self.dx is not None:
            if self.dx_CH is None:
                self.dx_CH = x_CH.new_zeros(x_CH.shape, dtype=acc)
            add_dx(dz_CV, weight_VH[columns], self.dx_CH)
        if self.dw is not None:
            add_dw(dz_CV, x_CH, self.dw[columns], fresh=self.first_chunk)
        if self.db is not None:
            db = dz_CV.sum(0, dtype=acc)
            self.db[columns] = db if self.first_chunk else db.add_(self.db[columns])

    def store_rows(self, rows_C: Tensor, group: str, unscale: Tensor | None) -> None:
        """dX of the rows whose tiles have all been added, here and on the ranks of `group`."""
        self.first_chunk = False
        if self.dx is None or self.dx_CH is None:
            return
        if group:
            add_up(self.dx_CH, group)
        dx_CH = self.dx_CH if unscale is None else self.dx_CH * unscale
        self.dx.index_copy_(0, rows_C, dx_CH.to(self.dx.dtype))
        self.dx_CH = None

    def store(self, unscale: Tensor | None) -> None:
        dx, *by_column = self.grads
        if dx is not None and self.dx is not None and self.dx is not dx:
            dx.copy_(self.dx[:-1])
        for total, grad in zip((self.dw, self.db), by_column, strict=True):
            if total is None or grad is None:
                continue
            if unscale is not None:
                total *= unscale
            if total is not grad:
                grad.copy_(total)
