"""Says which directories are checkpoints that a new one may replace.

A model's config must be in it. Every file must be one that growkern recorded when it wrote the
directory, or have one of the names that transformers or sentence-transformers give to weights,
tokenizers and the like.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from growkern.bounded import read_json
from growkern.errors import GrowthError
from growkern.growth.disk.sentence import CONFIG_FILE
from growkern.growth.history import CARD_FILE, CHECKSUMS_FILE, LINEAGE_FILE
from growkern.growth.source.formats import MODEL_FILES
from growkern.growth.source.stamps import module_folders
from growkern.publish import replaceable
from growkern.publish.manifest import MANIFEST

# of a config or a record
MOST_BYTES = 16_000_000
# of a model, besides weights and the files that growkern recorded. Only whole names: the user's own
# files could have any that begins or ends like these. The state of a training is not among them
KNOWN = (
    *MODEL_FILES,
    *(LINEAGE_FILE, CHECKSUMS_FILE, MANIFEST),
    # the card and the terms
    *(CARD_FILE, ".gitattributes", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE"),
)
SHARD = r"(-\d{5}-of-\d{5})?"
WEIGHTS = rf"(model{SHARD}\.safetensors|pytorch_model{SHARD}\.bin)(\.index\.json)?"


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
    try:
        config = read_json(directory / CONFIG_FILE, MOST_BYTES, "config")
    except GrowthError:
        config = None
    if not (isinstance(config, dict) and isinstance(config.get("model_type"), str)):
        return f"it has no {CONFIG_FILE} of a model"
    modules = module_folders(directory)

    def is_known(file: PurePosixPath) -> bool:
        is_module = len(file.parts) == 2 and file.parts[0] in modules
        is_named = file.name in KNOWN or re.fullmatch(WEIGHTS, file.name) is not None
        return is_named and (len(file.parts) == 1 or is_module)

    return replaceable.why_kept(directory, "a checkpoint", is_known, CHECKSUMS_FILE, MANIFEST)
