"""A checkpoint directory made whole: all that belongs to it besides weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from growkern.growth.companions import copy_companions
from growkern.growth.files import INDEX_FILE
from growkern.growth.materialise import untrained_model
from growkern.growth.shards import ShardLayout


def in_model_order(
    shapes: dict[str, tuple[int, ...]], class_name: str, config: Any, dtype: torch.dtype
) -> dict[str, tuple[int, ...]]:
    """Shapes by name, in the order in which the model itself lists its tensors."""
    with torch.device("meta"):
        names = list(untrained_model(class_name, config, dtype).state_dict())
    return {name: shapes[name] for name in names if name in shapes} | shapes


def complete(
    directory: Path,
    config: Any,
    class_name: str,
    dtype: torch.dtype,
    layout: ShardLayout,
    beside: Path,
) -> None:
    """Write config and index beside the weights in `directory`, and what goes along.

    Args:
        dtype: of the weights.
        beside: directory of a checkpoint, or a folder in one, to take tokenizer files from.
    """
    with torch.device("meta"):
        config = untrained_model(class_name, config, dtype).config
    config.architectures = [class_name]
    config.save_pretrained(directory)
    if layout.index:
        (directory / INDEX_FILE).write_text(layout.index, encoding="utf-8")
    # weights that were sharded by torch.distributed lie in a folder of their own
    has_config = (beside / "config.json").is_file()
    copy_companions(beside if has_config else beside.parent, directory)
