"""The options of the losses as keywords, for type checkers and editors.

The overloads of each loss name their own arguments, and take the rest from here.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from growkern.ops.loss.rows.label_options import LabelArguments

Divergence = Literal["forward", "reverse", "jsd"]
KLRows = Literal["labels", "all"]
Reduction = Literal["mean", "sum", "none"]
Tail = Literal["bucket", "renormalise"]
Number: TypeAlias = float | Tensor


class RowKeywords(LabelArguments, total=False):
    """Options of every loss."""

    alpha: Number
    temperature: float
    divergence: Divergence
    beta: float | None
    ignore_index: int
    kl_rows: KLRows | Tensor
    teacher_weights: Sequence[float] | None
    vocab_size: int | None
    row_weights: Tensor | None
    softcap: float | None
    reduction: Reduction
    num_items: Number | tuple[Number, Number] | None
    group: dist.ProcessGroup | None
    vocab_start: int | None
    backend: str | None


class LogitKeywords(RowKeywords, total=False):
    """Options of `kl_mlm_loss`."""

    teacher_softcap: float | None


class HeadKeywords(RowKeywords, total=False):
    """Options of the losses that compute the logits themselves."""

    student_bias: Tensor | None
    chunk_bytes: int | None
    max_rows: int | None
    vocab_tile: int | None
    logits_dtype: torch.dtype | None


class LinearKeywords(HeadKeywords, total=False):
    """Options of `linear_kl_mlm_loss`."""

    teacher_bias: Tensor | Sequence[Tensor | None] | None
    teacher_softcap: float | None


class TopKKeywords(HeadKeywords, total=False):
    """Options of `topk_kl_mlm_loss`."""

    tail: Tail


class InheritedKeywords(LabelArguments, total=False):
    """Options of `inherited_loss`."""

    alpha: Number
    temperature: float
    num_items: Number | tuple[Number, Number] | None
    divergence: Divergence
    beta: float | None
    kl_rows: KLRows
    teacher_weights: Sequence[float] | None
    row_weights: Tensor | None
    vocab_size: int | None
    max_rows: int | None
    causal: bool | None
