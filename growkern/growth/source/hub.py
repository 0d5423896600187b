"""Sources on the Hugging Face Hub: downloaded into its usual cache, and found there again.

A source that exists as a path is never looked up. Other names of the form ORGANISATION/NAME are
models of the Hub. Only the files that growth can use are downloaded. Where the Hub cannot be
reached, the cache is used.

A plan needs no weights: it reads the headers of the files on the Hub, and small tensors. Where it
wants a large one, to run the source, that file is downloaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.growth.source import files
from growkern.growth.source.opened import weight_file
from growkern.growth.source.refused import OTHER_WEIGHTS, STATE_FILES, refuse_files

# of a model; the Hub refuses other characters
ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")
# the address of a model's page; pathlib makes one slash of two
PAGE = re.compile(rf"https?:/+[^/]+/({ID.pattern})(?:[/?#].*)?")
# a revision in the id, as other tools write it
ID_AT = re.compile(rf"({ID.pattern})@(.+)")
# a directory in the cache: no id has two hyphens in a row
SNAPSHOT = re.compile(r"models--((?:(?!--)[^/])+)--((?:(?!--)[^/])+)/snapshots/([^/]+)$")
WEIGHTS = "*.safetensors"
# copies of the weights, and what other programs need
LEFT_OUT = (
    *OTHER_WEIGHTS,
    *STATE_FILES,
    *("consolidated*", "model.*.safetensors*", "*/model*.safetensors.index.json"),
    *("onnx/*", "openvino/*", "coreml/*", "original/*", "metal/*", "runs/*", "checkpoint-*"),
)
# bytes of a tensor that is read by itself
MOST_READ = 1 << 20
# of a file that are asked for first: most headers are shorter
FIRST_BYTES = 100_000
# seconds until the cache is used
TIMEOUT = 10.0
# of an error message
MOST_CHARACTERS = 200


class HubModel(NamedTuple):
    """A model on the Hub, at one commit."""

    id: str
    commit: str


def hub_model(directory: Path | None) -> HubModel | None:
    """The model whose snapshot in the Hub's cache a directory is; None: it is another directory."""
    parts = SNAPSHOT.search(directory.absolute().as_posix()) if directory else None
    return HubModel(f"{parts[1]}/{parts[2]}", parts[3]) if parts else None


def name_of(directory: Path) -> str:
    """The name of a source for records: that of its model on the Hub, else of the directory.

    Bytes that are no UTF-8 become escapes, as in Python's error messages.
    """
    on_hub = hub_model(directory)
    name = os.fsencode(directory.resolve().name)
    return on_hub.id if on_hub else name.decode(errors="backslashreplace")


def located(source: Any, revision: str | None = None, *, weights: bool = True) -> Any:
    """The directory of a source; of a model on the Hub, the one that it is downloaded to.

    Args:
        source: a directory, an id on the Hub, or anything else, which is returned as it is.
        revision: branch, tag or commit of a model on the Hub.
        weights: False: its weights stay there if the cache lacks them, see `read_remote_headers`.
    """
    is_name = isinstance(source, (str, Path))
    if is_name and not os.path.exists(source):
        _refuse_other_names(str(source))
    # unlike Path.exists this takes names of any length
    if is_name and not os.path.exists(source) and ID.fullmatch(str(source)):
        return _download(str(source), revision, LEFT_OUT if weights else (*LEFT_OUT, WEIGHTS))
    if revision is not None:
        given = str(source) if is_name else f"a {type(source).__name__}"
        raise GrowthError(
            f"revision={revision!r} (--revision) is for models on the Hub, named ORGANISATION/NAME;"
            f" the source is {given}"
        )
    if not is_name:
        return source
    model = hub_model(Path(source))
    if weights and model and lacks_weights(Path(source)):
        # the snapshot of a plan
        return _download(model.id, model.commit, LEFT_OUT)
    return Path(source)


def _refuse_other_names(name: str) -> None:
    """Refuse names that mean a model on the Hub and are not its id."""
    page, at = PAGE.fullmatch(name), ID_AT.fullmatch(name)
    if page:
        raise GrowthError(f"{page[1]} is written as an address: give its name alone, {page[1]}")
    if name.startswith(("http:/", "https:/")):
        raise GrowthError(f"{name} is an address: give a directory, or ORGANISATION/NAME")
    if at:
        raise GrowthError(f"{name}: give {at[1]} --revision {at[2]} (in Python revision={at[2]!r})")


