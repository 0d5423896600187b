"""The options of `[data]` in a run file, under the same names in Python."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from growkern.arguments import Limit, between, check_fields
from growkern.errors import GrowthError
from growkern.train.file_rules import OF_BARE_ROWS
from growkern.train.objectives.names import DENOISING_SHARE, SHARE, SPANS, Objective, row_length
from growkern.train.rules import check

# more tokens than any row has
MOST = 1 << 40


@dataclass(frozen=True)
class DataSection:
    """The data to train on: files, or a data set that the `datasets` library reads.

    Args:
        train: files or glob patterns. Plain text is read as UTF-8. Files of records (.jsonl, .json,
            .csv, .tsv, .parquet, .arrow) need the `datasets` library. Or a table of names and such
            lists: each row then holds the name of its source as "source", and each source may have
            a teacher of its own.
        validation: the same for evaluation; empty means no evaluation. Or a table of names and
            such lists, as in `{ law = ["law/*.txt"], news = ["news/*.txt"] }`: each is evaluated by
            itself, and logged as eval_law_loss and eval_news_loss. The first one is eval_loss too.
        dataset: in place of `train`: a name on the Hugging Face Hub, or a directory. The directory
            was written by `save_to_disk`, or holds files that `datasets.load_dataset` reads.
        dataset_config: the part of a data set that has several.
        revision: branch, tag or commit of a data set on the Hub.
        split: of the data set, to train on. Slices and sums such as "train[:90%]+extra" are
            allowed; of a stream, only for a directory of `save_to_disk`.
        validation_split: of the data set, for evaluation; None means no evaluation.
        text_column: column of the records that holds their text; of pairs, the text that is read.
        target_column: for models of an encoder and a decoder: column with the text to be written.
            Each record is a row, and both of its texts get the tokenizer's special tokens.
        input_ids_column: column with token ids. The text is not used then.
        labels_column: column with one label per token id, -100 for none. Without it the labels
            are made as for text. For models of an encoder and a decoder: column with the token ids
            to be written, of any number.
        attention_mask_column: column with 1 per token and 0 for padding, which is left out.
        packing: join the records and cut them into rows of `sequence_length` tokens. False keeps
            one row per record, or several of a longer text; a file of plain text is one record.
            None packs text, and keeps pairs and records of token ids.
        streaming: tokenise while training, without a cache. The training data is read again from
            its start when it ends. The validation data is cached.
        shuffle_window: a stream collects so many rows and gives them in random order; 0 keeps the
            order of the data.
        cache: directory for tokenised data; None takes the environment variable GROWKERN_TOKENS,
            or else the user's cache.
        sequence_length: tokens per row, or per input of the encoder with "span_corruption"; of
            pairs, the most tokens of either side.
        objective: how rows become batches: "mlm" (masked tokens), "clm" (the next token),
            "span_corruption" (T5), "denoising" (BART) or "pairs" (records with a text or token ids
            to be written). "auto" takes that of the model's class, and "pairs" for records of an
            encoder and a decoder.
        masking_probability: chance or share of the tokens that are masked, by an objective that
            masks some. None takes 0.15, and 0.3 with "denoising".
        mean_span_length: mean tokens per span, with "span_corruption" and "denoising".

    Raises:
        GrowthError: a value is out of range, or options contradict each other.
    """

    LIMITS: ClassVar[dict[str, Limit]] = {
        # one token has no other one to predict it from
        "sequence_length": between(2, MOST),
        "shuffle_window": between(0, MOST),
        "masking_probability": Limit(lambda x: 0 < x <= 1, "lie in (0, 1]"),
        "mean_span_length": SPANS,
    }

    train: tuple[str, ...] | dict[str, tuple[str, ...]] = ()
    validation: tuple[str, ...] | dict[str, tuple[str, ...]] = ()
    dataset: str | None = None
    dataset_config: str | None = None
    revision: str | None = None
    split: str = "train"
    validation_split: str | None = None
    text_column: str = "text"
    target_column: str | None = None
    input_ids_column: str | None = None
    labels_column: str | None = None
    attention_mask_column: str | None = None
    packing: bool | None = None
    streaming: bool = False
    shuffle_window: int = 1000
    cache: str | None = None
    sequence_length: int = 128
    objective: Objective = "auto"
    masking_probability: float | None = None
    mean_span_length: float = 3.0

    def __post_init__(self) -> None:
        for key, names in (("train", self.train_names), ("validation", self.validation_names)):
            for name in names:
                if not re.fullmatch(r"[a-z0-9_]+", name):
                    raise GrowthError(
                        f"data.{key} has the name {name!r}: use small letters, digits and _"
                    )
        check("data", self)
        if self.dataset is None and not self.train:
            raise GrowthError("give data.train (files) or data.dataset (a data set)")
        check_fields(self, "data")
        if self.row_length < 2:
            raise GrowthError(
                f"data.sequence_length is {self.sequence_length}, too short for data.objective = "
                f"{self.objective!r}: give 8 or more"
            )

    @property
    def share(self) -> float:
        """The share of the tokens that are masked."""
        if self.masking_probability is not None:
            return self.masking_probability
        return DENOISING_SHARE if self.objective == "denoising" else SHARE

    @property
    def row_length(self) -> int:
        """Tokens per row, before the collator of the objective adds and takes out tokens."""
        return row_length(self.objective, self.sequence_length, self.share, self.mean_span_length)

    @property
    def is_bare(self) -> bool:
        """Whether rows have no special tokens at their ends."""
        return self.objective in OF_BARE_ROWS

    @property
    def train_names(self) -> tuple[str, ...]:
        """The names of several training sources; empty for a single one."""
        return tuple(self.train) if isinstance(self.train, dict) else ()

    @property
    def validation_names(self) -> tuple[str, ...]:
        """The names of several validation sets; empty for a single one."""
        return tuple(self.validation) if isinstance(self.validation, dict) else ()

    @property
    def pack(self) -> bool:
        """Whether records are joined and cut into rows of one length."""
        if self.packing is not None:
            return self.packing
        return self.input_ids_column is None and self.target_column is None
