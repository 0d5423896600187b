"""Runs sources as models, in float64 where a real difference must stand out."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from growkern.errors import GrowthError, listed
from growkern.families import ModelSpec
from growkern.growth import models
from growkern.growth.source import Source

# parameters of a model that may be copied to float64
LARGEST = 50_000_000
# outputs of models, the main one first
OUTPUTS = (
    *("logits", "prediction_logits", "start_logits", "last_hidden_state"),
    *("end_logits", "seq_relationship_logits", "mc_logits", "reconstruction"),
    *("logits_per_image", "image_embeds", "text_embeds"),
)


class Float64(TorchFunctionMode):
    """Redirects casts to float32 to float64: models cast norms, rotary tables and softmax."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            # a copy, as of a model in 16 bits: complex views of rotary pairs need plain strides
            return args[0].to(torch.float64, copy=True)
        if func in (torch.Tensor.to, torch.Tensor.type):
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def fits(source: Source, most: int = LARGEST) -> bool:
    """True if `as_model` may copy this model: it is small, plain, and not spread over ranks."""
    if sum(map(math.prod, source.spec.shapes.values())) > most:
        return False
    first = source.read(next(iter(source.dtypes)))
    return not models.is_dtensor(first) and not first.is_meta


def as_model(source: Source, dtype: torch.dtype = torch.float64) -> Any:
    """A source as a model in this dtype and in evaluation mode, on the source's device.

    A dense model that becomes a mixture is run as it is.
    """
    source = source.stored
    # constants such as Gemma's root of the hidden size stay rounded to the source's dtype
    model = models.untrained_model(source.spec, source.dtype)
    state = models.computed_tensors(source.spec)
    state |= {name: source.read(name).to(dtype) for name in source.dtypes}
    if source.spec.stored:
        # transformers makes tensors of other names of these
        whole = type(model).from_pretrained(source.directory, dtype=source.dtype).state_dict()
        state |= {name: x for name, x in whole.items() if source.spec.is_as_stored(name)}
    made = {id(x): x for x in model.parameters()}
    model.load_state_dict(state, strict=False, assign=True)
    models.tie(model, source.spec)
    if lost := [name for name, x in model.named_parameters() if id(x) in made]:
        raise GrowthError(f"{source.class_name}: no values for {listed(lost, 3)}")
    models.restore_buffers(model)
    if source.spec.family.mixtures:
        # others take neither float64 nor every size
        model.set_experts_implementation("eager")
    # converted last: the weights that the model was made with never get memory
    return model.to(source.device, dtype).eval()


def longest_of(model: ModelSpec) -> int:
    """The longest input of a model, in tokens; 2^30 if there is no limit."""
    known = model.family.config
    if "positions" in known:
        return model.size("positions") - known["positions"].reserved
    # models with relative positions may have no limit
    return int(getattr(model.text, "max_position_embeddings", 1 << 30))


def random_inputs(source: Source, seed: int = 0, count: int = 4) -> Tensor:
    """Random inputs that the source accepts; always the same for a seed.

    They are ids, (count, at most 32) int64, or images or spectrograms, (count, *their axes)
    float64.
    """
    rng = torch.Generator().manual_seed(seed)
    if source.spec.input != "tokens":
        return torch.randn((count, *source.spec.input_shape), generator=rng, dtype=torch.float64)
    vocabulary = source.spec.size("vocab")
    length = min(32, longest_of(source.spec))
    tokens = torch.randint(vocabulary, (count, length), generator=rng)
    end = getattr(source.spec.text, "eos_token_id", None)
    if source.config.is_encoder_decoder and isinstance(end, int):
        # classification heads need exactly one end token per row
        tokens = torch.where(tokens == end, (end + 1) % vocabulary, tokens)
        tokens[:, -1] = end
    return tokens


def all_outputs(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """The outputs of a model by name, float64 on the CPU, the main one first.

    The main one are logits, or hidden states of a model without a head. `tokens` are ids, (batch,
    length) int64, or what else `random_inputs` makes. No row is padded.
    """
    was_training = model.training
    model.eval()
    # without a padding token, classifiers of texts in transformers refuse more than one row
    classifies = type(model).__name__.endswith("ForSequenceClassification")
    is_single = classifies and getattr(model.config.get_text_config(), "pad_token_id", None) is None
    try:
        parts = [_run(model, rows) for rows in (tokens.split(1) if is_single else [tokens])]
    finally:
        model.train(was_training)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def input_names(model: Any) -> tuple[str, str | None]:
    """The inputs of a model that does not read tokens alone: images or sound, and a text or None.

    Some compare images with a text, others write one.
    """
    if model.main_input_name == "input_ids":
        return "pixel_values", "input_ids"
    takes = inspect.signature(model.forward).parameters
    return model.main_input_name, "decoder_input_ids" if "decoder_input_ids" in takes else None


def _run(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    if tokens.is_floating_point():
        name, text = input_names(model)
        inputs = {name: tokens.to(model.device, model.dtype)}
        if text:
            inputs[text] = torch.arange(4, device=model.device).expand(len(tokens), 4)
    else:
        inputs = {"input_ids": tokens.to(model.device)}
        if type(model).__name__.endswith("ForMultipleChoice"):
            # multiple choice needs an axis of questions: take all rows as choices of one
            inputs = {"input_ids": inputs["input_ids"][None]}
        # a lone encoder also has is_encoder_decoder in its config, but no decoder
        if model.config.is_encoder_decoder and hasattr(model, "get_decoder"):
            inputs["decoder_input_ids"] = inputs["input_ids"]
    cuda = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(cuda):
        # of models that choose the patches that they see. The caller's numbers on other devices
        # stay as they are: torch.manual_seed would begin those of all GPUs anew
        torch.default_generator.manual_seed(0)
        for device in cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(0)
        output = model(**inputs)
    given = {name: x for name in OUTPUTS if (x := getattr(output, name, None)) is not None}
    if not given:
        raise GrowthError(f"{type(model).__name__} returns neither logits nor hidden states")
    return {name: x.double().cpu() for name, x in given.items()}


def largest_difference(new: Tensor, old: Tensor, least: float = 0.0) -> float:
    """The largest absolute difference of outputs over the largest output, or over `least`.

    Outputs that are not finite in both are left out.
    """
    compared = old.isfinite() | new.isfinite()
    new, old = new[compared], old[compared]
    if not old.numel():
        return 0.0
    return ((new - old).abs().max() / old.abs().max().clamp(min=least)).item()
