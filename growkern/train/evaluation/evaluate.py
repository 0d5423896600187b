"""`growkern.evaluate`: the loss of a language model on held-out text, with its uncertainty.

A TOML file may hold its arguments, with paths relative to the folder of the file:

    [evaluate]   model, text or dataset, tokenizer, seed, batch_size, sequence_length, ...
"""

from __future__ import annotations

import functools
import glob
import inspect
import math
import typing
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from growkern.arguments import as_list
from growkern.errors import GrowthError, nearest
from growkern.files import read_json, read_toml, to_dataclass
from growkern.growth.source import is_hub_name, located
from growkern.train.dataset import find_sources, load_data
from growkern.train.model import (
    IGNORE_INDEX,
    check_fits,
    evaluating,
    is_causal,
    load_language_model,
    load_tokenizer,
    run_model,
    take_logits,
)
from growkern.train.objectives import Collator, evaluation_collator
from growkern.train.safety import MARKER
from growkern.train.sections import DataSection, Objective

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from typing_extensions import Unpack

PATHS = ("model", "dataset", "tokenizer", "cache")


# what a file may give for arguments whose default does not tell their type
KINDS: dict[str, Any] = {
    "model": str,
    "text": str | tuple[str, ...],
    "tokenizer": str | None,
}
TABLE = "evaluate"
# arguments that are not keys; `data` stands for the options of the data
NOT_KEYS = ("progress", "data")
EMPTY = inspect.Parameter.empty
# options of `DataSection` that an evaluation does not take
FOR_TRAINING = {"train", "validation", "validation_split", "streaming", "shuffle_window"}
# of the record of a run
MOST_BYTES = 10_000_000
# of Simpson's rule, for an error of the quantile below 1e-6
STEPS = 1000


