"""What belongs to a checkpoint besides config and weights: tokenizer, processor, licence.

Tokenizers and processors save files of any name (`spm.model`, `tekken.json`, code of their own), so
whatever lies beside the config comes along but what is known to speak of other weights: a file too
many costs its size, a file too few a model that cannot read.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import torch
from transformers.utils import CHAT_TEMPLATE_DIR

from growkern.families.model import ModelSpec
from growkern.growth.disk.shards import ShardLayout
from growkern.growth.models import untrained_model
from growkern.growth.source.files import INDEX_FILE

# what a loader may take for the model's weights
WEIGHTS = (
    *("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*", "adapter_model*.bin"),
    *("tf_model*.h5*", "flax_model*.msgpack*", "consolidated*.pth", "*.gguf"),
)
# weights in any other form, and what training keeps beside them
STATE = (
    *("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt*", "*.distcp", "*.npy", "*.npz"),
    *("*.h5", "*.msgpack", "*.onnx*", "*.ot"),
    *("trainer_state.json", "*_results.json", "events.out.tfevents.*"),
)
# `adapter_*`, `modules.json` and `params.json` refer to weights that stay behind, a model card to
# another model
OTHERS = ("config.json", "adapter_*", "modules.json", "params.json", "README.md", "modelcard.json")
LINEAGE_FILE, CHECKSUMS_FILE = "lineage.json", "checksums.json"
LEFT_OUT = (*WEIGHTS, *STATE, *OTHERS, LINEAGE_FILE, CHECKSUMS_FILE, ".*")


def companions(directory: Path) -> Iterator[Path]:
    """The files that go along when the model in `directory` becomes another one."""
    for file in sorted(directory.iterdir()):
        if file.is_file() and not any(fnmatch(file.name, pattern) for pattern in LEFT_OUT):
            yield file
    templates = directory / CHAT_TEMPLATE_DIR
    yield from sorted(file for file in templates.rglob("*") if file.is_file())


def copy_companions(source: Path, target: Path) -> None:
    """Copy them; `source` is the directory of the config."""
    for file in companions(source):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copy)


def complete(
    directory: Path,
    model: ModelSpec,
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
        config = untrained_model(model, dtype).config
    config.architectures = [model.class_name]
    config.save_pretrained(directory)
    if layout.index:
        (directory / INDEX_FILE).write_text(layout.index, encoding="utf-8")
    # weights that were sharded by torch.distributed lie in a folder of their own
    has_config = (beside / "config.json").is_file()
    copy_companions(beside if has_config else beside.parent, directory)
