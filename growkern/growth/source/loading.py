"""Loads a checkpoint directory as a model of transformers, and runs sources as models.

Every command loads models here. The config and the headers of the weights are read and checked by
`config` and `files`. transformers gets the tensors, not the directory. So it opens no other file
there: no pickles, no adapters, no code, nothing that a link or a config points to.

Sources run in float64 where a real difference must stand out.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

from growkern.errors import GrowthError, reason
from growkern.families.model import ModelSpec
from growkern.growth.models import is_dtensor, restore_buffers, tie, untrained_model
from growkern.growth.source.config import (
    check_layers,
    config_directory,
    read_config,
    read_generation,
)
from growkern.growth.source.files import read_headers, refuse_eight_bits
from growkern.growth.source.formats import MODEL_FILES, Stamps, model_files
from growkern.growth.source.parts import dequantised
from growkern.growth.source.refused import scale_block
from growkern.growth.source.source import Source
from growkern.growth.source.stored import StoredTensor, refuse_adapted

# names in an error message
MOST_NAMED = 3


def load_model(
    directory: Path,
    dtype: torch.dtype | None = None,
    *,
    attention: str | None = None,
    config: Any = None,
) -> Any:
    """The model of a checkpoint directory, in evaluation mode, on the CPU.

    Weights in fp8 with block scales or in mxfp4 are read as the numbers that they stand for.
    `dtype` is that of the checkpoint by default, and `attention` that of transformers. What is
    damaged or hostile is refused, and a tensor that is missing or has another shape than the config
    says. `config` is that of the directory, if it was read already; it is not changed.
    """
    read = model_files(directory)
    stamps = [Stamps.of(file) for file in read]
    config = read_config(directory, any_family=True) if config is None else copy.deepcopy(config)
    block = scale_block(config, directory, dequantize=True)
    cls = class_in(directory, config)
    headers = dequantised(read_headers(directory), block, str(directory))
    refuse_eight_bits(headers)
    check_layers(directory, vars(config), len(headers))
    if attention is not None:
        config._attn_implementation = attention
    floating = (header.dtype for header in headers.values() if header.dtype.is_floating_point)
    dtype = dtype or config.dtype or next(floating, torch.float32)
    model = _built(directory, cls, config, dtype, headers)
    _own_memory(model)
    for file, stamp in zip(read, stamps, strict=True):
        # a hard link or new permissions change nothing in a small file
        stamp.check(partial(bool, file.name in MODEL_FILES))
    if new := set(model_files(directory)) - {*read}:
        raise GrowthError(f"{min(new)} came while the model was read: load it again")
    model.name_or_path = model.config._name_or_path = str(directory)
    if model.can_generate():
        generation = read_generation(config_directory(directory))
        if generation is not None:
            model.generation_config = generation
    return model


def class_in(directory: Path, config: Any) -> Any:
    """The class of transformers that a config names."""
    names = config.architectures or ["(none)"]
    cls = getattr(transformers, names[0], None)
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise GrowthError(f"{directory}: config.json names an unknown class: {names[0]}")
    return cls


def _built(
    directory: Path, cls: Any, config: Any, dtype: torch.dtype, headers: Mapping[str, StoredTensor]
) -> Any:
    state = {name: header.read() for name, header in headers.items()}
    try:
        model, info = cls.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype,
            output_loading_info=True,
            # they are named below
            ignore_mismatched_sizes=True,
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # values in a config make classes raise all kinds of errors
        why = reason(error)
        raise GrowthError(f"{directory}: the weights cannot be loaded: {why[:300]}") from error
    refuse_adapted(info["unexpected_keys"], str(directory))
    missing, wrong = sorted(info["missing_keys"]), sorted(info["mismatched_keys"])
    if missing or wrong:
        # transformers would train from random numbers there
        what = "has no tensor" if missing else "has another shape than config.json says for"
        names = [str(name) for name in missing] or [str(entry[0]) for entry in wrong]
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        raise GrowthError(f"{directory} {what} {', '.join(names[:MOST_NAMED])}{more}")
    return model


def _own_memory(model: Any) -> None:
    """Copy the tensors that are still mapped from the files: these may change or be cut."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


# parameters of a model that may be copied to float64
LARGEST = 50_000_000
# outputs of models, the main one first
OUTPUTS = (
    *("logits", "prediction_logits", "start_logits", "last_hidden_state"),
    *("end_logits", "seq_relationship_logits", "mc_logits", "reconstruction"),
)


class Float64(TorchFunctionMode):
    """Redirects casts to float32 to float64: models cast norms, rotary tables and softmax."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            return args[0].to(torch.float64)
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
    return not is_dtensor(first) and not first.is_meta


def as_model(source: Source, dtype: torch.dtype = torch.float64) -> Any:
    """A source as a model in this dtype and in evaluation mode, on the source's device.

    A dense model that becomes a mixture is run as it is.
    """
    source = source.stored
    # constants such as Gemma's root of the hidden size stay rounded to the source's dtype
    model = untrained_model(source.spec, source.dtype)
    state = {name: source.read(name).to(dtype) for name in source.dtypes}
    model.load_state_dict(state, strict=False, assign=True)
    tie(model, source.spec)
    restore_buffers(model)
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


def image_shape(config: Any) -> tuple[int, int, int]:
    """Channels, height and width of the images that a model reads."""
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return config.num_channels, height, width


def random_inputs(source: Source, seed: int = 0, count: int = 4) -> Tensor:
    """Random inputs that the source accepts; always the same for a seed.

    They are ids, (count, at most 32) int64, or images, (count, channels, height, width) float64.
    """
    rng = torch.Generator().manual_seed(seed)
    if source.spec.family.reads_images:
        shape = (count, *image_shape(source.config))
        return torch.randn(shape, generator=rng, dtype=torch.float64)
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
    length) int64, or images as `random_inputs` makes them. No row is padded.
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


def _run(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    if tokens.is_floating_point():
        inputs = {"pixel_values": tokens.to(model.device, model.dtype)}
    else:
        inputs = {"input_ids": tokens.to(model.device)}
        if type(model).__name__.endswith("ForMultipleChoice"):
            # multiple choice needs an axis of questions: take all rows as choices of one
            inputs = {"input_ids": inputs["input_ids"][None]}
        # a lone encoder also has is_encoder_decoder in its config, but no decoder
        if model.config.is_encoder_decoder and hasattr(model, "get_decoder"):
            inputs["decoder_input_ids"] = inputs["input_ids"]
    output = model(**inputs)
    given = {name: x for name in OUTPUTS if (x := getattr(output, name, None)) is not None}
    if not given:
        raise GrowthError(f"{type(model).__name__} returns neither logits nor hidden states")
    return {name: x.double().cpu() for name, x in given.items()}


def largest_difference(new: Tensor, old: Tensor, least: float = 0.0) -> float:
    """The largest absolute difference of outputs over the largest output, or over `least`."""
    return ((new - old).abs().max() / old.abs().max().clamp(min=least)).item()