def _download(name: str, revision: str | None, left_out: tuple[str, ...]) -> Path:
    # imported here, as most growths do not need it
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars

    if not sys.stderr.isatty() and not are_progress_bars_disabled():
        disable_progress_bars()
    failure = None
    try:
        # its files are looked at before any is downloaded
        info = HfApi().model_info(name, revision=revision, timeout=TIMEOUT)
    except Exception as error:
        # which classes its client raises depends on its version
        failure = error
    else:
        names = {file.rfilename for file in info.siblings or ()}
        refuse_files(name, {file for file in names if "/" not in file})
    try:
        directory = snapshot_download(
            name,
            revision=revision,
            ignore_patterns=list(left_out),
            local_files_only=failure is not None,
        )
    except Exception as error:
        raise GrowthError(_why(name, revision, failure or error)) from error
    return Path(directory)


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

            with _reaching(self.model):
                file = hf_hub_download(self.model.id, name, revision=self.model.commit)
            of_file = weight_file(file)
            return files.Header(of_file, self.raw_name, self.shape, self.dtype, self.start).read()
        data, _ = _bytes_of(self.model, name, self.start, self.nbytes)
        return torch.frombuffer(bytearray(data), dtype=self.dtype).view(self.shape)

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the first axis."""
        return self.read()[start:stop] if self.shape else self.read()


def lacks_weights(directory: Path) -> bool:
    """Whether a directory is a model in the Hub's cache of which weights are still on the Hub."""
    return hub_model(directory) is not None and not all(
        os.path.isfile(directory / name) for name in files.shard_names(directory)
    )


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
        with _reaching(model):
            is_single = HfApi().file_exists(model.id, files.WEIGHTS_FILE, revision=model.commit)
    headers = files.read_headers(directory, read_shard, is_single)
    return {
        name: RemoteTensor(**dataclasses.asdict(header), model=model)
        for name, header in headers.items()
    }


@contextlib.contextmanager
def _reaching(model: HubModel) -> Iterator[None]:
    """Turn errors of the Hub's client into `GrowthError`."""
    try:
        yield
    except Exception as error:
        raise GrowthError(_why(model.id, model.commit, error)) from error


def _bytes_of(model: HubModel, name: str, start: int, count: int) -> tuple[bytes, int]:
    """Bytes of a file on the Hub from `start` on, at most `count`, and the size of the file."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    if not count:
        return b"", 0
    headers = {**build_hf_headers(), "Range": f"bytes={start}-{start + count - 1}"}
    url = hf_hub_url(model.id, name, revision=model.commit)
    with _reaching(model):
        answer = get_session().get(url, headers=headers, timeout=TIMEOUT, follow_redirects=True)
        hf_raise_for_status(answer)
    size = answer.headers.get("Content-Range", "").rpartition("/")[2]
    if answer.status_code != 206 or not size.isdigit():
        raise GrowthError(f"{model.id}: the Hub does not send parts of {name}: download it first")
    return answer.content, int(size)


def _why(name: str, revision: str | None, error: Exception) -> str:
    """What is wrong with a model of the Hub, and what to do, in one line."""
    from huggingface_hub import errors

    at = "" if revision is None else f" --revision {revision}"
    if isinstance(error, errors.GatedRepoError):
        return f"{name}: accept its terms on its page on the Hub, and log in: hf auth login"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name} has no revision {revision!r}: give a branch, a tag or a commit of it"
    if isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
        return (
            f"{name} is neither a directory nor a model on the Hub: check the spelling; if the "
            "model is private, log in: hf auth login"
        )
    if isinstance(error, OSError) and error.errno:
        # of the disk
        return f"{name} cannot be downloaded: {error.strerror}: {error.filename}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        reason = "HF_HUB_OFFLINE is set"
    else:
        text = " ".join(str(error).split()) or type(error).__name__
        reason = f"the Hub cannot be reached ({text[:MOST_CHARACTERS]})"
    return (
        f"{name} is no directory, and as a model on the Hub it is not in the cache, while {reason}:"
        f" run `hf download {name}{at}` where there is a network, or give a directory"
    )
