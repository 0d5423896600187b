"""Training data as the options say: `load_data`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import tokenizers
import torch
import torch.distributed as dist
import transformers
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import ConcatDataset, Dataset
from tqdm import tqdm

from growkern.arguments import check_kind
from growkern.errors import GrowthError, clean, counted, human
from growkern.growth.source import Stamps
from growkern.train.dataset.cache import (
    IDS,
    LABELS,
    VERSION,
    TokenRows,
    Tokens,
    cached_rows,
    digest_of,
    from_first,
    user_cache,
)
from growkern.train.dataset.records import Reader, ReadingSettings, cut_rows
from growkern.train.dataset.source import TEXT, DataSource, find_sources, plain_errors, text_records
from growkern.train.dataset.stream import TokenStream
from growkern.train.model import IGNORE_INDEX, head_of
from growkern.train.objectives import CausalLMCollator, Collator, MaskedLMCollator, OuterCollator
from growkern.train.rules import check
from growkern.train.sections import DataSection

TrainRows: TypeAlias = TokenRows | TokenStream | ConcatDataset[dict[str, Any]]


@dataclass(frozen=True)
class TrainingData:
    """The data of a run.

    Attributes:
        options: it was loaded with.
        row_weights: key of the weights of tokens in the batches; None: there are none.
        pairs: whether the rows have two sides, for an encoder and a decoder.
        train: rows on disk, or a stream of them; those of several sources one after the other.
        validation: rows on disk, by their names if there are several sets; None: there are none.
    """

    options: DataSection
    row_weights: str | None
    pairs: bool
    train: TrainRows
    validation: TokenRows | dict[str, TokenRows] | None

    def collator(self, tokenizer: Any, *, causal: bool = False, seed: int = 0) -> Collator:
        """Makes batches of the rows.

        Args:
            causal: whether the model predicts the next token; else tokens are masked. Only read
                with the objective "auto", and not for pairs.
            seed: of the masks, and of all else that is drawn.

        Raises:
            GrowthError: the tokenizer lacks a token that the objective needs, such as a mask.
        """
        if self.pairs:
            plain = CausalLMCollator(tokenizer)
            return ColumnCollator(plain, labels=True, weights=self.row_weights)
        options, has_labels = self.options, self.options.labels_column is not None
        objective = options.objective
        if objective == "auto":
            objective = "clm" if causal else "mlm"
        inner = self._plain("clm" if has_labels else objective, tokenizer, seed)
        if not has_labels and self.row_weights is None:
            return inner
        return ColumnCollator(inner, labels=has_labels, weights=self.row_weights)

    def _plain(self, objective: str, tokenizer: Any, seed: int) -> Collator:
        """The collator of an objective, which knows the tokens of the rows alone."""
        options = self.options
        share, mean_span = options.share, options.mean_span_length
        if objective == "clm":
            return CausalLMCollator(tokenizer)
        if objective == "mlm":
            return MaskedLMCollator(tokenizer, share, seed)
        # a run needs the code of its own objective alone
        from growkern.train.objectives import DenoisingCollator, SpanCorruptionCollator

        if objective == "denoising":
            return DenoisingCollator(tokenizer, share, mean_span, seed)
        corrupting = SpanCorruptionCollator(tokenizer, share, mean_span, seed)
        corrupting.check_rows(options.row_length)
        return corrupting


class ColumnCollator(OuterCollator):
    """Adds labels to the batches of another collator, and weights under a key, if rows bring them.

    An evaluation weighs all labels alike.
    """

    def __init__(self, collator: Collator, *, labels: bool, weights: str | None) -> None:
        super().__init__(collator)
        self.labels, self.weights = labels, weights

    def frozen(self) -> ColumnCollator:
        """The variant for evaluation."""
        return ColumnCollator(super().frozen(), labels=self.labels, weights=None)

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, Any]:
        batch = self.inner(features)
        if self.labels:
            # those of pairs have lengths of their own
            labels = [torch.as_tensor(feature[LABELS]).long() for feature in features]
            batch["labels"] = pad_sequence(labels, True, IGNORE_INDEX)
        if self.weights is not None:
            weights = [torch.as_tensor(feature[self.weights]).float() for feature in features]
            batch[self.weights] = pad_sequence(weights, True)
        return batch


class TokenBlocks(Dataset[dict[str, np.ndarray]]):
    """Token blocks of one length, (N, S) int32: `blocks[i]` is {"input_ids": (S,) int32}."""

    def __init__(self, tokens_NS: np.ndarray) -> None:
        self.tokens_NS = tokens_NS

    def __len__(self) -> int:
        return len(self.tokens_NS)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"input_ids": self.tokens_NS[index]}


def load_data(
    data: DataSection,
    tokenizer: Any,
    *,
    base: str | Path = ".",
    row_weights: str | None = None,
    encoder_decoder: bool = False,
    seed: int = 0,
    progress: bool = True,
    name: str = "data.train",
) -> TrainingData:
    """Load the data of a run: tokenised and cached on disk, or as a stream.

    With several processes all of them call this, after `torch.distributed` was initialised. One of
    them tokenises.

    Args:
        data: the options.
        tokenizer: of transformers.
        base: folder that relative paths begin in.
        row_weights: column with weights: a number per token, or one per record.
        encoder_decoder: whether the model has an encoder and a decoder, so that rows are pairs.
            The objective "pairs" says so too.
        seed: of the order of a stream.
        progress: whether to show a progress bar.
        name: of the training files, for messages.

    Raises:
        GrowthError: the data cannot be found, read or cached, or does not fit the options; or
            several processes cannot wait for each other yet.
    """
    check_kind("data", data, DataSection, "a growkern.DataSection")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1 and not dist.is_initialized():
        raise GrowthError(
            f"{processes} processes were started, but they cannot wait for each other: call "
            "torch.distributed.init_process_group or make the TrainingArguments before load_data"
        )
    sources = find_sources(data, Path(base), name)
    readers = open_data(data, sources, tokenizer, row_weights, pairs=encoder_decoder)
    return read_data(data, readers, base=Path(base), seed=seed, progress=progress)


def open_data(
    data: DataSection,
    sources: Mapping[str, DataSource | None],
    tokenizer: Any,
    row_weights: str | None = None,
    *,
    pairs: bool = False,
) -> dict[str, Reader]:
    """What reads the sources of `find_sources`, training data first. Nothing is read yet.

    Data that does not fit the options, the tokenizer or the sides of the model is refused.
    """
    pairs = pairs or data.objective == "pairs"
    check("sides", data=data, pairs=pairs)
    check("weights", weights=row_weights, objective=data.objective)
    readers = {}
    for key, source in sources.items():
        if source is not None:
            weights = row_weights if key.startswith("train") else None
            settings = ReadingSettings.of(data, source, tokenizer, weights, pairs=pairs)
            readers[key] = Reader(settings, tokenizer, source)
    return readers


def early_collator(
    data: DataSection, readers: Mapping[str, Reader], tokenizer: Any, seed: int
) -> Collator:
    """The collator of data that was not read yet; one that takes passages of rows has none."""
    settings, rows = next(iter(readers.values())).settings, cast(Any, ())
    empty = TrainingData(data, settings.weights, settings.pairs, rows, None)
    return empty.collator(tokenizer, seed=seed)


def read_data(
    data: DataSection, readers: Mapping[str, Reader], *, base: Path, seed: int, progress: bool
) -> TrainingData:
    """The data behind `load_data`, whose arguments it has, of readers that were checked."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    location = user_cache() if data.cache is None else base / data.cache
    shows = progress and os.environ.get("RANK", "0") == "0"

    def cached(key: str, part: str | None = None) -> Any:
        if key not in readers:
            return None
        reader = readers[key]
        source, weights = reader.source, reader.settings.weights
        # its stamps of the files come before the fingerprint that names the directory
        rows = _rows_of(source, reader, shows)
        directory = location / from_first(lambda: _key(reader))
        # about 4 bytes of text become a token of 4 bytes. The size of a split is not known
        size = sum(file.stat().st_size for file in (() if source.dataset else source.files))
        return cached_rows(directory, rows, source.name, size, weights, part)

    # all sources to train on have the same settings
    first = next(iter(readers.values()))
    row_weights = first.settings.weights
    rows: TrainRows
    if data.train_names:
        rows = ConcatDataset([cached(f"train.{part}", part) for part in data.train_names])
    elif data.streaming:
        rows = TokenStream(
            first.source.stream(),
            first,
            rank=int(os.environ.get("RANK", "0")),
            processes=processes,
            window=data.shuffle_window,
            seed=seed,
            weights=row_weights,
        )
    else:
        rows = cached("train")
    sets = {part: cached(f"validation.{part}") for part in data.validation_names}
    return TrainingData(data, row_weights, first.settings.pairs, rows, sets or cached("validation"))


