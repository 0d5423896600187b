"""Sources on the Hugging Face Hub: downloaded into its usual cache, and found there again.

A source that exists as a path is never looked up. Other names of the form ORGANISATION/NAME are
models of the Hub, unless there is a folder ORGANISATION here. Only the files that growth can use
are downloaded. Where the Hub cannot be reached, the cache is used.

PyTorch is not imported here, so that a wrong name is told at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from growkern.errors import GrowthError, a_kind
from growkern.growth.source.refused import (
    OTHER_WEIGHTS,
    QUANTISED,
    STATE_FILES,
    refuse_files,
)

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


def is_hub_name(name: str, base: Path = Path()) -> bool:
    """Whether the name of a path that is not there means a model on the Hub.

    Where its first folder is there, the rest of it is wrong: a path is nearly always meant.
    """
    return bool(ID.fullmatch(name)) and not (base / name.partition("/")[0]).is_dir()


def located(source: Any, revision: str | None = None, *, weights: bool = True) -> Any:
    """The directory of a source; of a model on the Hub, the one that it is downloaded to.

    Args:
        source: a directory, an id on the Hub, or anything else, which is returned as it is.
        revision: branch, tag or commit of a model on the Hub.
        weights: False: its weights stay there if the cache lacks them; `formats.py` reads them.
    """
    is_name = isinstance(source, (str, Path))
    if is_name and not os.path.exists(source):
        refuse_other_names(str(source))
    # unlike Path.exists this takes names of any length
    if is_name and not os.path.exists(source) and is_hub_name(str(source)):
        return _download(str(source), revision, weights)
    if revision is not None:
        given = str(source) if is_name else a_kind(source)
        raise GrowthError(
            f"revision={revision!r} (--revision) is for models on the Hub, named ORGANISATION/NAME;"
            f" the source is {given}"
        )
    if not is_name:
        return source
    model = hub_model(Path(source))
    if weights and model and lacks_weights(Path(source)):
        # the snapshot of a plan
        return _download(model.id, model.commit, weights)
    return Path(source)


def refuse_other_names(name: str) -> None:
    """Refuse names that mean a model on the Hub and are not its id."""
    page, at = PAGE.fullmatch(name), ID_AT.fullmatch(name)
    if page:
        raise GrowthError(f"{page[1]} is written as an address: give its name alone, {page[1]}")
    if name.startswith(("http:/", "https:/")):
        raise GrowthError(f"{name} is an address: give a directory, or ORGANISATION/NAME")
    if at:
        raise GrowthError(f"{name}: give {at[1]} --revision {at[2]} (in Python revision={at[2]!r})")


def _download(name: str, revision: str | None, weights: bool) -> Path:
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
        # a plan reads no weights
        left_out = () if weights else QUANTISED
        refuse_files(name, {x for x in names if "/" not in x and x not in left_out})
    try:
        directory = snapshot_download(
            name,
            revision=revision,
            ignore_patterns=[*LEFT_OUT, *(() if weights else (WEIGHTS,))],
            local_files_only=failure is not None,
        )
    except Exception as error:
        raise GrowthError(_why(name, revision, failure or error)) from error
    return Path(directory)


def lacks_weights(directory: Path) -> bool:
    """Whether a directory is a model in the Hub's cache of which weights are still on the Hub."""
    if hub_model(directory) is None:
        return False
    from growkern.growth.source.files import shard_names

    return not all(os.path.isfile(directory / name) for name in shard_names(directory))


@contextlib.contextmanager
def reaching(model: HubModel) -> Iterator[None]:
    """Turn errors of the Hub's client into `GrowthError`."""
    try:
        yield
    except Exception as error:
        raise GrowthError(_why(model.id, model.commit, error)) from error


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
