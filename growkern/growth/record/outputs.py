"""Source and grown model on the same tokens: what a user would see of a growth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import nll_loss
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES

from growkern.errors import GrowthError
from growkern.growth.models import untrained_model
from growkern.growth.plan.blueprint import Blueprint
from growkern.growth.source.files import METADATA_FILE
from growkern.growth.source.source import Source


def random_tokens(source: Source) -> Tensor:
    rng = torch.Generator().manual_seed(0)
    vocabulary = source.spec.size("vocab")
    tokens = torch.randint(vocabulary, (4, min(32, longest(source))), generator=rng)
    end = source.config.eos_token_id
    if source.config.is_encoder_decoder and isinstance(end, int):
        # heads that classify look for the one end of the text
        tokens = torch.where(tokens == end, (end + 1) % vocabulary, tokens)
        tokens[:, -1] = end
    return tokens


def longest(source: Source) -> int:
    """Most positions the source takes; 2^30 where there is no limit."""
    known = source.spec.family.config
    if "positions" in known:
        return source.spec.size("positions") - known["positions"].reserved
    # relative positions know no end
    return int(getattr(source.config, "max_position_embeddings", 1 << 30))


def check_tokens(source: Source, tokens: Tensor) -> None:
    vocabulary = source.spec.size("vocab")
    if tokens.ndim != 2 or not tokens.numel() or tokens.shape[1] > longest(source):
        raise GrowthError(
            f"tokens are {list(tokens.shape)}; expected (batch, length) with length 1 to "
            f"{longest(source)}"
        )
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise GrowthError(f"tokens hold ids outside 0 .. {vocabulary - 1}")


def load_model(model: Any, **how: Any) -> Any:
    """A checkpoint directory as the class it names, float32, for evaluation; models as they are."""
    if isinstance(model, (str, Path)):
        config = transformers.AutoConfig.from_pretrained(model)
        model_class = getattr(transformers, config.architectures[0])
        return model_class.from_pretrained(model, dtype=torch.float32, **how).eval()
    return model


def load_source(source: Source, given: Any) -> Any:
    """The model that `source` was opened from: `given`, a model or a directory of either kind."""
    if source.directory is None or not (source.directory / METADATA_FILE).is_file():
        return load_model(given)
    # transformers reads no distributed checkpoint
    model = untrained_model(source.spec, torch.float32)
    state = {name: source.read(name).to(torch.float32) for name in source.dtypes}
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    return model.eval()


@torch.no_grad()
def compare_outputs(
    plan: Blueprint, source: Any, grown: Any, tokens: Tensor, labels: Tensor | None = None
) -> dict[str, float]:
    """Outputs of both models on (batch, length) ids, in evaluation mode.

    Returns:
        "relative error": largest absolute difference over the largest absolute output; for models
        with a vocabulary head also "KL (nats)", "top-1 agreement" and, given labels, "source loss"
        and "grown loss".
    """
    old, new = _outputs(source, tokens), _outputs(grown, tokens)
    if old.shape != new.shape:
        new = source_coordinates(plan, new, old.shape[-1])
    result = {"relative error": ((new - old).abs().max() / old.abs().max()).item()}
    if old.shape[-1] == plan.small.size("vocab"):
        log_p, log_q = old.log_softmax(-1), new.log_softmax(-1)
        result["KL (nats)"] = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
        result["top-1 agreement"] = (old.argmax(-1) == new.argmax(-1)).double().mean().item()
        if labels is not None:
            for name, log_probs in (("source loss", log_p), ("grown loss", log_q)):
                result[name] = nll_loss(log_probs.flatten(0, 1), labels.flatten()).item()
    return result


def source_coordinates(plan: Blueprint, grown: Tensor, size: int) -> Tensor:
    """The first `size` entries of a grown output, as the source would give them."""
    name = plan.small.output_space
    if grown.shape[-1] != plan.layout.space(name).target:
        # logits of a larger vocabulary
        return grown[..., :size]
    return grown[..., :size] / plan.layout.space(name).write[:size]


def _outputs(model: Any, tokens: Tensor) -> Tensor:
    was_training = model.training
    inputs = {"input_ids": tokens.to(model.device)}
    if type(model).__name__ in MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES.values():
        # the rows are the choices of one question
        inputs = {"input_ids": inputs["input_ids"][None]}
    # an encoder alone has the config of both
    if model.config.is_encoder_decoder and hasattr(model, "get_decoder"):
        inputs["decoder_input_ids"] = inputs["input_ids"]
    output = model.eval()(**inputs)
    model.train(was_training)
    for name in ("logits", "prediction_logits", "start_logits", "last_hidden_state"):
        if getattr(output, name, None) is not None:
            return getattr(output, name).double().cpu()
    raise GrowthError(f"{type(model).__name__} returns neither logits nor hidden states")
