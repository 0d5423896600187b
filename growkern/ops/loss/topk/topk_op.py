"""The custom op of the top-k loss: the sweep of the linear loss, with a few tokens per teacher.

Equations are numbered in `topk_kl_mlm_loss.py`. Shape letters used in this file: N rows, C rows of
one chunk, V columns of a tile, H width, k entries of one teacher, U tokens of all of them.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, library

from growkern.ops.backend import NAMESPACE, Rules
from growkern.ops.loss.linear.heads import Head, some_rows
from growkern.ops.loss.linear.linear_op import (
    SCHEMA,
    Chunk,
    arguments_of,
    backward_of,
    fake_of_op,
    setup_context,
    swept,
)
from growkern.ops.loss.rows.on_cpu import tail_gradient_on_cpu
from growkern.ops.loss.rows.rows_op import ROW_FUNCTIONS
from growkern.ops.loss.rows.state import (
    KL_ROW,
    RowInputs,
    Rows,
    Steps,
    n_numbers,
    read_slices,
    unpack,
)
from growkern.ops.loss.rows.vocab_parallel import largest
from growkern.ops.loss.topk.buckets import Kept, solve, union
from growkern.ops.loss.topk.tail_on_triton import tail_gradient_on_triton
from growkern.ops.loss.topk.teacher import check_topk_values, teacher_probabilities

TAIL_GRADIENTS = {"cpu": tail_gradient_on_cpu, "triton": tail_gradient_on_triton}

# ----------------------------------------------------------------------- op


@library.custom_op(f"{NAMESPACE}::topk_kl_mlm", mutates_args=(), schema=SCHEMA)
def topk_kl_mlm_op(
    student: list[Tensor], teachers: list[Tensor], *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `linear_kl_mlm_op`, with ids and log-probs of each teacher.

    Ids count the columns of all ranks, labels those of this rank.
    """
    *rows, _, settings = arguments_of(others)
    for pair in _pairs(teachers):
        check_topk_values(pair, rows[1], settings.sizes.total, settings.drop_tail)
    make_chunk = functools.partial(_TopkChunk, teachers)
    return swept([Head(*student)], RowInputs(*rows), settings, make_chunk)


def _pairs(topk: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    return [topk[j : j + 2] for j in range(0, len(topk), 2)]


class _TopkChunk(Chunk):
    """Some rows, whose logits of the teachers' tokens are kept apart from those of the tail.

    With -inf at the tokens the tail is read like any slice, and 1 - sum is never computed.
    """

    # the logits of the tokens are read apart from their rows
    biases_at_rows = ()

    def __init__(self, topk: Sequence[Tensor], *linear: Any) -> None:
        super().__init__(*linear)
        *_, memory, _ = linear
        self.flat, self.maths, self.sizes = memory[0], self.settings.maths, self.settings.sizes
        kl_C = (self.kind_C & KL_ROW) > 0
        known = [
            teacher_probabilities(
                [some_rows(x, self.rows_C) for x in pair], kl_C, self.sizes.total,
                self.settings.drop_tail, self.maths,
            )
            for pair in _pairs(topk)
        ]  # fmt: skip
        self.ids_CU, places = union([ids for ids, _, _ in known])
        self.z_CU = self.flat.new_full(self.ids_CU.shape, -math.inf)
        self.kept = [
            Kept(ids, place, log_p, log_tail)
            for (ids, log_p, log_tail), place in zip(known, places, strict=True)
        ]

    def tile(self, columns: slice) -> Rows:
        is_new = self.computed != columns
        rows = super().tile(columns)
        if is_new:
            # before -inf marks the tokens: its cap would be a finite number
            self.maths.cap_(rows.student_NV)
        return rows

    def _places(self, columns: slice, x_CV: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Positions of the tokens in `flat`, the memory of `x_CV`, and which tokens are there.

        The other tokens get the position of its last number, which is never used.
        """
        v_CU = self.ids_CU - (self.sizes.start + columns.start)
        is_here_CU = (v_CU >= 0) & (v_CU < x_CV.shape[1])
        row_C1 = torch.arange(len(x_CV), device=x_CV.device)[:, None] * x_CV.stride(0)
        return torch.where(is_here_CU, row_C1 + v_CU, flat.numel() - 1), is_here_CU

    def _tail(self, columns: slice) -> Rows:
        """The logits of some columns with -inf at the tokens; their logits go to `z_CU`."""
        rows = self.tile(columns)
        if self.maths.sums_logits():
            self.sum_z_C = rows.student_NV.sum(-1)
        place_CU, is_here_CU = self._places(columns, rows.student_NV, self.flat)
        self.z_CU = torch.where(is_here_CU, self.flat[place_CU], self.z_CU)
        self.flat.index_fill_(0, place_CU.flatten(), -math.inf)
        return rows._replace(maths=self.maths.of_capped_logits())

    def _sums(self, rows: Rows, state_SC: Tensor, steps: Steps) -> None:
        ROW_FUNCTIONS[self.settings.backend](rows, state_SC, steps)
        if self.maths.sums_logits():
            unpack(state_SC).student.sum_z.copy_(self.sum_z_C)

    def read(self, tiles: Sequence[slice], wanted: bool) -> None:
        group = self.settings.group
        tail_SC = self.flat.new_empty(n_numbers(0), len(self.kind_C))
        read_slices(self._sums, functools.partial(map, self._tail, tiles), group, tail_SC)
        if group:
            largest(self.z_CU, group)
        rows = RowInputs(self.labels_C + self.sizes.start, self.kind_C, self.drows_WC)
        self.solved = solve(
            tail_SC, (self.ids_CU, self.z_CU), self.kept, rows, self.maths, self.settings.parts
        )

    def write(self, columns: slice) -> Tensor:
        rows, (_, tail_5C, tokens_CU) = self.tile(columns), self.solved
        dz_CV = self.place(rows.student_NV)
        self.computed = None
        TAIL_GRADIENTS[self.settings.backend](rows, tail_5C.to(rows.student_NV.dtype), dz_CV)
        flat = self.flat.view(dz_CV.dtype) if self.room is None else self.room
        if self.maths.is_capped():
            tokens_CU = tokens_CU * self.maths.slope_of_cap(self.z_CU)
        place_CU, _ = self._places(columns, dz_CV, flat)
        # on a CPU scatter_ would copy all of a narrow `flat`
        flat[place_CU] = tokens_CU.to(flat.dtype)
        return dz_CV

    def result(self) -> Tensor:
        return self.solved.terms_TC

    def terms(self, terms_TR: Tensor, _: Tensor) -> Tensor:
        return terms_TR


topk_kl_mlm_op.register_fake(fake_of_op)
TOPK_KL_MLM = Rules(topk_kl_mlm_op, backward_of(topk_kl_mlm_op), setup_context)
topk_kl_mlm_op.register_autograd(TOPK_KL_MLM.backward, setup_context=setup_context)
