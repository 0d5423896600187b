"""Counts the FLOPs of a run by its real tokens, so that no padding is counted.

The padding of a batch depends on the rows that one process gets. The FLOPs of the real tokens are
the same on any number of processes.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from growkern.train.loss.rows import DECODER_MASK
from growkern.train.model.flops import Sizes
from growkern.train.model.head import IGNORE_INDEX


class Passes:
    """Batches that a model has passed, counted when their FLOPs are asked for.

    The sizes stay on the device of the batch until then: the CPU must not wait for them.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[Sizes], float], Tensor, int | None]] = []

    def add(self, flops: Callable[[Sizes], float], sizes: Tensor, apart: int | None) -> None:
        """Add a batch.

        Args:
            flops: of a batch of given sizes.
            sizes: from `real_sizes`.
            apart: the last of `Sizes`.
        """
        self._waiting.append((flops, sizes, apart))

    def drain(self) -> float:
        """The FLOPs since the last call."""
        if not self._waiting:
            return 0.0
        rows = torch.stack([sizes for _, sizes, _ in self._waiting]).tolist()
        total = sum(
            flops(Sizes(*row)._replace(apart=apart))
            for (flops, _, apart), row in zip(self._waiting, rows, strict=True)
        )
        self._waiting.clear()
        return total


def real_sizes(batch: Mapping[str, Any], name: str, *, decoder: bool) -> Tensor:
    """The sizes of a batch without its padding: all of `Sizes` but the last, (6,) int64.

    Args:
        batch: a row without a mask counts whole. A decoder's row without a mask ends with its last
            label.
        name: key of the tokens.
        decoder: whether the labels belong to a decoder beside an encoder.
    """
    tokens_BS = batch[name]
    lengths_B = others_B = _lengths(batch.get("attention_mask"), torch.ones_like(tokens_BS))
    if decoder:
        others_B = _lengths(batch.get(DECODER_MASK), batch["labels"] != IGNORE_INDEX)
    return torch.stack(
        [
            torch.tensor(len(tokens_BS), device=tokens_BS.device),
            lengths_B.sum(),
            others_B.sum(),
            lengths_B.square().sum(),
            others_B.square().sum(),
            (lengths_B * others_B).sum(),
        ]
    )


def _lengths(mask_BS: Any, marked_BS: Tensor) -> Tensor:
    """The real tokens of each row by its mask. Without a mask a row ends with its last mark."""
    if isinstance(mask_BS, Tensor) and mask_BS.shape == marked_BS.shape:
        return mask_BS.ne(0).sum(1)
    ends_S = torch.arange(1, marked_BS.shape[1] + 1, device=marked_BS.device)
    return (marked_BS.ne(0) * ends_S).amax(1)
