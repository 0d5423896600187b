"""The formats of checkpoints, the files that belong to one, and whether these change.

How each format is recognised, opened and told apart from other files. A new one is one more
entry of `FORMATS`. Code outside of this folder asks a `Format`, and compares no file names.

`Stamps` notice files that change while they are read. Only files that the work reads or copies
count. Small files are the same if their bytes are. Weights are too large to read once more, so the
system's times and places on the disk stand for their bytes. A change of those alone, as by a hard
link, needs a comparison of what was read.

A plan of a model on the Hub needs no weights: it reads the headers of the files there, and small
tensors. Where it wants a large one, to run the source, that file is downloaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import CHAT_TEMPLATE_DIR

from growkern.errors import GrowthError
from growkern.families import ModelSpec
from growkern.files import read_json
from growkern.growth.history import CHECKSUMS_FILE, LINEAGE_FILE
from growkern.growth.source import files
from growkern.growth.source.files import weight_file
from growkern.growth.source.hub import TIMEOUT, HubModel, hub_model, lacks_weights, reaching
from growkern.growth.source.refused import (
    METADATA_FILE,
    OTHER_WEIGHTS,
    STATE_FILES,
    is_bare,
    pieces_in,
)
from growkern.growth.stored import BareTensor, StoredTensor

# on the Hub, bytes of a tensor that is read by itself
MOST_READ = 1 << 20
# of a file that are asked for first: most headers are shorter
FIRST_BYTES = 100_000
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
OptimizerState = Mapping[str, Mapping[str, StoredTensor]]


class Format:
    """A way to keep a model in a directory: this one is safetensors, and others override it."""

    # patterns of the names of files that a loader may read as the model's weights
    weights: tuple[str, ...] = ("*.safetensors", "*.safetensors.index.json")
    # file extension of weight files, which consist of a header and of tensors; None: there are none
    suffix: str | None = ".safetensors"
    # where the format keeps the optimizer's state with the weights, (directory, parameters) ->
    # parameter -> key -> tensor. `parameters` has the name of each in the model -> in the result
    read_optimizer: Callable[[Path, Mapping[str, str]], OptimizerState] | None = None

    def recognises(self, directory: Path) -> bool:
        """Whether a directory has this format; of any other, `read` says which file is missing."""
        return True

    def read(self, directory: Path, model: ModelSpec) -> Mapping[str, StoredTensor]:
        """The stored tensors, by their names there."""
        # for a plan, only the config of a model on the Hub was downloaded
        return (read_remote_headers if lacks_weights(directory) else files.read_headers)(directory)

    def read_header(self, file: Path) -> bytes:
        """The bytes of a file that list its tensors. The file is that of a tensor of `read`."""
        return files.read_header_bytes(file)

    def files(self, directory: Path) -> list[str]:
        """The names of the files that hold the weights, and of the one that lists them.

        A change while they are read is noticed.
        """
        if (directory / files.WEIGHTS_FILE).is_file():
            return [files.WEIGHTS_FILE]
        # a damaged index is refused where it is read
        with contextlib.suppress(GrowthError):
            return [files.INDEX_FILE, *files.shard_names(directory)]
        return [files.INDEX_FILE]


class Bare(Format):
    """A config alone, for a plan."""

    suffix = None

    def recognises(self, directory: Path) -> bool:
        own = (*weight_files(), METADATA_FILE)
        return not lacks_weights(directory) and is_bare(pieces_in(directory), own)

    def read(self, directory: Path, model: ModelSpec) -> Mapping[str, StoredTensor]:
        """The tensors that the files of such a model would have, on the meta device."""
        # a model with images may name it in the config of its text alone
        named = (getattr(config, "dtype", None) for config in (model.config, model.text))
        dtype, file = next(filter(None, named), torch.float32), str(directory / files.WEIGHTS_FILE)
        own = (item for item in model.shapes.items() if item[0] not in model.ties)
        return {name: BareTensor(file, shape, dtype) for name, shape in own}


class Distributed(Format):
    """Of torch.distributed.checkpoint: the metadata file lists all tensors.

    Its files are among `STATE_FILES`, and no loader takes a stray one for a model.
    """

    weights, suffix = (), None

    def recognises(self, directory: Path) -> bool:
        return (pieces_in(directory) / METADATA_FILE).is_file()

    def read(self, directory: Path, model: ModelSpec) -> Mapping[str, StoredTensor]:
        # imported here and below, because torch.distributed.checkpoint is slow to import
        from growkern.growth.source.distributed import read_distributed

        # experts lie there whole, as in memory
        second = {t.name: model.second_files((t.template,), t.layer) for t in model.tensors}
        names = {t.name: t.stored or (*second[t.name], t.name)[0] for t in model.tensors}
        return read_distributed(pieces_in(directory), names)

    def read_header(self, file: Path) -> bytes:
        return file.read_bytes()

    def files(self, directory: Path) -> list[str]:
        place = pieces_in(directory)
        found = [place / METADATA_FILE, *place.glob("*.distcp")]
        return [str(file.relative_to(directory)) for file in found]

    def read_optimizer(self, directory: Path, parameters: Mapping[str, str]) -> OptimizerState:
        from growkern.growth.source.distributed import read_distributed_optimizer

        return read_distributed_optimizer(directory, parameters)


FORMATS: tuple[Format, ...] = (Distributed(), Format())
BARE = Bare()


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
    inside = templates.rglob("*") if files.stays_in(templates, directory) else ()
    yield from [*named, *sorted(file for file in inside if not file.is_dir())]


CONFIG_FILE, MODULES_FILE = "config.json", "modules.json"
# of a list of modules
MOST_BYTES = 1_000_000
BLOCK = 1 << 20
# of a stamp: a difference in others alone may come from a link, a new mode or a copy
DECISIVE = ("size", "modified")


@dataclass(frozen=True)
class Stamps:
    """What was known of files before they were read.

    Unlike the time of the last modification, that of the last change cannot be set back.
    """

    path: Path  # a file, or the directory of a checkpoint: then all files that are read or copied
    # by name the size, with the checksum of a small file or what the system knows of weights
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Stamps:
        """The stamps of a path as they are now."""
        return cls(path, _stamps(path))

    def check(self, is_same: Callable[[], bool] = lambda: False) -> None:
        """Refuse what was read if a file changed or went since the stamps were taken.

        A file that came is refused if loaders look for its name. `is_same` tells whether the
        weights are those that were read. It is asked if the system changed something about their
        files and their sizes and times are as before.
        """
        now = _stamps(self.path)
        new = {name for name in now.keys() - self.found if Path(name).name in MODEL_FILES}
        unsure = []
        for name in sorted({*self.found, *new}):
            before, after = self.found.get(name), now.get(name)
            if before == after:
                continue
            if not (before and after and "changed" in before) or any(
                before[key] != after.get(key) for key in DECISIVE
            ):
                raise _changed(name)
            unsure.append(name)
        if unsure and not is_same():
            raise _changed(unsure[0])

    def identity(self) -> dict[str, Any]:
        """Size and checksum of the files that loaders look for, for a journal.

        The journal has checksums of the weights that were read.
        """
        return {
            os.path.relpath(name, self.path): [*stamp.values()]
            for name, stamp in self.found.items()
            if Path(name).name in MODEL_FILES
        }


def _changed(name: str) -> GrowthError:
    return GrowthError(
        f"{name} was changed while it was read: repeat with files that stay the same"
    )


def module_folders(directory: Path) -> set[str]:
    """The folders that a model of sentence-transformers names."""
    try:
        modules = read_json(directory / MODULES_FILE, MOST_BYTES, "list of modules")
    except GrowthError:
        return set()
    entries = modules if isinstance(modules, list) else []
    paths = [entry.get("path") for entry in entries if isinstance(entry, dict)]
    return {path for path in paths if isinstance(path, str) and Path(path).name == path}


def _stamps(path: Path) -> dict[str, dict[str, Any]]:
    stamps: dict[str, dict[str, Any]] = {}
    for file, is_large in [(path, True)] if path.is_file() else _files(path):
        # a link that leads nowhere, or a file that has gone
        with contextlib.suppress(OSError):
            stamps[str(file)] = _of_system(file) if is_large else _of_bytes(file)
    return stamps


def _of_system(file: Path) -> dict[str, Any]:
    known = file.stat()
    times = {"modified": known.st_mtime_ns, "changed": known.st_ctime_ns}
    return {"size": known.st_size, **times, "device": known.st_dev, "inode": known.st_ino}


def _of_bytes(file: Path) -> dict[str, Any]:
    total = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(BLOCK):
            total.update(block)
        return {"size": opened.tell(), "bytes": total.hexdigest()}


def model_files(directory: Path) -> list[Path]:
    """The files of a checkpoint that the model in it is made of."""
    return [x for x, is_large in _files(directory) if is_large or x.name in MODEL_FILES]


def _files(directory: Path) -> Iterator[tuple[Path, bool]]:
    """The files of a checkpoint that are read or copied, and whether they are weights.

    The config may lie in the directory above.
    """
    if not directory.is_dir():
        return
    yield from ((directory / name, True) for name in format_of(directory).files(directory))
    is_above = (directory / METADATA_FILE).is_file() and not (directory / CONFIG_FILE).is_file()
    place = directory.parent if is_above else directory
    small = [place / name for name in (CONFIG_FILE, GENERATION_FILE, LINEAGE_FILE, MODULES_FILE)]
    for folder in module_folders(place):
        inside = (place / folder).iterdir() if (place / folder).is_dir() else ()
        small += [inner for inner in inside if not any(fnmatch(inner.name, p) for p in STATE_FILES)]
    small += beside_weights(place)
    for file in dict.fromkeys(small):
        # links that lead out are not followed
        if file.is_file() and files.stays_in(file, place):
            yield file, False


@dataclass(frozen=True)
class RemoteTensor(files.Header):
    """A tensor of a safetensors file on the Hub. `file` is its place in the cache."""

    model: HubModel
    is_mapped = False

    def read(self) -> Tensor:
        """The whole tensor. A large one is read from its file, which is downloaded."""
        name = Path(self.file).name
        if self.nbytes > MOST_READ:
            from huggingface_hub import hf_hub_download

            with reaching(self.model):
                file = hf_hub_download(self.model.id, name, revision=self.model.commit)
            of_file = weight_file(file)
            return files.Header(of_file, self.raw_name, self.shape, self.dtype, self.start).read()
        data, _ = _bytes_of(self.model, name, self.start, self.nbytes)
        return torch.frombuffer(bytearray(data), dtype=self.dtype).view(self.shape)

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the first axis."""
        return self.read()[start:stop] if self.shape else self.read()


