"""The rows of a batch that the loss needs: aligned with their labels, and counted on the CPU.

A GPU must not be asked how many rows have a label, because the CPU would wait for the answer. The
collator runs on the CPU, so the rows are counted there. The counts travel with the batch.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from growkern.errors import GrowthError
from growkern.train.loss.context import document_starts, taught_rows
from growkern.train.loss.inheritance import KLRows
from growkern.train.model.head import IGNORE_INDEX, align_labels, align_rows

ROW_COUNTS, DECODER_MASK = "row_counts", "decoder_attention_mask"
# of a teacher that is known by its k likeliest tokens: (B, S, k), -1 where it has no row
TEACHER_IDS = "teacher_topk_ids"
# of teachers that have examples of their own: the number of the teacher of each example, a list
TAUGHT_BY = "taught_by"

# ------------------------------------------------------------------- aligned


class LossRows(NamedTuple):
    """The rows of a batch, aligned with the positions that predict them."""

    labels_BS: Tensor  # int64, -100 where there is none
    kl_rows: str | Tensor  # "labels", or a mask (B, S)
    weights_BS: Tensor | None
    # rows that lost their KL term to a token that the teachers lack, 0-d; None: they know all
    untaught: Tensor | None = None

    def options(self) -> dict[str, Any]:
        """The rows as arguments of the loss."""
        return {"labels": self.labels_BS, "kl_rows": self.kl_rows, "row_weights": self.weights_BS}


def take_rows(
    inputs: dict[str, Any],
    *,
    causal: bool,
    kl_rows: KLRows,
    row_weights: str | None = None,
    decoder: bool = False,
    known: int | None = None,
) -> LossRows:
    """Remove the labels and the row weights from a batch, and align them.

    A position without a row of the teacher has no KL term, nor has one whose label or context the
    teachers lack. Its label keeps its own term.

    Args:
        inputs: the batch; what remains of it are the inputs of the model.
        causal: whether the model predicts the next token.
        kl_rows: rows with a KL term: "labels", or "all" for every real token.
        row_weights: key of the weights; None if there are none.
        decoder: whether the rows belong to a decoder beside an encoder, whose tokens differ.
        known: tokens that the teachers know; None: all.

    Raises:
        GrowthError: the batch has no labels, no weights, or no mask of the decoder's real tokens
            where these have a KL term.
    """
    check_keys(inputs, "labels", row_weights)
    labels_BS = align_labels(inputs.pop("labels"), causal=causal)
    weights_BS = None
    if row_weights is not None:
        weights_BS = align_labels(inputs.pop(row_weights), causal=causal, filler=0.0)
    if kl_rows != "all" and TEACHER_IDS not in inputs and known is None:
        return LossRows(labels_BS, kl_rows, weights_BS)
    if decoder and kl_rows == "all":
        check_keys(inputs, DECODER_MASK)
    wanted_BS = labels_BS != IGNORE_INDEX
    if kl_rows == "all":
        wanted_BS = real_rows(inputs, labels_BS, causal=causal, decoder=decoder)
    ids_BSk = inputs.get(TEACHER_IDS)
    rows_BS = wanted_BS if ids_BSk is None else wanted_BS & (ids_BSk[..., 0] >= 0)
    if known is None:
        return LossRows(labels_BS, rows_BS, weights_BS)
    taught_BS = taught_rows(inputs, labels_BS, known, causal=causal, decoder=decoder)
    untaught = (wanted_BS & ~taught_BS).sum()
    return LossRows(labels_BS, rows_BS & taught_BS, weights_BS, untaught)


def check_keys(batch: Mapping[str, Any], *names: str | None) -> None:
    """Check that a batch has these keys.

    Args:
        batch: from a data collator.
        names: None stands for no key.

    Raises:
        GrowthError: a key is missing.
    """
    for name in names:
        if name is not None and name not in batch:
            raise GrowthError(
                f"the batches have no {name!r} (found: {', '.join(map(str, batch))}): use a data "
                "collator that makes it"
            )


def real_rows(
    batch: Mapping[str, Any], like_BS: Tensor, *, causal: bool, decoder: bool = False
) -> Tensor:
    """The rows that predict a real token, (B, S) bool; with kl_rows="all" they have a KL term."""
    mask = DECODER_MASK if decoder else "attention_mask"
    counts, mask_BS = batch.get(ROW_COUNTS), batch.get(mask)
    if counts is not None and counts.is_filler:
        return torch.zeros_like(like_BS, dtype=torch.bool)
    if mask_BS is None:
        starts_BS = document_starts(batch) if causal else None
        # the last token of a packed sequence does not predict the first of the next
        mask_BS = torch.ones_like(like_BS) if starts_BS is None else ~starts_BS
    return align_rows(mask_BS, causal=causal)


def count_kl_rows(batch: Mapping[str, Any], kl_rows: KLRows, **kind: Any) -> Tensor:
    """The number of rows with a KL term in a batch with its labels, 0-d; nothing waits for it.

    Args:
        kind: the other arguments of `take_rows`.
    """
    rows = take_rows(dict(batch), kl_rows=kl_rows, **kind)
    kl_rows_BS = (
        rows.kl_rows if isinstance(rows.kl_rows, Tensor) else rows.labels_BS != IGNORE_INDEX
    )
    return kl_rows_BS.sum()


def teacher_rows(batch: Mapping[str, Any], *, causal: bool) -> Tensor:
    """The positions at which a teacher that reads real tokens only predicts one, (B, S) bool.

    A causal teacher predicts the token that follows a real one. So nothing predicts the first token
    of a document, although the position before it may have its label.

    Args:
        batch: input_ids (B, S), and maybe attention_mask or position_ids.
        causal: whether the teacher predicts the next token.
    """
    mask_BS = batch.get("attention_mask")
    real_BS = torch.ones_like(batch["input_ids"]) if mask_BS is None else mask_BS
    real_BS, starts_BS = real_BS.bool(), document_starts(batch)
    follows_BS = real_BS if starts_BS is None or not causal else ~starts_BS & real_BS
    return real_BS & align_rows(follows_BS, causal=causal)


# ------------------------------------------------------------------- counted


@dataclass(frozen=True)
class RowCounts:
    """The numbers of a batch, counted on the CPU.

    Attributes:
        labelled: rows with a label.
        live: rows with a label or a real token.
        pairs: pairs of tokens that attend to each other, if several sequences are packed into a
            row and kept apart; else None.
        is_filler: whether the batch only fills up the last step of an epoch.
    """

    labelled: int
    live: int
    pairs: int | None = None
    is_filler: bool = False


def count_rows(
    batch: Mapping[str, Any],
    *,
    causal: bool,
    decoder: bool = False,
    devices: Sequence[str] = ("cpu",),
) -> RowCounts | None:
    """Count the rows of a batch.

    Args:
        batch: {labels, ...}.
        causal: whether the model predicts the next token.
        decoder: as in `take_rows`.
        devices: types of devices whose answer may be waited for.

    Returns:
        The counts; None if the batch has no labels, or if they are on another device.
    """
    labels_BS = batch.get("labels")
    if not isinstance(labels_BS, Tensor) or labels_BS.device.type not in devices:
        return None
    labelled_BS = align_labels(labels_BS, causal=causal) != IGNORE_INDEX
    live_BS = labelled_BS | real_rows(batch, labels_BS, causal=causal, decoder=decoder)
    return RowCounts(int(labelled_BS.sum()), int(live_BS.sum()), _packed_pairs(batch))


def _packed_pairs(batch: Mapping[str, Any]) -> int | None:
    starts_BS = document_starts(batch)
    if starts_BS is None or int(starts_BS.sum()) == len(starts_BS):
        return None
    ends = starts_BS.flatten().nonzero().flatten()
    lengths = torch.diff(ends, append=ends.new_tensor([starts_BS.numel()]))
    return int((lengths**2).sum())


class CountingCollator:
    """Adds the `RowCounts` of each batch to the batches of another collator.

    Args:
        collator: makes the batches.
        causal: whether the model predicts the next token.
        decoder: as in `take_rows`.
    """

    def __init__(
        self, collator: Callable[[Any], Any], *, causal: bool, decoder: bool = False
    ) -> None:
        self.inner, self.causal, self.decoder = collator, causal, decoder

    def __call__(self, features: Any) -> Any:
        batch = self.inner(features)
        if not isinstance(batch, Mapping):
            return batch
        counts = count_rows(batch, causal=self.causal, decoder=self.decoder)
        return batch if counts is None else {**batch, ROW_COUNTS: counts}


EXAMPLES_TO_SEARCH = 1000


def check_some_label(
    dataset: Any,
    collator: Callable[[Sequence[Any]], Any],
    batch_size: int,
    row_weights: str | None = None,
    *,
    causal: bool,
    name: str = "training",
) -> None:
    """Check that the batches of a data set have labels. It stops at the first label.

    A causal model does not predict the first token of a row, so a label there does not count.

    Args:
        dataset: is read by index.
        collator: makes the batches of the training.
        batch_size: examples per batch.
        row_weights: key of the weights that the batches must have too.
        causal: whether the model predicts the next token.
        name: of the data set, for the error message.

    Raises:
        GrowthError: the batches have no labels or weights, or all labels of up to 1000 examples,
            evenly spread over the data set, are -100.
    """
    indices = range(0, len(dataset), max(1, len(dataset) // EXAMPLES_TO_SEARCH))
    for start in range(0, len(indices), batch_size):
        examples = [dataset[i] for i in indices[start : start + batch_size]]
        batch = collator(examples)
        if not isinstance(batch, Mapping):
            raise GrowthError(f"the data collator makes a {type(batch).__name__}, not a dict")
        check_keys(batch, "labels", row_weights)
        labels_BS = align_labels(torch.as_tensor(batch["labels"]), causal=causal)
        if bool((labels_BS != IGNORE_INDEX).any()):
            return
    if len(indices):
        first = ", or belong to a first token, which is not predicted" if causal else ""
        raise GrowthError(
            f"the {name} data has not a single label: all labels of {len(indices)} examples, "
            f"evenly spread over the data set, are -100{first}. Check the data collator"
        )


# ---------------------------------------------------------- the end of an epoch


def examples_in_last_batch(loader: Any, rank: int, processes: int, *, split: bool) -> int | None:
    """How many examples of the last batch of an epoch are not repetitions.

    accelerate fills up the last batches of an epoch with examples from its start, so that all
    processes run as many steps.

    Args:
        loader: of accelerate, over a data set that is read by index.
        rank: of this process.
        processes: number of processes.
        split: whether accelerate splits each batch among the processes.

    Returns:
        The number of examples in this process, 0 or more; None if there are no repetitions.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    batches: Any = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    if not isinstance(batches, BatchSampler) or batches.drop_last:
        return None
    of_a_process = batches.batch_size // processes if split else batches.batch_size
    rest = len(batches.sampler) % (of_a_process * processes)  # type: ignore[arg-type]
    return min(max(rest - rank * of_a_process, 0), of_a_process) if rest else None


