"""Labels as the doors of the loss take them: one integer per row, inside the vocabulary.

Shape letters used in this file: N rows (tokens), L ranks of a vocabulary-parallel group.
"""

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.ops._kl_mlm_options import MLM_ROW
from growkern.ops._vocab_parallel import gather


def check_labels(labels: Tensor, rows: torch.Size, what: str, ignore_index: int) -> Tensor:
    """Labels as int64 (N,)."""
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


# an op, so that the values are looked at in a compiled graph too
@torch.library.custom_op("growkern::checked_labels", mutates_args=())
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
