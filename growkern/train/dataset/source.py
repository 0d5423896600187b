"""Finds the training data that `[data]` in a run file names, and opens its records.

The data is files of text, files of records, or data sets. The `datasets` library is optional. Only
text files that are not streamed do without it.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from growkern.errors import GrowthError, warn
from growkern.files import matching_files, regular_size
from growkern.train.dataset.cache import fingerprint
from growkern.train.sections import DataSection

# suffix of a file of records -> loader of `datasets`, and its options
LOADERS: dict[str, tuple[str, dict[str, Any]]] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), ("json", {})),
    # an empty field is an empty text, and "NA" is a word
    ".csv": ("csv", {"keep_default_na": False}),
    ".tsv": ("csv", {"keep_default_na": False, "sep": "\t"}),
    ".parquet": ("parquet", {}),
    ".arrow": ("arrow", {}),
}
# files that hold texts in another form
NOT_TEXT = (".avro", ".db", ".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".7z")
# in a directory that `save_to_disk` wrote
SAVED = ("dataset_info.json", "dataset_dict.json")
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# the columns of a text file: its text in pieces, and whether more of the text follows
TEXT, CONTINUED = "text", "continued"
# characters of a text that are read at once
PIECE = 1 << 24


@dataclass(frozen=True)
class DataSource:
    """The records of one split.

    Attributes:
        name: for messages.
        files: its local files; empty for a data set on the Hub.
        is_text: whether the files are plain text.
        dataset: name on the Hub or local directory; None for files.
        config, revision, split: of the data set.
        is_remote_stream: whether a data set on the Hub is read without downloading all of it.
    """

    name: str
    files: tuple[Path, ...] = ()
    is_text: bool = False
    dataset: str | None = None
    config: str | None = None
    revision: str | None = None
    split: str = "train"
    is_remote_stream: bool = False

    def records(self) -> Iterable[Mapping[str, Any]]:
        """One pass over the records. Only a few of them are in memory at a time."""
        if self.is_text:
            return text_records(self.files)
        # of local files the library need not make a copy; it cannot take a slice of them without
        is_whole = bool(self.files) and not is_slice(self.split)
        return self._opened(streaming=self.is_remote_stream or is_whole)

    def stream(self) -> Any:
        """The records as a `datasets.IterableDataset`."""
        if self.is_text:
            return need_datasets(f"streaming {self.name}").IterableDataset.from_generator(
                text_records, gen_kwargs={"files": [str(file) for file in self.files]}
            )
        return self._opened(streaming=True)

    def fingerprint(self) -> list[Any]:
        """Values that change with the contents, and with what the names say of them.

        A name says how a file is read, and in a data set also to which split it belongs.
        """
        versions = [fingerprint(file) for file in self.files]
        if self.dataset is None:
            return versions if self.is_text else [self.files[0].suffix.lower(), *versions]
        if self.files:
            names = [file.relative_to(self.dataset).as_posix() for file in self.files]
            return [self.config, self.split, names, *versions]
        builder = self._builder()
        with plain_errors(self.name):
            files = (builder.config.data_files or {}).items()
            origins = {str(split): of_split.origin_metadata for split, of_split in files}
        return [self.dataset, builder.config.name, str(builder.hash), self.split, repr(origins)]

    def _opened(self, *, streaming: bool) -> Any:
        if self.dataset is not None and _is_saved(Path(self.dataset)):
            return self._saved(streaming=streaming)
        builder = self._builder()
        with plain_errors(self.name):
            if streaming:
                return builder.as_streaming_dataset(split=self.split)
            builder.download_and_prepare()
            return builder.as_dataset(split=self.split)

    def _saved(self, *, streaming: bool) -> Any:
        datasets = need_datasets(f"reading {self.name}")
        with plain_errors(self.name):
            saved = datasets.load_from_disk(self.dataset)
        splits = saved if isinstance(saved, dict) else {"train": saved}
        if is_slice(self.split):
            with plain_errors(f"{self.name}, split {self.split!r},"):
                sizes = {name: len(records) for name, records in splits.items()}
                parts = datasets.ReadInstruction.from_spec(self.split).to_absolute(sizes)
                records = datasets.concatenate_datasets(
                    [splits[part.splitname].select(range(part.from_, part.to)) for part in parts]
                )
        elif self.split in splits:
            records = splits[self.split]
        else:
            has = f"it has {', '.join(saved)}" if saved is splits else "it was saved without any"
            raise GrowthError(f"{self.name} has no split {self.split!r}: {has}")
        if not streaming:
            return records
        # as many parts as its files, so that processes and data workers can share them
        shards = min(len(records), max(1, len(records.cache_files))) or 1
        return records.to_iterable_dataset(num_shards=shards)

    def _builder(self) -> Any:
        datasets = need_datasets(f"reading {self.name}")
        with plain_errors(self.name):
            if self.dataset is not None:
                return datasets.load_dataset_builder(
                    self.dataset, self.config, revision=self.revision
                )
            loader, options = LOADERS[self.files[0].suffix.lower()]
            # names may hold brackets and stars, which stand for themselves
            names = [glob.escape(str(file)) for file in self.files]
            return datasets.load_dataset_builder(loader, data_files={self.split: names}, **options)


def find_sources(
    data: DataSection, base: Path, name: str = "data.train"
) -> dict[str, DataSource | None]:
    """The sources of "train" and "validation"; nothing is read.

    Several sets are "train.<name>" or "validation.<name>" each, without a "train" or "validation".
    Relative paths begin in `base`. The name is that of the training files, for messages.
    """
    if data.dataset is not None:
        # the data for evaluation is cached in any case
        return {
            "train": _of_dataset(base, data, data.split, streamed=data.streaming),
            "validation": _of_dataset(base, data, data.validation_split, streamed=False),
        }
    sources = {}
    for key, own, sets in (
        ("train", name, data.train),
        ("validation", "data.validation", data.validation),
    ):
        if not isinstance(sets, dict):
            sources[key] = _of_files(base, own, sets)
            continue
        for part, files in sets.items():
            source = sources[f"{key}.{part}"] = _of_files(base, f"{own}.{part}", tuple(files))
            if source is None:
                raise GrowthError(f"{own}.{part} is empty: give files, or leave the name out")
    return sources


def _of_files(base: Path, key: str, patterns: tuple[str, ...]) -> DataSource | None:
    files = [file for pattern in patterns for file in matching_files(base, pattern, key)]
    if not files:
        return None
    loaders: dict[str, Path] = {}
    for file in files:
        suffix = file.suffix.lower()
        if suffix in NOT_TEXT:
            raise GrowthError(
                f"{file} is neither text nor a file of records: unpack it, or write its texts to "
                ".txt or .jsonl files"
            )
        loaders.setdefault(suffix if suffix in LOADERS else ".txt", file)
    if len({LOADERS.get(suffix, ("text", {}))[0] for suffix in loaders}) > 1 or (
        {".csv", ".tsv"} <= loaders.keys()
    ):
        first, second = list(loaders.values())[:2]
        raise GrowthError(f"{key} mixes files of two kinds, {first} and {second}: give one kind")
    return DataSource(key, tuple(files), is_text=".txt" in loaders)


def _of_dataset(
    base: Path, data: DataSection, split: str | None, *, streamed: bool
) -> DataSource | None:
    if split is None:
        return None
    name, directory = str(data.dataset), base / str(data.dataset)
    files: tuple[Path, ...] = ()
    if directory.is_dir():
        name = str(directory)
        files = tuple(sorted(path for path in directory.rglob("*") if path.is_file()))
        if not files:
            raise GrowthError(f"data.dataset {directory} is an empty directory")
    elif directory.exists() or not HUB_NAME.fullmatch(name) or name.startswith("."):
        raise GrowthError(
            f"data.dataset {directory} is not a directory: give a directory or a name on the Hub, "
            "and files as data.train"
        )
    is_remote = data.streaming and not files
    if (is_remote or streamed) and is_slice(split) and not _is_saved(directory):
        raise GrowthError(
            f"the split {split!r} is a slice, which cannot be streamed: the number of records is "
            "not known before all are read. Set data.streaming to false, or give a whole split"
        )
    return DataSource(
        f"data.dataset {name!r}",
        files,
        dataset=name,
        config=data.dataset_config,
        revision=data.revision,
        split=split,
        is_remote_stream=is_remote,
    )


def need_datasets(work: str) -> Any:
    """The `datasets` library. If it is missing, the message names the command that installs it."""
    if find_spec("datasets") is None:
        raise GrowthError(f"{work} needs the datasets library: pip install datasets")
    return importlib.import_module("datasets")


def _is_saved(directory: Path) -> bool:
    return any((directory / name).is_file() for name in SAVED)


def is_slice(split: str) -> bool:
    """Whether a split is a part of one, such as "train[:50%]", or several joined by "+"."""
    return "[" in split or "+" in split


@contextlib.contextmanager
def plain_errors(name: str) -> Iterator[None]:
    """While active, errors of `datasets` become one line: it raises many kinds of them."""
    try:
        yield
    except GrowthError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise GrowthError(f"{name} cannot be loaded: {why}") from error


# ------------------------------------------------------------------- text


def text_records(files: Iterable[str | Path]) -> Iterator[dict[str, Any]]:
    """Text files as records: a long text comes in several pieces."""
    for file in files:
        for piece, is_last in text_pieces(Path(file)):
            yield {TEXT: piece, CONTINUED: not is_last}


def text_pieces(file: Path) -> Iterator[tuple[str, bool]]:
    """A text file in pieces, and whether each is the last. All but the last end with a line.

    A file of up to 16 million characters is one piece.
    """
    with _text_stream(file) as stream:
        held = stream.read(PIECE)
        _note_nul(held, file)
        while more := stream.read(PIECE):
            _note_nul(more, file)
            cut = held.rfind("\n") + 1
            if cut:
                yield held[:cut], False
            held = held[cut:] + more
    yield held, True


@contextlib.contextmanager
def _text_stream(file: Path) -> Iterator[TextIO]:
    try:
        regular_size(file)
        with file.open(encoding="utf-8") as stream:
            yield stream
    except GrowthError as error:
        raise GrowthError(f"cannot read the text file {error}") from error
    except UnicodeDecodeError as error:
        raise GrowthError(
            f"cannot read the text file {file}: {error}: give a text file, saved as UTF-8"
        ) from error
    except OSError as error:
        raise GrowthError(f"cannot read the text file {file}: {error.strerror or error}") from error


def read_text(file: Path, most: int = -1) -> str:
    """A text file, or its first `most` characters."""
    with _text_stream(file) as stream:
        text = stream.read(most)
    _note_nul(text, file)
    return text


def _note_nul(text: str, file: Path) -> None:
    """Warn of NUL characters, which no text has: UTF-16 without a mark, or a binary file."""
    if "\0" in text:
        warn(
            f"{file} has NUL characters, so it may be no text: they become tokens like others. "
            "If it is UTF-16 or binary, save it as UTF-8, or leave it out"
        )