def describe_data(train: TrainRows, validation: TokenRows | dict[str, TokenRows] | None) -> str:
    """The training and the validation data in one line."""
    if isinstance(train, TokenStream):
        text = f"a stream of {counted(train.records.num_shards, 'part')}"
    elif isinstance(train, ConcatDataset):
        parts: Any = train.datasets
        text = ", ".join(f"{_sized(rows)} of {rows.source}" for rows in parts)
    else:
        text = f"{_sized(train)} in {train.directory.resolve()}"
    if isinstance(validation, dict):
        sets = (f"{counted(len(rows), 'row')} of {name}" for name, rows in validation.items())
        return f"{text}; for evaluation {', '.join(sets)}"
    return (
        text if validation is None else f"{text}; {counted(len(validation), 'row')} for evaluation"
    )


def _sized(rows: Any) -> str:
    return f"{counted(len(rows), 'row')}, {human(rows.tokens)} tokens"


def _rows_of(source: DataSource, reader: Reader, progress: bool) -> Iterator[Tokens]:
    """The rows of a source, whose files must stay as they are from now on."""
    files = [Stamps.of(file) for file in source.files]

    def records(shown: Iterable[Mapping[str, Any]]) -> Iterator[tuple[None, Mapping[str, Any]]]:
        with plain_errors(source.name):
            yield from ((None, record) for record in shown)

    def rows() -> Iterator[Tokens]:
        every: Any = source.records()
        # None: a stream that is no terminal shows no bar; an error clears the bar before its line
        with tqdm(
            every,
            clean(f"tokenising {source.name}"),
            len(every) if hasattr(every, "__len__") else None,
            unit=" records",
            disable=None if progress else True,
            leave=False,
        ) as shown:
            for _, _, row in cut_rows(reader.runs(records(shown)), reader.settings):
                yield row
        for stamps in files:
            stamps.check()

    return rows()


