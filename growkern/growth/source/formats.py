"""The formats of checkpoints: how each is recognised, opened and told apart from other files.

A new format is one more entry of `FORMATS`. Code outside of this folder reads the fields of
`Format`, and compares no file names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from transformers.utils import CHAT_TEMPLATE_DIR

from growkern.errors import GrowthError
from growkern.families.model import ModelSpec
from growkern.growth.history import CHECKSUMS_FILE, LINEAGE_FILE
from growkern.growth.source import files
from growkern.growth.source.hub import lacks_weights, read_remote_headers
from growkern.growth.source.refused import FOREIGN, OTHER_WEIGHTS, STATE_FILES
from growkern.growth.source.stored import BareTensor, StoredTensor

GENERATION_FILE = "generation_config.json"
# files besides weights that transformers and sentence-transformers look for
MODEL_FILES = (
    *("config.json", GENERATION_FILE),
    # tokenizers and processors
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "tokenizer.model.v3", "spiece.model", "sentencepiece.bpe.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "tekken.json"),
    *("chat_template.jinja", "chat_template.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    # sentence-transformers
    *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
)
# `adapter_*`, `modules.json` and `params.json` describe weights that are not copied, and a model
# card describes another model
OTHERS = (
    *("config.json", "adapter_*", "modules.json", "params.json", "README.md", "modelcard.json"),
    # of a run or an export: they describe its own files
    *("manifest.json", "run.json"),
)
LEFT_OUT = (*STATE_FILES, *OTHERS, LINEAGE_FILE, CHECKSUMS_FILE, ".*")
# a tokenizer has ten
MOST_FILES = 10_000
OptimizerState = Mapping[str, Mapping[str, StoredTensor]]


class Format(NamedTuple):
    """A way to keep a model in a directory.

    Attributes:
        recognises: whether a directory has this format.
        weights: patterns of the names of files that a loader may read as the model's weights.
        read: (directory, model) -> the stored tensors, by their names there.
        read_header: the bytes of a file that list its tensors. The file is that of a tensor of
            `read`.
        suffix: file extension of this format's weight files, which consist of such a header and of
            tensors. None: the format has no such files.
        loads: whether `from_pretrained` of transformers reads the format.
        read_optimizer: (directory, parameters) -> the optimizer's state, where the format keeps it
            with the weights: parameter -> key -> tensor. `parameters` has the name of a parameter
            in the model -> its name in the result. None: the state is in a file of its own.
    """

    recognises: Callable[[Path], bool]
    weights: tuple[str, ...]
    read: Callable[[Path, ModelSpec], Mapping[str, StoredTensor]]
    read_header: Callable[[Path], bytes]
    suffix: str | None
    loads: bool
    read_optimizer: Callable[[Path, Mapping[str, str]], OptimizerState] | None


# functions with names, as a plan that is pickled holds its format


def _has_any(directory: Path) -> bool:
    return True


def _read_safetensors(directory: Path, model: ModelSpec) -> Mapping[str, StoredTensor]:
    return files.read_headers(directory)


def _read_remote(directory: Path, model: ModelSpec) -> Mapping[str, StoredTensor]:
    return read_remote_headers(directory)


def _has_no_weights(directory: Path) -> bool:
    patterns = (*weight_files(), files.METADATA_FILE, *FOREIGN)
    return not lacks_weights(directory) and not any(
        fnmatch(file.name, pattern) for file in directory.iterdir() for pattern in patterns
    )


def _read_bare(directory: Path, model: ModelSpec) -> Mapping[str, StoredTensor]:
    """The tensors that the files of such a model would have, on the meta device."""
    dtype = getattr(model.config, "dtype", None) or torch.float32
    return {
        name: BareTensor(str(directory / files.WEIGHTS_FILE), shape, dtype)
        for name, shape in model.shapes.items()
        if name not in model.ties
    }


def _has_metadata(directory: Path) -> bool:
    return (directory / files.METADATA_FILE).is_file()


def _read_distributed(directory: Path, model: ModelSpec) -> Mapping[str, StoredTensor]:
    # imported here and below, because torch.distributed.checkpoint is slow to import
    from growkern.growth.source.distributed import read_distributed

    # experts lie there whole, as in memory
    names = {t.name: t.stored for t in model.tensors if t.stored is not None}
    return read_distributed(directory, {n: names.get(n, n) for n in model.shapes})


def _read_distributed_optimizer(directory: Path, parameters: Mapping[str, str]) -> OptimizerState:
    from growkern.growth.source.distributed import read_distributed_optimizer

    return read_distributed_optimizer(directory, parameters)


# of torch.distributed.checkpoint: the metadata file lists all tensors
DISTRIBUTED = Format(
    recognises=_has_metadata,
    weights=(),  # its files are among STATE_FILES, and no loader takes a stray one for a model
    read=_read_distributed,
    read_header=Path.read_bytes,
    suffix=None,
    loads=False,
    read_optimizer=_read_distributed_optimizer,
)
# any other directory: `read` says which file is missing
SAFETENSORS = Format(
    recognises=_has_any,
    weights=("*.safetensors", "*.safetensors.index.json"),
    read=_read_safetensors,
    read_header=files.read_header_bytes,
    suffix=".safetensors",
    loads=True,
    read_optimizer=None,
)
# a model on the Hub of which only the config was downloaded, for a plan
REMOTE = SAFETENSORS._replace(
    recognises=lacks_weights,
    weights=(),
    read=_read_remote,
    suffix=None,
    loads=False,
)
FORMATS = (DISTRIBUTED, REMOTE, SAFETENSORS)
# a config alone, for a plan
BARE = SAFETENSORS._replace(recognises=_has_no_weights, read=_read_bare, suffix=None, loads=False)


def format_of(directory: Path, *, weights: bool = True) -> Format:
    """The format of a checkpoint directory: the first of `FORMATS` that recognises it.

    With `weights=False`, a directory without weights has the format `BARE`.
    """
    kinds = FORMATS if weights else (BARE, *FORMATS)
    return next(kind for kind in kinds if kind.recognises(directory))


def weight_files() -> tuple[str, ...]:
    """Patterns of the names of files that a loader may read as the model's weights."""
    return (*OTHER_WEIGHTS, *(pattern for kind in FORMATS for pattern in kind.weights))


def header_reader(file: Path) -> Callable[[Path], bytes] | None:
    """`Format.read_header` for a file that its name says to hold tensors; None for other files."""
    return next((kind.read_header for kind in FORMATS if kind.suffix == file.suffix), None)


def beside_weights(directory: Path) -> Iterator[Path]:
    """Everything beside the weights of a checkpoint but its directories; links are not followed.

    A link that leads out of the checkpoint in place of the chat templates is among it.
    """
    left_out = (*weight_files(), *LEFT_OUT)
    templates = directory / CHAT_TEMPLATE_DIR
    named = [
        file
        for file in sorted(directory.iterdir())
        if not any(fnmatch(file.name, pattern) for pattern in left_out)
        and not (file.is_dir() and (file != templates or files.stays_in(file, directory)))
    ]
    inside = (
        islice(templates.rglob("*"), MOST_FILES) if files.stays_in(templates, directory) else ()
    )
    found = [*named, *sorted(file for file in inside if not file.is_dir())]
    if len(found) >= MOST_FILES:
        raise GrowthError(f"{directory}: more than {MOST_FILES} files beside the weights")
    yield from found
