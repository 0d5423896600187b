"""Says which directories are checkpoints that a new one may replace.

A model's config must be in it. Every file must be one that growkern recorded when it wrote the
directory, or have a name that transformers or sentence-transformers give to weights, tokenizers
and the like.
"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from transformers.utils import CHAT_TEMPLATE_DIR

from growkern.bounded import read_json
from growkern.errors import GrowthError
from growkern.growth.disk.sentence import CONFIG_FILE, MODULES_FILE
from growkern.growth.history import CHECKSUMS_FILE, LINEAGE_FILE
from growkern.growth.source.formats import weight_files
from growkern.growth.source.stamps import module_folders
from growkern.publish import replaceable
from growkern.publish.manifest import MANIFEST

# of a config or a record
MOST_BYTES = 16_000_000
# of a checkpoint, besides weights and the files that growkern recorded
KNOWN = (
    CONFIG_FILE,
    *(LINEAGE_FILE, CHECKSUMS_FILE, MANIFEST),
    *("generation_config*.json", "*.index.json", "adapter_config.json", "params.json"),
    # tokenizers and processors
    *("tokenizer*", "vocab.*", "vocab-*", "merges.txt", "special_tokens_map.json"),
    *("added_tokens.json", "*.model", "*.model.v*", "*.spm", "*.tiktoken", "bpe.codes", "dict.txt"),
    *("tekken.json", "normalizer.json", "*processor_config.json", "chat_template.*", "*.jinja"),
    # sentence-transformers
    *(MODULES_FILE, "config_sentence_transformers.json", "sentence_*_config.json"),
    # code of models that are not part of transformers
    *("configuration_*.py", "modeling_*.py", "modular_*.py", "tokenization_*.py"),
    *("processing_*.py", "image_processing_*.py", "feature_extraction_*.py"),
    # the card and the terms
    *("README.md", "modelcard.json", ".gitattributes", "LICENSE*", "LICENCE*", "NOTICE*"),
    *("COPYING*", "USE_POLICY*"),
    # of the Trainer
    *("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state*.pth", "training_args.bin"),
    *("trainer_state.json", "*_results.json", ".metadata", "*.distcp"),
)


def why_kept(directory: Path) -> str | None:
    """Why a directory must not be deleted, as a phrase about it; None if it may be.

    A directory may be deleted if it is empty, or the directory of a checkpoint and of nothing else.
    Nothing whose name starts with `.git` is ever deleted, but for `.gitattributes`.

    Raises:
        OSError: it cannot be read.
    """
    if directory.is_symlink() or not directory.is_dir():
        return "it is no directory"
    if not any(directory.iterdir()):
        return None
    config = _table(directory / CONFIG_FILE)
    if not isinstance(config.get("model_type"), str):
        return f"it has no {CONFIG_FILE} of a model"
    names = (*weight_files(), *KNOWN)
    folders = {CHAT_TEMPLATE_DIR, *module_folders(directory)}

    def is_known(file: PurePosixPath) -> bool:
        is_module = len(file.parts) == 2 and file.parts[0] in folders
        is_named = any(fnmatch(file.name, pattern) for pattern in names)
        return is_named and (len(file.parts) == 1 or is_module)

    return replaceable.why_kept(directory, "a checkpoint", is_known, CHECKSUMS_FILE, MANIFEST)


def _table(file: Path) -> dict[str, Any]:
    """A JSON object; empty if the file is missing or holds something else."""
    found = _read(file)
    return found if isinstance(found, dict) else {}


def _read(file: Path) -> Any:
    try:
        return read_json(file, MOST_BYTES, "record")
    except GrowthError:
        return None
