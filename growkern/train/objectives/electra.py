"""ELECTRA's replaced-token detection (Clark et al. 2020): its two models as one, and its batches.

Some tokens x_m are replaced by the mask token. The generator predicts them, and x_m is replaced by
a token that is drawn from its prediction. The discriminator tells for each token whether it is the
original one. A replacement that equals the original counts as original.

    loss = mean over m of -log p_G(x_m)  +  50 * mean over all real tokens of BCE_D        (1)

No gradient passes through the drawing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining
from transformers.models.electra.modeling_electra import ElectraPreTrainedModel
from transformers.utils import ModelOutput

from growkern.errors import GrowthError
from growkern.growth.source.loading import load_model
from growkern.train.model.head import IGNORE_INDEX
from growkern.train.objectives.language_modeling import MaskedLMCollator, mix

GENERATOR = "generator"
# keys of a batch
ORIGINAL, UNIFORMS = "original_ids", "uniforms"
# bits of a float32 below 1
BITS = 24
SHARED = ("word_embeddings", "position_embeddings", "token_type_embeddings")
# logits that are made at once while replacements are drawn
MOST_LOGITS = 1 << 24


@dataclass
class ReplacedTokenOutput(ModelOutput):
    """The predictions of both models.

    Attributes:
        logits: of the generator, (B, S, V).
        detection_logits: of the discriminator, (B, S) float; above 0 for "replaced".
        corrupted_ids: the tokens that the discriminator read, (B, S) int64.
    """

    logits: Tensor | None = None
    detection_logits: Tensor | None = None
    corrupted_ids: Tensor | None = None


class ReplacedTokenDetection(ElectraPreTrainedModel):
    """Two models that train together: the generator fills masks, the discriminator finds the fakes.

    `save_pretrained` writes two ordinary directories: the discriminator, and in it the folder
    "generator".

    Args:
        generator: an `ElectraForMaskedLM`.
        discriminator: an `ElectraForPreTraining` with the same vocabulary.
        shared_embeddings: whether both use one table for tokens, positions and token types. The
            generator gets that of the discriminator. The embeddings must have one size.

    Raises:
        GrowthError: the two do not fit together.
    """

    config_class = ElectraConfig

    def __init__(
        self, generator: Any, discriminator: Any, *, shared_embeddings: bool = False
    ) -> None:
        for name, model, kind in (
            ("generator", generator, ElectraForMaskedLM),
            ("discriminator", discriminator, ElectraForPreTraining),
        ):
            if not isinstance(model, kind):
                raise GrowthError(
                    f"the {name} of replaced-token detection is a {type(model).__name__}: give an "
                    f"{kind.__name__}"
                )
        super().__init__(discriminator.config)
        # the config's directory is that of the discriminator alone, and so is its growth
        self.name_or_path = ""
        check_pair(generator.config, discriminator.config, shared_embeddings=shared_embeddings)
        self.generator, self.discriminator = generator, discriminator
        self.shared_embeddings = shared_embeddings
        # each of the two keeps its own
        self.all_tied_weights_keys: dict[str, str] = {}
        if shared_embeddings:
            own, taken = (model.electra.embeddings for model in (generator, discriminator))
            for name in SHARED:
                getattr(own, name).weight = getattr(taken, name).weight
            generator.tie_weights()

    def get_input_embeddings(self) -> nn.Module:
        """The token embeddings of the discriminator."""
        return self.discriminator.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        """The output projection of the generator."""
        return self.generator.get_output_embeddings()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        original_ids: Tensor | None = None,
        uniforms: Tensor | None = None,
    ) -> ReplacedTokenOutput:
        """Run the generator, replace the masked tokens by drawn ones, and run the discriminator.

        Args:
            input_ids: (B, S) int64, with masks.
            attention_mask, token_type_ids: (B, S), as in transformers.
            original_ids: (B, S) int64, the tokens without masks. Where they differ from the inputs,
                a replacement is drawn. None replaces nothing.
            uniforms: (B, S) float in [0, 1), the random numbers to draw with.
        """
        shared = {"attention_mask": attention_mask, "token_type_ids": token_type_ids}
        corrupted_BS = input_ids
        if original_ids is None:
            outputs = self.generator(input_ids=input_ids, **shared)
        else:
            corrupted_BS, masked_BS = original_ids.clone(), original_ids != input_ids

            def replace(head: Any, args: tuple[Tensor]) -> None:
                # the trainer's loss may take the place of the logits, so they are made here again
                uniforms_N = None if uniforms is None else uniforms[masked_BS]
                drawn_N = draw(args[0][masked_BS], head.weight, head.bias, uniforms_N)
                corrupted_BS[masked_BS] = drawn_N

            hook = self.get_output_embeddings().register_forward_pre_hook(replace)
            try:
                outputs = self.generator(input_ids=input_ids, **shared)
            finally:
                hook.remove()
        detection = self.discriminator(input_ids=corrupted_BS, **shared)
        return ReplacedTokenOutput(outputs.logits, detection.logits, corrupted_BS)

    def save_pretrained(self, save_directory: str | os.PathLike[str], **options: Any) -> None:
        """Write both models. Options are those of transformers; a state dict is not used."""
        options.pop("state_dict", None)
        self.discriminator.save_pretrained(save_directory, **options)
        self.generator.save_pretrained(Path(save_directory) / GENERATOR, **options)

    def load_both(self, directory: Path) -> None:
        """Read the weights of both models in place, as `save_pretrained` wrote them.

        Raises:
            GrowthError: a model is missing or another one.
        """
        for model, place in (
            (self.discriminator, directory),
            (self.generator, directory / GENERATOR),
        ):
            model.load_state_dict(load_model(place).state_dict())


def check_pair(generator: Any, discriminator: Any, *, shared_embeddings: bool) -> None:
    """Check that the configs of two models can train together."""
    sizes = ["vocab_size"]
    if shared_embeddings:
        sizes += ["embedding_size", "max_position_embeddings", "type_vocab_size"]
    for name in sizes:
        own, other = (getattr(config, name) for config in (generator, discriminator))
        if own != other:
            hint = "" if name == "vocab_size" else ", or leave model.shared_embeddings out"
            raise GrowthError(
                f"generator and discriminator differ in {name} ({own} and {other}): give models "
                f"with the same one{hint}"
            )


@torch.no_grad()
def draw(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, uniforms_N: Tensor | None
) -> Tensor:
    """Draw a token from the prediction for each row, (N,) int64. Only some logits exist at a time.

    Args:
        hidden_NH: inputs of the output projection.
        uniforms_N: in [0, 1): the token is the first whose cumulative probability is larger. None
            draws numbers from PyTorch's generator.
    """
    if uniforms_N is None:
        uniforms_N = torch.rand(len(hidden_NH), device=hidden_NH.device)
    rows = max(1, MOST_LOGITS // len(weight_VH))
    drawn = []
    for hidden, uniforms in zip(hidden_NH.split(rows), uniforms_N.split(rows), strict=True):
        z_NV = F.linear(hidden, weight_VH, bias_V)
        total_NV = z_NV.double().softmax(-1).cumsum(-1)
        sought_N1 = uniforms.double()[:, None] * total_NV[:, -1:]
        found_N1 = torch.searchsorted(total_NV, sought_N1, right=True)
        # rounding may leave the last probability a little too small
        drawn.append(found_N1[:, 0].clamp(max=len(weight_VH) - 1))
    return torch.cat(drawn)


class ReplacedTokenCollator(MaskedLMCollator):
    """Makes {input_ids, labels, original_ids, uniforms} from blocks, for a generator.

    All chosen tokens become the mask token. `uniforms` are random numbers in [0, 1), from which the
    replacements are drawn. They depend on the seed, the epoch and the row, like the masks.
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
