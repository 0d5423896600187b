"""The rows of a batch that the loss needs: aligned with their labels, and counted on the CPU.

A GPU must not be asked how many rows have a label, because the CPU would wait for the answer. The
collator runs on the CPU, so the rows are counted there. The counts travel with the batch.

The context of a row is its document. A student whose vocabulary grew reads tokens there that its
teachers do not know. They are the last ids.

Shape letters used in this file: B examples, S positions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.ops.loss import KLRows
from growkern.train.model import IGNORE_INDEX, align_labels, align_rows, document_starts

ROW_COUNTS, DECODER_MASK = "row_counts", "decoder_attention_mask"
# of a teacher that is known by its k likeliest tokens: (B, S, k), -1 where it has no row
TEACHER_IDS = "teacher_topk_ids"
# of teachers that have examples of their own: the number of the teacher of each example, a list
TAUGHT_BY = "taught_by"
# options of a loss that say something about each row
ROW_OPTIONS = ("kl_rows", "row_weights")

# ------------------------------------------------------------------- aligned


class LossRows(NamedTuple):
    """The rows of a batch, aligned with the positions that predict them."""

    labels_BS: Tensor  # int64, -100 where there is none
    kl_rows: str | Tensor  # "labels", or a mask (B, S)
    weights_BS: Tensor | None
    # rows that lost their KL term to a token that the teachers lack, 0-d; None: they know all
    untaught: Tensor | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "LossRows":
        """The inverse of `options`."""
        return cls(*(options[name] for name in ("labels", *ROW_OPTIONS)))

    def options(self) -> dict[str, Any]:
        """The rows as arguments of the loss."""
        return dict(zip(("labels", *ROW_OPTIONS), self, strict=False))

    def of_examples(self, examples: list[int]) -> "LossRows":
        """The rows of some examples."""
        fields = zip(self._fields[:3], self, strict=False)
        return self._replace(**{k: x[examples] for k, x in fields if isinstance(x, Tensor)})

    def masks(self) -> tuple[Tensor, Tensor]:
        """The rows with a label, and those with a KL term, (B, S) bool each."""
        labelled_BS = self.labels_BS != IGNORE_INDEX
        return labelled_BS, self.kl_rows if isinstance(self.kl_rows, Tensor) else labelled_BS

    def measured(self) -> tuple[Tensor, Tensor]:
        """The `masks` of the rows that `LossParts` measures: those of weight 0 are left out."""
        if self.weights_BS is None:
            return self.masks()
        labelled_BS, kl_BS = (mask_BS & (self.weights_BS != 0) for mask_BS in self.masks())
        return labelled_BS, kl_BS


def take_rows(
    inputs: dict[str, Any],
    *,
    causal: bool,
    kl_rows: KLRows,
    row_weights: str | Tensor | None = None,
    decoder: bool = False,
    known: int | None = None,
) -> LossRows:
    """Remove the labels and the row weights from a batch, and align them.

    A position without a row of the teacher has no KL term, nor has one whose label or context the
    teachers lack. Its label keeps its own term. What remains of the batch are the inputs of the
    model.

    Args:
        kl_rows: rows with a KL term: "labels", or "all" for every real token.
        row_weights: the weights (B, S), or their key in the batch; None if there are none.
        decoder: whether the rows belong to a decoder beside an encoder, whose tokens differ. For
            "all" it needs the mask of the decoder's real tokens.
        known: tokens that the teachers know; None: all.
    """
    if row_weights is not None and not isinstance(row_weights, str):
        inputs["row_weights"], row_weights = row_weights, "row_weights"
    check_batch_keys(inputs, "labels", row_weights)
    labels_BS = align_labels(inputs.pop("labels"), causal=causal)
    weights_BS = None
    if row_weights is not None:
        weights_BS = align_labels(inputs.pop(row_weights), causal=causal, filler=0.0)
    if kl_rows != "all" and TEACHER_IDS not in inputs and known is None:
        return LossRows(labels_BS, kl_rows, weights_BS)
    if decoder and kl_rows == "all":
        check_batch_keys(inputs, DECODER_MASK)
    wanted_BS = labels_BS != IGNORE_INDEX
    if kl_rows == "all":
        wanted_BS = real_rows(inputs, labels_BS, causal=causal, decoder=decoder)
    ids_BSk = inputs.get(TEACHER_IDS)
    rows_BS = wanted_BS if ids_BSk is None else wanted_BS & (ids_BSk[..., 0] >= 0)
    if known is None:
        return LossRows(labels_BS, rows_BS, weights_BS)
    taught_BS = taught_rows(inputs, labels_BS, known, causal=causal, decoder=decoder)
    return LossRows(labels_BS, rows_BS & taught_BS, weights_BS, (wanted_BS & ~taught_BS).sum())


def check_batch_keys(batch: Mapping[str, Any], *names: str | None) -> None:
    """Check that a batch of a data collator has these keys; None stands for no key."""
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
    """The number of rows with a KL term in a batch with its labels, 0-d; nothing waits for it."""
    _, kl_BS = take_rows(dict(batch), kl_rows=kl_rows, **kind).masks()
    return kl_BS.sum()


def real_tokens(batch: Mapping[str, Any]) -> Tensor:
    """The tokens of a batch that are no padding, (B, S) bool."""
    ids_BS, mask_BS = batch["input_ids"], batch.get("attention_mask")
    return torch.ones_like(ids_BS, dtype=torch.bool) if mask_BS is None else mask_BS.bool()


def teacher_rows(batch: Mapping[str, Any]) -> Tensor:
    """The positions at which a causal teacher predicts a token that it can know, (B, S) bool.

    It predicts the token that follows a real one. So nothing predicts the first token of a
    document, although the position before it may have its label.
    """
    real_BS, starts_BS = real_tokens(batch), document_starts(batch)
    follows_BS = real_BS if starts_BS is None else ~starts_BS & real_BS
    return real_BS & align_rows(follows_BS, causal=True)


def examples_of(batch: Mapping[str, Any], teacher: int) -> dict[str, Any]:
    """The examples of a batch that a teacher teaches, by its number: all if the batch does not say.

    They are those of (B, ...) tensors, and of positions of A axes, (A, B, S). The rest is kept.
    """
    by = batch.get(TAUGHT_BY)
    if by is None:
        return dict(batch)
    own = [i for i, number in enumerate(by) if number == teacher]
    own_batch = dict(batch)
    for name, x in batch.items():
        axis = int(name == "position_ids" and getattr(x, "ndim", 0) == 3)
        if isinstance(x, Tensor) and x.ndim and x.shape[axis] == len(by):
            own_batch[name] = x[:, own] if axis else x[own]
    return own_batch | {TAUGHT_BY: [teacher] * len(own)}


# ------------------------------------------------------------------- context


def taught_rows(
    batch: Mapping[str, Any],
    labels_BS: Tensor,
    known: int,
    *,
    causal: bool,
    decoder: bool = False,
) -> Tensor:
    """The rows whose label and context are tokens that the teachers know, (B, S) bool.

    The context is all of the document, and of a causal row only what it has seen. Ids from `known`
    on are new to the teachers. The labels are aligned.
    """
    new_label_BS, ids_BS = labels_BS >= known, batch.get("input_ids")
    if ids_BS is None:
        return ~new_label_BS
    new_BS, mask_BS = ids_BS >= known, batch.get("attention_mask")
    if mask_BS is not None and mask_BS.shape == new_BS.shape:
        new_BS = new_BS & mask_BS.bool()
    if decoder:
        # its inputs are its labels, one place later
        own_BS = batch.get("decoder_input_ids")
        read_BS = new_label_BS if own_BS is None else own_BS >= known
        seen_BS = (read_BS.cumsum(1) > 0) | new_BS.any(1, keepdim=True)
        return ~(new_label_BS | seen_BS)
    starts_BS = document_starts(batch)
    if starts_BS is None:
        starts_BS = torch.zeros_like(new_BS)
    upto_BS = new_BS.cumsum(1)
    if causal:
        before_BS = torch.where(starts_BS, upto_BS - new_BS.long(), 0).cummax(1).values
        return ~(new_label_BS | (upto_BS > before_BS))
    document_BS = starts_BS.cumsum(1)
    counts_BS = torch.zeros(
        len(new_BS), new_BS.shape[1] + 1, dtype=torch.long, device=new_BS.device
    )
    counts_BS = counts_BS.scatter_add_(1, document_BS, new_BS.long())
    return ~(new_label_BS | (counts_BS.gather(1, document_BS) > 0))


def as_known(inputs: dict[str, Any], known: int | None) -> dict[str, Any]:
    """The inputs of a teacher, with token 0 for those that it lacks. Their rows are not used."""
    if known is None:
        return inputs
    names = {"input_ids", "decoder_input_ids"} & inputs.keys()
    return inputs | {name: inputs[name].masked_fill(inputs[name] >= known, 0) for name in names}


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
    """Count the rows of a batch; None if it has no labels, or has them on another device.

    Only devices of these types are waited for.
    """
    labels_BS = batch.get("labels")
    if not isinstance(labels_BS, Tensor) or labels_BS.device.type not in devices:
        return None
    # the last position of a causal model predicts nothing
    labelled_BP = labels_BS[:, int(causal) :] != IGNORE_INDEX
    live = labelled_BP.numel()
    if {DECODER_MASK if decoder else "attention_mask", "position_ids", ROW_COUNTS} & batch.keys():
        real_BS = real_rows(batch, labels_BS, causal=causal, decoder=decoder)
        live = int((labelled_BP | real_BS[:, : labelled_BP.shape[1]]).sum())
    return RowCounts(int(labelled_BP.sum()), live, _packed_pairs(batch))


def _packed_pairs(batch: Mapping[str, Any]) -> int | None:
    starts_BS = document_starts(batch)
    if starts_BS is None or int(starts_BS.sum()) == len(starts_BS):
        return None
    ends = starts_BS.flatten().nonzero().flatten()
    lengths = torch.diff(ends, append=ends.new_tensor([starts_BS.numel()]))
    return int((lengths**2).sum())


class CountingCollator:
    """Adds the `RowCounts` of each batch to the batches of another collator."""

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