def pack_text(texts: Iterable[str | Path], tokenizer: Any, sequence_length: int) -> TokenBlocks:
    """Tokenise texts, join them and cut them into blocks of one length, in memory.

    A `Path` is read as a UTF-8 file, a `str` is the text itself. Each text is followed by the
    tokenizer's separator (eos, else sep). Each block starts with the cls token if the tokenizer has
    one. Tokens left over at the end are dropped; a text that is shorter than one block is refused.
    """
    body = sequence_length - len(head_of(tokenizer))
    if body < 1:
        raise GrowthError(f"sequence_length is {sequence_length}: it must be at least 2")
    data, source = (
        DataSection(("texts",), sequence_length=sequence_length),
        DataSource("the text", is_text=True),
    )
    settings = ReadingSettings.of(data, source, tokenizer, None)
    records = (
        (None, record)
        for text in texts
        for record in ([{TEXT: text}] if isinstance(text, str) else text_records([text]))
    )
    runs = list(Reader(settings, tokenizer, source).runs(records))
    rows = [row[IDS] for _, _, row in cut_rows(runs, settings)]
    if not rows:
        count = sum(len(tokens[IDS]) for _, tokens in runs)
        raise GrowthError(
            f"the text has {count} tokens, fewer than one block of {body}: "
            "give more text or a smaller sequence_length"
        )
    return TokenBlocks(np.stack(rows))


def _key(reader: Reader) -> str:
    """The name of the cache of a source."""
    settings, tokenizer = vars(reader.settings), _of_tokenizer(reader.tokenizer)
    versions = [VERSION, transformers.__version__, tokenizers.__version__]
    return digest_of([versions, reader.source.fingerprint(), settings, tokenizer])


def _of_tokenizer(tokenizer: Any) -> Any:
    """Values that change with the tokens that a tokenizer makes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return [type(tokenizer).__name__, backend.to_str()]
    options = repr(sorted(getattr(tokenizer, "init_kwargs", {}).items(), key=lambda item: item[0]))
    return [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), options]
