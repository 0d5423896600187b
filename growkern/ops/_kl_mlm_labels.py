"""Labels as the doors of the loss take them: one integer per row, inside the vocabulary.

Shape letters used in this file: N rows (tokens).
"""

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.ops._kl_mlm_options import MLM_ROW


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
@torch.library.custom_op("growkern::inside_vocabulary", mutates_args=())
def inside_vocabulary(labels_N: Tensor, kind_N: Tensor, vocab: int) -> Tensor:
    """The labels again, (N,) int64.

    Raises:
        GrowthError: on a CPU, when the label of a row with an MLM term is not in 0..vocab-1. On a
            GPU nothing waits for the answer: a failed device assertion, as of PyTorch's own losses.
    """
    inside_N = ((labels_N >= 0) & (labels_N < vocab)) | ((kind_N & MLM_ROW) == 0)
    if labels_N.device.type != "cpu":
        torch._assert_async(inside_N.all(), f"a label is outside 0..{vocab - 1}")
    elif not inside_N.all():
        row = int((~inside_N).nonzero()[0])
        raise GrowthError(
            f"the label of row {row} is {int(labels_N[row])}, outside 0..{vocab - 1}: give rows "
            "without a label ignore_index"
        )
    return labels_N.clone()


@inside_vocabulary.register_fake
def _(labels_N, kind_N, vocab) -> Tensor:
    return torch.empty_like(labels_N)
