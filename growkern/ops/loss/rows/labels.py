"""Rows as the doors of the loss take them: labels inside the vocabulary, masks and weights.

Shape letters used in this file: N rows (tokens), K teachers, L ranks that hold
slices of the vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, library

from growkern.errors import GrowthError
from growkern.ops.backend.launch import acc_torch_dtype
from growkern.ops.loss.rows.options import KL_ROW, MLM_ROW, Options
from growkern.ops.loss.rows.vocab_parallel import Shard, gather


def check_labels(labels: Tensor, rows: torch.Size, what: str, ignore_index: int) -> Tensor:
    """Labels as int64 (N,)."""
    if not isinstance(labels, Tensor):
        raise GrowthError(f"labels must be a tensor, got {type(labels).__name__}")
    if labels.shape != rows:
        raise GrowthError(
            f"labels {tuple(labels.shape)} must match the rows {tuple(rows)} of {what}; this op "
            "does not shift: align causal labels before the call"
        )
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise GrowthError(f"labels must be integer token ids, got {labels.dtype}")
    if not isinstance(ignore_index, int):
        raise GrowthError(f"ignore_index must be an integer, got {ignore_index!r}")
    return labels.reshape(-1).long()


def row_kinds(
    labels_N: Tensor, kl_rows: str | Tensor, ignore_index: int, options: Options
) -> Tensor:
    """Bits MLM_ROW and KL_ROW per row, (N,) int32."""
    labelled_N = labels_N != ignore_index
    if isinstance(kl_rows, Tensor):
        if kl_rows.dtype != torch.bool or kl_rows.numel() != labels_N.numel():
            raise GrowthError(
                f"kl_rows must be a bool mask of the labels' shape ({labels_N.numel()} rows), got "
                f"{kl_rows.dtype} {tuple(kl_rows.shape)}"
            )
        kl_N = kl_rows.reshape(-1)
    elif kl_rows in ("labels", "all"):
        kl_N = labelled_N if kl_rows == "labels" else torch.ones_like(labelled_N)
    else:
        raise GrowthError(f"kl_rows must be 'labels', 'all' or a bool mask, got {kl_rows!r}")
    kind_N = torch.zeros_like(labels_N, dtype=torch.int32)
    # at alpha = 1 the labels weigh nothing: no CE work unless it is to be reported
    if isinstance(options.alpha, Tensor) or options.alpha < 1 or options.parts:
        kind_N += MLM_ROW * labelled_N.int()
    if options.teacher_weights:
        if isinstance(options.alpha, Tensor):
            # at 0 the term is gone, also where it is infinite
            kl_N = kl_N & (options.alpha.to(kl_N.device) != 0)
        kind_N += KL_ROW * kl_N.int()
    return kind_N


def check_row_weights(weights: Tensor | None, labels: Tensor) -> Tensor | None:
    """Row weights as (N,)."""
    if weights is None:
        return None
    if weights.shape != labels.shape or not weights.is_floating_point() or weights.requires_grad:
        raise GrowthError(
            f"row_weights must be a float tensor of the labels' shape {tuple(labels.shape)} "
            f"without gradient, got {weights.dtype} {tuple(weights.shape)}"
        )
    return weights.reshape(-1)


def term_weights(kind_N: Tensor, options: Options, dtype: torch.dtype) -> Tensor:
    """What each row's MLM and each teacher's KL (before T^2) count for in the loss, (1 + K, N)."""
    mlm_N, kl_N = (kind_N & MLM_ROW) > 0, (kind_N & KL_ROW) > 0
    n_mlm: Any = 1
    n_kl: Any = 1
    if options.reduction == "mean":
        if options.num_items is None:
            n_mlm, n_kl = mlm_N.sum().clamp(min=1), kl_N.sum().clamp(min=1)
        elif isinstance(options.num_items, (tuple, list)):
            n_mlm, n_kl = options.num_items
        else:
            n_mlm = n_kl = options.num_items
    alpha = options.alpha
    if isinstance(alpha, Tensor):
        alpha = alpha.to(device=kind_N.device, dtype=dtype)
    row_N = 1 if options.row_weights is None else options.row_weights.to(dtype)
    one_N = torch.ones_like(kind_N, dtype=dtype)
    # not a product: a count of 0, of a batch without a row, must not make 0 / 0 of it
    weights = [torch.where(mlm_N, one_N * row_N * (1 - alpha) / n_mlm, 0)]
    kl_weight_N = torch.where(kl_N, one_N * row_N * alpha / n_kl, 0)
    weights += [kl_weight_N * (w * options.maths.temperature**2) for w in options.teacher_weights]
    return torch.stack(weights).to(dtype)


def row_inputs(
    labels: Tensor,
    hidden: Tensor,
    kl_rows: str | Tensor,
    ignore_index: int,
    options: Options,
    vocab: int,
    shard: Shard,
) -> tuple[Tensor, Tensor, Tensor]:
    """Checked labels (N,) as columns of the slice that is here, kinds (N,), weights (1 + K, N).

    `vocab` counts the columns here; the weights have the dtype rows of `hidden` are summed in.
    """
    labels_N = check_labels(labels, hidden.shape[:-1], "student_hidden", ignore_index)
    kind_N = row_kinds(labels_N, kl_rows, ignore_index, options)
    labels_N = checked_labels(labels_N, kind_N, shard.vocab or vocab, shard.group)
    labels_N = labels_N - shard.start
    return labels_N, kind_N, term_weights(kind_N, options, acc_torch_dtype(hidden))


# an op, so that the values are looked at in a compiled graph too
@library.custom_op("growkern::checked_labels", mutates_args=())
def checked_labels(labels_N: Tensor, kind_N: Tensor, vocab: int, group: str) -> Tensor:
    """The labels again, (N,) int64; `vocab` counts the columns of all ranks of `group`.

    Raises:
        GrowthError: on a CPU, when the label of a row with an MLM term is not in 0..vocab-1, or
            the ranks have other rows. On a GPU nothing waits for the answers: a failed device
            assertion, as of PyTorch's own losses.
    """
    on_cpu = labels_N.device.type == "cpu"
    if group:
        counts_L2 = _counts(labels_N, group)
        is_same = (counts_L2 == counts_L2[:1]).all()
        if on_cpu and not is_same:
            raise GrowthError(
                f"the ranks of the group have other rows ({counts_L2[:, 0].tolist()} of them) or "
                "labels: all give the same rows. FSDP gives each its own: gather its head, by a "
                "call from the forward of a module that fully_shard wraps"
            )
        torch._assert_async(is_same, "the ranks of the group have other rows or labels")
    inside_N = ((labels_N >= 0) & (labels_N < vocab)) | ((kind_N & MLM_ROW) == 0)
    if on_cpu and not inside_N.all():
        row = int((~inside_N).nonzero()[0])
        raise GrowthError(
            f"the label of row {row} is {int(labels_N[row])}, outside 0..{vocab - 1}: give rows "
            "without a label ignore_index"
        )
    torch._assert_async(inside_N.all(), f"a label is outside 0..{vocab - 1}")
    return labels_N.clone()


@checked_labels.register_fake
def _(labels_N, kind_N, vocab, group) -> Tensor:
    return torch.empty_like(labels_N)


def _counts(labels_N: Tensor, group: str) -> Tensor:
    """How many rows each rank has, and a sum that tells their labels apart, (L, 2) int64."""
    order_N = torch.arange(1, 2 * len(labels_N), 2, device=labels_N.device)
    mine_2 = torch.stack([torch.ones_like(labels_N).sum(), (labels_N * order_N).sum()])
    return gather(mine_2, group)