@dataclass(frozen=True)
class EvaluationReport:
    """Result of `growkern.evaluate`; print `report.table()`.

    Attributes:
        causal: whether the model predicts the next token (True) or masked tokens (False).
        loss: mean negative log-likelihood over all labels, nats.
        low, high: confidence interval of the loss, Student's t over blocks; NaN for one block.
        confidence: of the interval, in (0, 1).
        labels: number of tokens that were predicted.
        blocks: number of rows of the data.
        seed: of the masks.
        sequence_length: tokens per block.
    """

    causal: bool
    loss: float
    low: float
    high: float
    confidence: float
    labels: int
    blocks: int
    seed: int
    sequence_length: int

    @property
    def perplexity(self) -> float | None:
        """exp(loss) of a causal model; None for a masked one, whose loss is of chosen tokens."""
        return math.exp(min(self.loss, 700.0)) if self.causal else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; NaN becomes None."""
        values = {**vars(self), "perplexity": self.perplexity}
        return {k: None if isinstance(x, float) and math.isnan(x) else x for k, x in values.items()}

    def table(self) -> Any:
        """The report as a rich table."""
        from rich.table import Table

        blocks = f"t over {self.blocks} blocks of {self.sequence_length} tokens"
        table = Table("", "value", f"{100 * self.confidence:g} % interval, {blocks}")

        def add(name: str, value: float, ends: Sequence[float]) -> None:
            words = "-" if math.isnan(ends[0]) else " to ".join(f"{x:.4f}" for x in ends)
            table.add_row(name, f"{value:.4f}", words)

        ends = self.low, self.high
        add("loss, nats per label" if self.causal else "masked-LM loss, nats", self.loss, ends)
        if self.perplexity is not None:
            add("perplexity", self.perplexity, [math.exp(min(x, 700.0)) for x in ends])
        table.add_row("labels", str(self.labels), "")
        return table


class TextKeywords(TypedDict, total=False):
    """The options of `growkern.DataSection` that `evaluate` takes."""

    dataset: str | None
    dataset_config: str | None
    revision: str | None
    split: str
    text_column: str
    target_column: str | None
    input_ids_column: str | None
    labels_column: str | None
    attention_mask_column: str | None
    packing: bool | None
    cache: str | None
    sequence_length: int
    objective: Objective
    masking_probability: float | None
    mean_span_length: float


def evaluate(
    model: str | Path | PreTrainedModel,
    *,
    text: str | Path | Sequence[str | Path] = (),
    tokenizer: Any | None = None,
    seed: int = 0,
    batch_size: int = 16,
    confidence: float = 0.95,
    progress: bool = True,
    **data: Unpack[TextKeywords],
) -> EvaluationReport:
    """The mean loss of a language model over text, with a confidence interval.

    Masked models predict masked tokens. The masks depend only on the seed and the text, so two
    models with the same tokenizer are asked for the same tokens. Causal models predict every token
    but the first of a block.

    The interval is Student's t over blocks of `sequence_length` tokens. It takes blocks as
    independent. Blocks of one document are alike, so it is too narrow for few, long documents.

    Args:
        model: a ...ForMaskedLM or ...ForCausalLM model, its checkpoint directory, or a model on
            the Hub, `ORGANISATION/NAME`. A model runs on its own device, any other on a GPU if
            there is one.
        text: files or glob patterns, as `data.train` of a run file.
        tokenizer: of transformers, or its directory; None takes that of the checkpoint directory.
        seed: of the masks.
        batch_size: blocks per call of the model.
        confidence: of the interval, in (0, 1).
        progress: whether to show progress bars.
        data: options of `growkern.DataSection`: `dataset` in place of `text`, its columns,
            `sequence_length`, `masking_probability` and so on. By default the length is that of
            the run, for the directory of a run or its checkpoint.

    Raises:
        GrowthError: options, model or data do not fit together, or the loss is not finite.
    """
    check_confidence(confidence)
    if batch_size < 1:
        raise GrowthError(f"batch_size is {batch_size}: it must be positive")
    given = {**(_of_run(Path(model)) if isinstance(model, (str, Path)) else {}), **data}
    section = _section([text] if isinstance(text, (str, Path)) else text, given)
    if section.dataset is None:
        # a file that is missing is named before the model is loaded
        find_sources(section, Path(), "text")
    model, reader, is_loaded = opened(model, tokenizer, section.sequence_length)
    if is_loaded:
        model.to(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    causal = is_causal(model)
    loaded = load_data(section, reader, progress=progress, name="text")
    collator = evaluation_collator(loaded.collator(reader, causal=causal, seed=seed))
    sums, counts = _sums(model, loaded.train, collator, causal, batch_size, progress)
    if not sum(counts):
        raise GrowthError("no token has a label: give more text, or a larger masking_probability")
    if not math.isfinite(math.fsum(sums)):
        raise GrowthError("the loss is not finite: the model gives NaN or infinite logits")
    loss, (low, high) = ratio_interval(sums, counts, confidence)
    shape = sum(counts), len(sums), seed, section.sequence_length
    return EvaluationReport(causal, loss, low, high, confidence, *shape)


def _of_run(directory: Path) -> dict[str, Any]:
    """The tokens per block of the run that has a directory or a checkpoint, if it says so."""
    is_checkpoint = directory.name.startswith("checkpoint-")
    file = (directory.parent if is_checkpoint else directory) / MARKER
    record = read_json(file, MOST_BYTES, "record") if file.is_file() else {}
    try:
        return {"sequence_length": record["run"]["data"]["sequence_length"]}
    except (KeyError, TypeError):
        return {}


def _section(text: Sequence[str | Path], data: dict[str, Any]) -> DataSection:
    """The options of the data: the text takes the place of the training files."""
    fields = DataSection.__dataclass_fields__.keys()
    for name in data:
        if name not in fields - FOR_TRAINING:
            raise GrowthError(f"evaluate has no option {name!r}: see growkern.DataSection")
    if not text and data.get("dataset") is None:
        raise GrowthError("there is nothing to read: give text (--text FILE) or dataset")
    if text and data.get("dataset") is not None:
        raise GrowthError("text is given beside dataset: give one of them")
    return DataSection(train=tuple(map(str, text)), **data)


def opened(model: Any, tokenizer: Any | None, length: int) -> tuple[Any, Any, bool]:
    """A model, its tokenizer, and whether the model was loaded here.

    Args:
        model: or its directory, or its name on the Hub.
        tokenizer: or its directory; None takes that of the model's directory.
        length: tokens that the model reads at once.
    """
    directory = located(model) if isinstance(model, (str, Path)) else None
    place = directory if tokenizer is None else tokenizer
    if place is None:
        raise GrowthError("a model without a directory needs its tokenizer: give tokenizer")
    reader = load_tokenizer(Path(place)) if isinstance(place, (str, Path)) else place
    if directory is None:
        return model, reader, False
    model = load_language_model(directory)
    check_fits(directory, reader, length)
    return model, reader, True


def _sums(
    model: Any, rows: Any, collator: Collator, causal: bool, batch_size: int, progress: bool
) -> tuple[list[float], list[int]]:
    """Per block, in their order: the sum of the losses of its labels, and their number."""
    sums: list[float] = []
    counts: list[int] = []
    bar = tqdm(total=len(rows), desc="evaluating", unit=" blocks", disable=not progress)
    with evaluating(model), torch.no_grad(), bar:
        for start in range(0, len(rows), batch_size):
            chosen = [rows[i] for i in range(start, min(start + batch_size, len(rows)))]
            batch = {key: x.to(model.device) for key, x in collator(chosen).items()}
            losses_B, counts_B = block_losses(model, batch, causal)
            sums += losses_B.tolist()
            counts += counts_B.tolist()
            bar.update(len(chosen))
    return sums, counts


def block_losses(model: Any, batch: dict[str, Tensor], causal: bool) -> tuple[Tensor, Tensor]:
    """The sum of the losses (B,) float64 and the number of labels (B,) int64 of a batch's rows."""
    labels_BS = batch["labels"]
    inputs = {key: x for key, x in batch.items() if key != "labels"}
    logits_BSV = take_logits(run_model("model", model, inputs))
    if causal:
        labels_BS, logits_BSV = labels_BS[:, 1:], logits_BSV[:, :-1]
    labelled_BS = labels_BS != IGNORE_INDEX
    logits_NV = logits_BSV[labelled_BS]
    if logits_NV.dtype != torch.float64:
        logits_NV = logits_NV.float()
    losses_N = F.cross_entropy(logits_NV, labels_BS[labelled_BS], reduction="none").double()
    sums_B = losses_N.new_zeros(len(labels_BS)).index_add_(0, labelled_BS.nonzero()[:, 0], losses_N)
    return sums_B, labelled_BS.sum(1)