def read_remote_headers(directory: Path) -> dict[str, RemoteTensor]:
    """All tensors of a model on the Hub, by their names in its files. No weights are downloaded."""
    from huggingface_hub import HfApi

    model = hub_model(directory)
    assert model is not None

    def read_shard(file: Path) -> dict[str, files.Header]:
        head, size = _bytes_of(model, file.name, 0, FIRST_BYTES)
        (length,) = files.LENGTH.unpack(head[: files.LENGTH.size])
        files.check_header_size(file, length, size)
        missing = min(length, files.MOST_HEADER_BYTES) + files.LENGTH.size - len(head)
        if missing > 0:
            head += _bytes_of(model, file.name, len(head), missing)[0]
        return files.parse_headers(weight_file(file), head[: files.LENGTH.size + length], size)

    # without an index there is no other file
    is_single = not (directory / files.INDEX_FILE).is_file()
    if not is_single:
        with reaching(model):
            is_single = HfApi().file_exists(model.id, files.WEIGHTS_FILE, revision=model.commit)
    return {
        name: RemoteTensor(**dataclasses.asdict(header), model=model)
        for name, header in files.read_headers(directory, read_shard, is_single).items()
    }


def _bytes_of(model: HubModel, name: str, start: int, count: int) -> tuple[bytes, int]:
    """Bytes of a file on the Hub from `start` on, at most `count`, and the size of the file."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    if not count:
        return b"", 0
    headers = {**build_hf_headers(), "Range": f"bytes={start}-{start + count - 1}"}
    url = hf_hub_url(model.id, name, revision=model.commit)
    with reaching(model):
        answer = get_session().get(url, headers=headers, timeout=TIMEOUT, follow_redirects=True)
        hf_raise_for_status(answer)
    size = answer.headers.get("Content-Range", "").rpartition("/")[2]
    if answer.status_code != 206 or not size.isdigit():
        raise GrowthError(f"{model.id}: the Hub does not send parts of {name}: download it first")
    return answer.content, int(size)
