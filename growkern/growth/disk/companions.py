"""Copies what a checkpoint has besides its weights: tokenizer, processor, chat templates, licence.

Tokenizers and processors save files under any name (`spm.model`, `tekken.json`, their own code).
So every file beside the config is copied, except those known to belong to the old weights. One
file too many costs disk space. One file too few leaves a model without its tokenizer.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path

import torch

from growkern.errors import GrowthError, GrowthWarning
from growkern.families.model import ModelSpec
from growkern.growth.disk.config_file import complete_config
from growkern.growth.disk.shards import ShardLayout
from growkern.growth.models import fit_cache, untrained_model
from growkern.growth.source.config import config_directory, read_generation
from growkern.growth.source.formats import GENERATION_FILE, beside_weights
from growkern.growth.source.links import stays_in
from growkern.growth.source.source import Source
from growkern.publish.manifest import copy_file


def companions(directory: Path) -> Iterator[Path]:
    """The files of a checkpoint directory that are copied beside a model made from it.

    A link is followed if it ends inside the directory, or inside the cached repository that the
    directory is a snapshot of. Other links could end at anybody's file: a warning names them.
    """
    for file in beside_weights(directory):
        if not stays_in(file, directory):
            warnings.warn(
                f"{file} links to {os.path.realpath(file)}, outside of the checkpoint: left out; "
                "replace the link by the file itself",
                GrowthWarning,
                stacklevel=2,
            )
        elif file.is_file():
            yield file


def copy_companions(
    source: Path, target: Path, only: Collection[str] | None = None
) -> dict[str, str]:
    """Copy companion files with plain modes.

    Args:
        source: the directory of the config.
        only: paths in it that may be copied; None: all of them.

    Returns:
        The checksum of each file, as it was read, by its path.
    """
    checksums = {}
    for file in companions(source):
        name = file.relative_to(source).as_posix()
        if only is None or name in only:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            checksums[name] = copy_file(file.resolve(), target / name)
    return checksums


def complete(
    directory: Path,
    model: ModelSpec,
    dtype: torch.dtype,
    layout: ShardLayout,
    beside: Path,
    source: Source | None = None,
) -> dict[str, str]:
    """Write config, index and companion files beside the weights in `directory`.

    Args:
        beside: the checkpoint to copy companion files from, or a subdirectory of it.
        source: that the model was grown from; None: it was not grown.

    Returns:
        The checksums of the files that were copied, as they were read.

    Raises:
        GrowthError: transformers refuses to save the config, because its values contradict each
            other.
    """
    with torch.device("meta"):
        made = untrained_model(model, dtype)
    made.config.architectures = [model.class_name]
    try:
        made.config.save_pretrained(directory)
    except OSError:
        raise
    except Exception as error:
        # the type of the error depends on the version of transformers
        why = " ".join(str(error).split())[-300:]
        raise GrowthError(f"transformers refuses to save the config: {why}") from error
    complete_config(directory, source, made.config)
    layout.write_index(directory)
    companions_of = config_directory(beside)
    stamps = source.stamps if source else None
    # a file that came since may not be whole
    found = {os.path.relpath(name, companions_of) for name in stamps.found} if stamps else None
    copied = copy_companions(companions_of, directory, only=found)
    generation = read_generation(companions_of)
    if made.can_generate() and generation is not None:
        fit_cache(model, generation)
        # written by transformers and not copied, so that `save_pretrained` gives the same bytes
        generation.save_pretrained(directory)
        copied.pop(GENERATION_FILE, None)
    return copied
