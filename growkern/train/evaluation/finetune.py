"""`growkern.finetune`: how well a model learns to tell texts apart, over several seeds.

The task is made of local text: a passage is given, the source that it comes from is asked for. A
grown model and one from scratch can so be compared on a downstream task without a download.
"""

from __future__ import annotations

import contextlib
import copy
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

from growkern.arguments import MOST_NUMPY_SEED
from growkern.errors import GrowthError
from growkern.train.dataset.load import pack_text
from growkern.train.dataset.source import matching_files
from growkern.train.evaluation.evaluate import (
    check_confidence,
    opened,
    ratio_interval,
    without_nan,
)
from growkern.train.loss.batches import unchanged_random_state

# share of the passages of each source that is kept for the test, from the end of the source
TEST_SHARE = 0.2
# parameters that a language model may lack: the classifier starts with random ones
NEW = "pooler."


@dataclass(frozen=True)
class FinetuneReport:
    """Result of `growkern.finetune`; print `report.table()`.

    Attributes:
        accuracy: mean over the seeds, a share in 0 .. 1.
        low, high: confidence interval of the mean, Student's t over the seeds, cut to 0 .. 1;
            NaN for one seed.
        confidence: of the interval, in (0, 1).
        accuracies: of each seed, from `seed` on.
        chance: accuracy of guessing: every source has as many passages.
        sources: names of the sources.
        train, test: number of passages of all sources together.
        seed: the first one.
    """

    accuracy: float
    low: float
    high: float
    confidence: float
    accuracies: tuple[float, ...]
    chance: float
    sources: tuple[str, ...]
    train: int
    test: int
    seed: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; NaN becomes None."""
        return without_nan(vars(self))

    def table(self) -> Any:
        """The report as a rich table."""
        from rich.table import Table

        table = Table("", "accuracy")
        for number, accuracy in enumerate(self.accuracies, self.seed):
            table.add_row(f"seed {number}", f"{100 * accuracy:.1f} %")
        table.add_row("mean", f"{100 * self.accuracy:.1f} %")
        if not math.isnan(self.low):
            ends = f"{100 * self.low:.1f} to {100 * self.high:.1f} %"
            seeds = len(self.accuracies)
            table.add_row(f"{100 * self.confidence:g} % interval, t over {seeds} seeds", ends)
        table.add_row("chance", f"{100 * self.chance:.1f} %")
        table.add_row("passages, training and test", f"{self.train} and {self.test}")
        return table


def finetune(
    model: Any,
    text: Sequence[str | Path],
    *,
    tokenizer: Any | None = None,
    seeds: int = 3,
    seed: int = 0,
    epochs: float = 3.0,
    batch_size: int = 16,
    learning_rate: float = 5e-5,
    sequence_length: int = 128,
    passages: int = 500,
    confidence: float = 0.95,
    progress: bool = True,
) -> FinetuneReport:
    """Fine-tune a model on the task which source a passage comes from, and test it.

    Each source is cut into passages. The last fifth of each is the test, so no test passage lies
    between training passages. All sources give equally many. `transformers.Trainer` trains all
    weights under a new classifier, with dropout as in the config and a rate that falls to 0. Per
    seed the classifier, the order and the dropout differ; passages stay the same. With the same
    seeds, two models with one tokenizer see the same passages in the same order. The same call
    gives the same numbers on the same machine.

    Args:
        model: a language model with an encoder or a decoder, its checkpoint directory, or a model
            on the Hub, `ORGANISATION/NAME`. It is not changed.
        text: two or more sources: each a file, a folder (all files in it) or a glob pattern.
        tokenizer: of transformers, or its directory; None takes that of the checkpoint directory.
        seeds: number of runs.
        seed: of the first run; the others count on.
        epochs: passes over the training passages.
        batch_size: passages per step.
        learning_rate: of AdamW, at its highest.
        sequence_length: tokens per passage.
        passages: most passages of a source, spread evenly over it.
        confidence: of the interval over the seeds, in (0, 1).
        progress: whether to show a progress bar.

    Raises:
        GrowthError: options, model and text do not fit together, or a text cannot be read.
    """
    check_confidence(confidence)
    _check_numbers(locals(), "seeds", "epochs", "batch_size", "learning_rate", "passages")
    sources = _sources([text] if isinstance(text, (str, Path)) else text)
    model, reader, _ = opened(model, tokenizer, sequence_length, torch.float32)
    train, test = _task(sources, reader, sequence_length, passages)
    with tempfile.TemporaryDirectory() as scratch, _deterministic():
        arguments = {
            "output_dir": scratch,
            "num_train_epochs": epochs,
            "per_device_train_batch_size": batch_size,
            "per_device_eval_batch_size": batch_size,
            "learning_rate": learning_rate,
        }
        steps = math.ceil(math.ceil(len(train) / batch_size) * epochs)
        with tqdm(total=seeds * steps, desc="fine-tuning", disable=not progress) as bar:
            accuracies = [
                _accuracy(model, len(sources), train, test, arguments, seed + k, bar)
                for k in range(seeds)
            ]
    accuracy, (low, high) = ratio_interval(accuracies, [1.0] * seeds, confidence)
    # t knows no bounds, a share has them; the ends of a single seed stay NaN
    low, high = (end if math.isnan(end) else min(max(end, 0.0), 1.0) for end in (low, high))
    names = tuple(sources)
    return FinetuneReport(
        accuracy, low, high, confidence, tuple(accuracies),
        1 / len(names), names, len(train), len(test), seed,
    )  # fmt: skip


# -------------------------------------------------------------------- task


def _check_numbers(options: dict[str, Any], *names: str) -> None:
    for name in names:
        if not 0 < options[name] < math.inf:
            raise GrowthError(f"{name} is {options[name]}: it must be positive")
    last = options["seed"] + options["seeds"] - 1
    if options["seed"] < 0 or last > MOST_NUMPY_SEED:
        raise GrowthError(
            f"the seeds are {options['seed']} to {last}: they must be in 0 .. {MOST_NUMPY_SEED}"
        )
    if options["passages"] < 2:
        raise GrowthError(
            f"passages is {options['passages']}: give 2 or more, because one is for the test"
        )


def _sources(text: Sequence[str | Path]) -> dict[str, list[Path]]:
    """The files of every source, by its name."""
    sources: dict[str, list[Path]] = {}
    for name in map(str, text):
        if name in sources:
            raise GrowthError(f"{name} is given twice: sources must differ")
        folder, pattern = (name, "**/*") if Path(name).is_dir() else ("", name)
        sources[name] = matching_files(Path(folder), pattern)
    if len(sources) < 2:
        raise GrowthError("there is nothing to tell apart: give two or more sources of text")
    return sources


# a passage and the number of its source
Passage = dict[str, Any]


def _task(
    sources: dict[str, list[Path]], tokenizer: Any, length: int, most: int
) -> tuple[list[Passage], list[Passage]]:
    """The passages for training and for the test."""
    rows = {name: pack_text(files, tokenizer, length).tokens_NS for name, files in sources.items()}
    short = min(rows, key=lambda name: len(rows[name]))
    count = min(most, len(rows[short]))
    tests = math.ceil(TEST_SHARE * count)
    if count - tests < 1:
        raise GrowthError(
            f"{short} has {len(rows[short])} passages of {length} tokens: "
            "at least 2 are needed: give more text or a smaller sequence_length"
        )
    train: list[Passage] = []
    test: list[Passage] = []
    for number, tokens_NS in enumerate(rows.values()):
        chosen_N = np.linspace(0, len(tokens_NS) - 1, count).round().astype(int)
        chosen_NS = tokens_NS[chosen_N].astype(np.int64)
        passages = [{"input_ids": tokens_S, "labels": number} for tokens_S in chosen_NS]
        train += passages[: count - tests]
        test += passages[count - tests :]
    return train, test


# ---------------------------------------------------------------- training


class _Bar(transformers.TrainerCallback):
    """Moves a progress bar with every step."""

    def __init__(self, bar: Any) -> None:
        self.bar = bar

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.bar.update()


def _accuracy(
    model: Any,
    sources: int,
    train: list[Passage],
    test: list[Passage],
    arguments: dict[str, Any],
    seed: int,
    bar: Any,
) -> float:
    """Train a classifier with one seed; the share of test passages that it gets right."""
    transformers.set_seed(seed)
    args = TrainingArguments(
        **arguments,
        seed=seed,
        data_seed=seed,
        lr_scheduler_type="linear",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        classifier_of(model, sources),
        args,
        train_dataset=train,
        eval_dataset=test,
        data_collator=transformers.default_data_collator,
        callbacks=[_Bar(bar)],
    )
    # it prints every result
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    predicted = trainer.predict(test)
    logits_NC = predicted.predictions
    logits_NC = logits_NC[0] if isinstance(logits_NC, tuple) else logits_NC
    if not np.isfinite(logits_NC).all():
        raise GrowthError(
            "the logits are not finite: the weights hold NaN or infinity, or learning_rate "
            f"{args.learning_rate:g} is too high"
        )
    return float((logits_NC.argmax(-1) == predicted.label_ids).mean())


def classifier_of(model: Any, sources: int) -> Any:
    """A model for sequence classification with the weights of a language model below its head."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise GrowthError(f"{name} has an encoder and a decoder: give a model with one of them")
    config = copy.deepcopy(model.config)
    config.num_labels = sources
    try:
        classifier = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise GrowthError(f"transformers has no sequence classifier for {name}") from error
    own, wanted = _body(model).state_dict(), _body(classifier).state_dict()
    lacking = [key for key in wanted if key not in own and NEW not in key]
    if lacking:
        raise GrowthError(f"the classifier for {name} needs {lacking[0]}, which the model lacks")
    _body(classifier).load_state_dict({k: x for k, x in own.items() if k in wanted}, strict=False)
    # decoders are read at the last token that is no padding, and no passage has any
    classifier.config.pad_token_id = -1
    return classifier


def _body(model: Any) -> nn.Module:
    """The part below the head."""
    return getattr(model, model.base_model_prefix, model)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Deterministic algorithms of PyTorch. Afterwards all generators are as they were."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        # those of GPUs too, unlike in `unchanged_random_state`
        with unchanged_random_state(), torch.random.fork_rng():
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
