"""Finds the training data, and opens its records: files of text, files of records, data sets.

The `datasets` library is optional. Only text files that are not streamed do without it.
"""

from __future__ import annotations

import contextlib
import glob
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from growkern.errors import GrowthError
from growkern.train.dataset.files import fingerprint, matching_files, text_pieces
from growkern.train.dataset.options import DataSection

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


@dataclass(frozen=True)
class Source:
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
            datasets = need_datasets(f"streaming {self.name}")
            files = [str(file) for file in self.files]
            return datasets.IterableDataset.from_generator(
                text_records, gen_kwargs={"files": files}
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
            found = {str(split): one.origin_metadata for split, one in files}
        return [self.dataset, builder.config.name, str(builder.hash), self.split, repr(found)]

    def _opened(self, *, streaming: bool) -> Any:
        datasets = need_datasets(f"reading {self.name}")
        if self.dataset is not None and _is_saved(Path(self.dataset)):
            return self._saved(datasets, streaming=streaming)
        builder = self._builder()
        with plain_errors(self.name):
            if streaming:
                return builder.as_streaming_dataset(split=self.split)
            builder.download_and_prepare()
            return builder.as_dataset(split=self.split)

    def _saved(self, datasets: Any, *, streaming: bool) -> Any:
        with plain_errors(self.name):
            found = datasets.load_from_disk(self.dataset)
        splits = found if isinstance(found, dict) else {"train": found}
        if is_slice(self.split):
            with plain_errors(f"{self.name}, split {self.split!r},"):
                found = _sliced(datasets, splits, self.split)
        elif self.split in splits:
            found = splits[self.split]
        else:
            has = f"it has {', '.join(found)}" if found is splits else "it was saved without any"
            raise GrowthError(f"{self.name} has no split {self.split!r}: {has}")
        if not streaming:
            return found
        # as many parts as its files, so that processes and data workers can share them
        parts = min(len(found), max(1, len(found.cache_files))) or 1
        return found.to_iterable_dataset(num_shards=parts)

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
) -> dict[str, Source | None]:
    """The sources of "train" and "validation"; nothing is read.

    Several sets are "train.<name>" or "validation.<name>" each, without a "train" or "validation".
    Relative paths begin in `base`. The name is that of the training files, for messages.

    Raises:
        GrowthError: there is no such file or directory, or files of two kinds are mixed, or a
            slice is to be streamed.
    """
    if data.dataset is None:
        found = {}
        for key, sets in (("train", data.train), ("validation", data.validation)):
            own = name if key == "train" else f"data.{key}"
            if not isinstance(sets, dict):
                found[key] = _of_files(base, own, sets)
                continue
            for part, files in sets.items():
                found[f"{key}.{part}"] = _of_files(base, f"{own}.{part}", tuple(files))
                if found[f"{key}.{part}"] is None:
                    raise GrowthError(f"{own}.{part} is empty: give files, or leave the name out")
        return found
    # the data for evaluation is cached in any case
    return {
        "train": _of_dataset(base, data, data.split, streamed=data.streaming),
        "validation": _of_dataset(base, data, data.validation_split, streamed=False),
    }


def _of_files(base: Path, key: str, patterns: tuple[str, ...]) -> Source | None:
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
        one, other = list(loaders.values())[:2]
        raise GrowthError(f"{key} mixes files of two kinds, {one} and {other}: give one kind")
    return Source(key, tuple(files), is_text=".txt" in loaders)


def _of_dataset(
    base: Path, data: DataSection, split: str | None, *, streamed: bool
) -> Source | None:
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
    return Source(
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
    import datasets

    return datasets


def text_records(files: Iterable[str | Path]) -> Iterator[dict[str, Any]]:
    """Text files as records: a long text comes in several pieces."""
    for file in files:
        for piece, is_last in text_pieces(Path(file)):
            yield {TEXT: piece, CONTINUED: not is_last}


def _is_saved(directory: Path) -> bool:
    return any((directory / name).is_file() for name in SAVED)


def is_slice(split: str) -> bool:
    """Whether a split is a part of one, such as "train[:50%]", or several joined by "+"."""
    return "[" in split or "+" in split


def _sliced(datasets: Any, splits: Mapping[str, Any], spec: str) -> Any:
    sizes = {name: len(one) for name, one in splits.items()}
    parts = [
        splits[part.splitname].select(range(part.from_, part.to))
        for part in datasets.ReadInstruction.from_spec(spec).to_absolute(sizes)
    ]
    return datasets.concatenate_datasets(parts)


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