def check_confidence(confidence: float) -> None:
    """Refuse a confidence that is none."""
    if not 0 < confidence < 1:
        raise GrowthError(f"confidence is {confidence}: it must be between 0 and 1, such as 0.95")


def ratio_interval(
    sums: Sequence[float], counts: Sequence[float], confidence: float
) -> tuple[float, tuple[float, float]]:
    """The mean over all items of several groups, and the ends of its interval over the groups.

    Items of a group may depend on each other, groups may not. The error of the ratio of both totals
    is linearised (delta method). With counts of 1 this is the usual interval of a mean. Both ends
    are NaN if there is a single group. A group has the sum over its items, and their number.

    Source: W. G. Cochran, Sampling Techniques, 3rd edition, section 6.3.
    """
    groups, total = len(sums), math.fsum(counts)
    mean = math.fsum(sums) / total
    if groups < 2:
        return mean, (math.nan, math.nan)
    squares = math.fsum((s - mean * n) ** 2 for s, n in zip(sums, counts, strict=True))
    error = math.sqrt(squares * groups / (groups - 1)) / total
    width = t_quantile(confidence, groups - 1) * error
    return mean, (mean - width, mean + width)


@functools.cache
def t_quantile(confidence: float, freedom: int) -> float:
    """The t for which Student's distribution has the probability `confidence` in [-t, t]."""
    # with x = sqrt(freedom) tan(angle) the density is a power of a cosine, without tails
    gamma = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    scale = 2 * math.exp(gamma) / math.sqrt(math.pi)

    def probability(angle: float) -> float:
        step = angle / STEPS
        values = [math.cos(k * step) ** (freedom - 1) for k in range(STEPS + 1)]
        inner = 4 * math.fsum(values[1:-1:2]) + 2 * math.fsum(values[2:-1:2])
        return scale * step / 3 * (values[0] + inner + values[-1])

    # many degrees of freedom make the density narrow: the range of angles follows it
    low, high = 0.0, min(math.pi / 2, 40 / math.sqrt(freedom))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def section() -> type[Any]:
    """A dataclass of the arguments of an evaluation that a file may give."""
    keys = [
        (key, KINDS.get(key, type(x.default)), x.default)
        for key, x in inspect.signature(evaluate).parameters.items()
        if key not in NOT_KEYS
    ]
    kinds, options = typing.get_type_hints(DataSection), fields(DataSection)
    keys += [(x.name, kinds[x.name], x.default) for x in options if x.name not in FOR_TRAINING]
    return make_dataclass(
        TABLE,
        [(k, kind, field(default=MISSING if x is EMPTY else x)) for k, kind, x in keys],
        frozen=True,
    )


def read_arguments(path: str | Path) -> dict[str, Any]:
    """The arguments of an evaluation from a file; its paths then do not depend on their folder."""
    path = Path(path)
    tables = read_toml(path)
    for key, table in tables.items():
        if key != TABLE or not isinstance(table, dict):
            raise GrowthError(f"{path} has no table {key!r}{nearest(key, [TABLE])}")
    if TABLE not in tables:
        raise GrowthError(f"{path} has no table [{TABLE}]: add it, with the key model")
    given = to_dataclass(section(), tables[TABLE], str(path), TABLE)
    arguments = {key: getattr(given, key) for key in tables[TABLE]}
    base = path.parent
    places = {key: base / x for key, x in arguments.items() if key in PATHS and x is not None}
    # a name that is no directory is one on the Hub
    if not places["model"].exists() and is_hub_name(arguments["model"], base):
        del places["model"]
    if "dataset" in places and not (arguments["dataset"] and places["dataset"].is_dir()):
        del places["dataset"]
    arguments |= {key: str(place) for key, place in places.items()}
    if "text" in arguments:
        arguments["text"] = [_text_of(base, name) for name in as_list(arguments["text"])]
    return arguments


def _text_of(base: Path, name: str) -> str:
    """A file, a folder or a pattern of texts. Brackets in the name of `base` are no pattern."""
    place = base / name
    return str(place if place.exists() else Path(glob.escape(str(base))) / name)
