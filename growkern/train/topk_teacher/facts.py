"""What every teacher has that is known by the k likeliest tokens of each row.

Such a teacher is a cache on disk, a server, or a file of another library. None of them is a model
that runs in this process.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from growkern.train.loss.rows import document_starts, teacher_rows

# stand where the teacher has no row. No vocabulary has this id, and NaN is no log-prob: the loss
# refuses both
NO_ID, NO_LOGPROB = -1, float("nan")


@dataclass(frozen=True)
class RowFacts:
    """How the rows of such a teacher were computed.

    Attributes:
        temperature: of the softmax.
        rows: "labels" (rows with a label) or "all" (every real token).
        causal: whether the teacher predicts the next token.
        vocab_size: columns that the softmax runs over; None if unknown.
        tokenizer: SHA-256 of the tokenizer's table, or None.
        epochs: maskings of each example.
    """

    temperature: float
    rows: str
    causal: bool
    vocab_size: int | None
    tokenizer: str | None
    epochs: int


class TopKRows(ABC):
    """The rows of one teacher.

    Attributes:
        name: for messages.
        remedy: completes "change the inheritance, or ..." for messages.
        facts: how the rows were computed.
    """

    name: str
    remedy: str
    facts: RowFacts

    @abstractmethod
    def batch(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The rows of a collated batch.

        Args:
            batch: input_ids and labels, (B, S) each, and maybe attention_mask or position_ids.

        Returns:
            Ids (B, S, k) int32 and log-probs (B, S, k). A position without a row has the ids -1 and
            the log-probs NaN.

        Raises:
            GrowthError: the rows of an example cannot be had.
        """


Rows: TypeAlias = tuple[Tensor, Tensor]


def causal_rows(batch: dict[str, Any], read: Callable[[list[list[int]]], Sequence[Rows]]) -> Rows:
    """The rows of a causal teacher at their places in a batch.

    Args:
        batch: input_ids (B, S), and maybe attention_mask, or position_ids of packed documents.
        read: takes texts of two tokens or more, without padding, one for each document. It gives
            ids (n - 1, k) and log-probs (n - 1, k) of each, where n is its number of tokens.

    Returns:
        Ids (B, S, k) int32 and log-probs (B, S, k) float32. Padding and the last token of each
        document have no row: the ids -1, and the log-probs NaN.
    """
    ids_BS, mask_BS = batch["input_ids"].cpu(), batch.get("attention_mask")
    mask_BS = torch.ones_like(ids_BS) if mask_BS is None else mask_BS.cpu()
    has_row_BS, starts_BS = teacher_rows(batch, causal=True).cpu(), document_starts(batch)
    starts_BS = torch.zeros_like(ids_BS) if starts_BS is None else starts_BS.cpu().expand_as(ids_BS)
    places = []
    for b, (mask_S, starts_S) in enumerate(zip(mask_BS, starts_BS, strict=True)):
        # a packed row has no padding, so its starts count its tokens
        texts = mask_S.nonzero()[:, 0].tensor_split(starts_S.nonzero()[1:, 0])
        places += [(b, at) for at in texts if len(at) > 1]
    found = read([ids_BS[b, at].tolist() for b, at in places])
    k = found[0][0].shape[-1] if found else 1
    ids_BSk, logprobs_BSk = no_rows((*ids_BS.shape, k), torch.float32)
    for (b, at), (ids_Rk, logprobs_Rk) in zip(places, found, strict=True):
        ids_BSk[b, at[:-1]], logprobs_BSk[b, at[:-1]] = ids_Rk.int(), logprobs_Rk
    return blank(ids_BSk, logprobs_BSk, ~has_row_BS)


def no_rows(shape: tuple[int, ...], dtype: torch.dtype) -> Rows:
    """Ids and log-probs of positions without a row, in the shape (B, S, k)."""
    return torch.full(shape, NO_ID, dtype=torch.int32), torch.full(shape, NO_LOGPROB, dtype=dtype)


def blank(ids_BSk: Tensor, logprobs_BSk: Tensor, where_BS: Tensor) -> Rows:
    """Take the rows at some positions away, in place."""
    where_BS1 = where_BS[..., None]
    return ids_BSk.masked_fill_(where_BS1, NO_ID), logprobs_BSk.masked_fill_(where_BS1, NO_LOGPROB)
