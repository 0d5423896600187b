"""Loads a checkpoint directory as a model of transformers.

Every command loads models here. The config and the headers of the weights are read and checked by
`config` and `files`. transformers gets the tensors, not the directory. So it opens no other file
there: no pickles, no adapters, no code, nothing that a link or a config points to.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from growkern.errors import GrowthError, listed, reason
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
from growkern.growth.stored import StoredTensor, refuse_adapted

# names in an error message
MOST_NAMED = 3


def load_model(directory: Path, dtype: torch.dtype | None = None, *, config: Any = None) -> Any:
    """The model of a checkpoint directory, in evaluation mode, on the CPU.

    Weights in fp8 with block scales or in mxfp4 are read as the numbers that they stand for.
    `dtype` is that of the checkpoint by default. What is damaged or hostile is refused, and a
    tensor that is missing or has another shape than the config says. `config` is that of the
    directory, if it was read already; it is not changed.
    """
    read = model_files(directory)
    stamps = [Stamps.of(file) for file in read]
    config = read_config(directory, any_family=True) if config is None else copy.deepcopy(config)
    block = scale_block(config, directory, dequantize=True)
    cls = class_in(directory, config)
    headers = dequantised(read_headers(directory), block, str(directory))
    refuse_eight_bits(headers)
    check_layers(directory, vars(config), len(headers))
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
        raise GrowthError(f"{directory} {what} {listed(names, MOST_NAMED)}")
    return model


def _own_memory(model: Any) -> None:
    """Copy the tensors that are still mapped from the files: these may change or be cut."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