def examples_of(batch: Mapping[str, Any], teacher: int) -> dict[str, Any]:
    """The examples of a batch that a teacher teaches: all of them if the batch does not say.

    Args:
        batch: (B, ...) tensors, and other values that are kept.
        teacher: its number.
    """
    by = batch.get(TAUGHT_BY)
    if by is None:
        return dict(batch)
    own = [i for i, one in enumerate(by) if one == teacher]
    own_batch = {
        name: x[own] if isinstance(x, Tensor) and x.ndim and len(x) == len(by) else x
        for name, x in batch.items()
    }
    return own_batch | {TAUGHT_BY: [teacher] * len(own)}


def first_examples(batch: dict[str, Any], kept: int, batch_size: int) -> dict[str, Any]:
    """The batch without the repeated examples at its end.

    A batch of repetitions alone keeps one example without labels, because every process has to take
    part in the step.

    Args:
        batch: (B, S) tensors, one example per row or several packed into one row.
        kept: examples to keep.
        batch_size: examples in the batch.
    """
    filler, kept = kept == 0, max(kept, 1)
    rows = len(batch["labels"])
    if rows == 1 < batch_size:
        batch = _first_sequences(batch, kept)
    else:
        batch = {
            name: x[:kept]
            if name == TAUGHT_BY or (isinstance(x, Tensor) and x.ndim and len(x) == rows)
            else x
            for name, x in batch.items()
        }
    if not filler:
        return batch
    batch["labels"] = torch.full_like(batch["labels"], IGNORE_INDEX)
    return batch | {ROW_COUNTS: RowCounts(0, 0, is_filler=True)}


def _first_sequences(batch: dict[str, Any], kept: int) -> dict[str, Any]:
    """The first sequences of a batch that is packed into one row."""
    starts_BS = document_starts(batch)
    cut = [] if starts_BS is None else starts_BS[0].nonzero().flatten().tolist()
    if kept >= len(cut):
        return batch
    length, end = batch["labels"].shape[1], cut[kept]
    batch = {
        name: x[:, :end] if isinstance(x, Tensor) and x.shape[:2] == (1, length) else x
        for name, x in batch.items()
    }
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if name in batch:
            batch[name] = batch[name][: kept + 1]
    counts = batch.get(ROW_COUNTS)
    if counts is not None:
        pairs = sum((b - a) ** 2 for a, b in itertools.pairwise(cut[: kept + 1]))
        batch[ROW_COUNTS] = dataclasses.replace(counts, pairs=pairs)
    return batch
