"""ELECTRA's replaced-token detection (Clark et al. 2020): batches, and the discriminator's loss.

Some tokens x_m are replaced by the mask token. The generator predicts them, and x_m is replaced by
a token that is drawn from its prediction. The discriminator tells for each token whether it is the
original one. A replacement that equals the original counts as original.

    loss = mean over m of -log p_G(x_m)  +  50 * mean over all real tokens of BCE_D        (1)

No gradient passes through the drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from growkern.train.model.head import IGNORE_INDEX
from growkern.train.objectives.language_modeling import MaskedLMCollator, mix
from growkern.train.objectives.side_loss import SideParts

ORIGINAL, UNIFORMS = "original_ids", "uniforms"
# bits of a float32 below 1
BITS = 24


class ReplacedTokenCollator(MaskedLMCollator):
    """Makes {input_ids, labels, original_ids, uniforms} from blocks, for a generator.

    All chosen tokens become the mask token. `uniforms` are random numbers in [0, 1), from which the
    replacements are drawn. They depend on the seed, the epoch and the row, like the masks.

    Args:
        tokenizer, probability, seed: as in `MaskedLMCollator`.
    """

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = super().__call__(features)
        masked_BS = batch["labels"] != IGNORE_INDEX
        original_BS = torch.where(masked_BS, batch["labels"], batch["input_ids"])
        # mixed twice: the masks come from the same bits, mixed once and not at all
        bits_BS = mix(mix(self.bits_of(features, original_BS.shape[1])) + np.uint64(1))
        uniforms_BS = (bits_BS >> np.uint64(64 - BITS)).astype(np.float32) / np.float32(2**BITS)
        return {
            **batch,
            "input_ids": original_BS.masked_fill(masked_BS, self.mask_id),
            ORIGINAL: original_BS,
            UNIFORMS: torch.from_numpy(uniforms_BS),
        }


class DetectionLoss:
    """The binary cross-entropy of the discriminator, over all real tokens."""

    name: str = "rtd"
    weight: float = 50.0
    keys: tuple[str, ...] = (ORIGINAL, UNIFORMS)
    about: str = (
        "the generator's masked tokens through the fused loss, and 50 times the binary "
        "cross-entropy of the discriminator, which the fused loss does not fit, added plainly"
    )

    def count(self, batch: dict[str, Any]) -> Tensor:
        """The number of real tokens of a batch."""
        return _real(batch).sum()

    def take(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """The original tokens and the mask of real ones. The model takes both as well."""
        return {"original_BS": inputs[ORIGINAL], "real_BS": _real(inputs)}

    def losses(self, outputs: Any, targets: dict[str, Tensor]) -> SideParts:
        """The loss of each example, summed over its tokens."""
        logits_BS, real_BS = outputs.detection_logits.float(), targets["real_BS"]
        replaced_BS = outputs.corrupted_ids != targets["original_BS"]
        losses_BS = F.binary_cross_entropy_with_logits(
            logits_BS, replaced_BS.float(), reduction="none"
        )
        correct_BS = ((logits_BS > 0) == replaced_BS) & real_BS
        return SideParts((losses_BS * real_BS).sum(1), correct_BS.sum(1), real_BS.sum(1))


def _real(batch: dict[str, Any]) -> Tensor:
    mask_BS = batch.get("attention_mask")
    return torch.ones_like(batch[ORIGINAL], dtype=torch.bool) if mask_BS is None else mask_BS.bool()
