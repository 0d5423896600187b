"""What every teacher has that is known by the k likeliest tokens of each row.

Such a teacher is a cache on disk, a server, or a file of another library. None of them is a model
that runs in this process.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor


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
            batch: input_ids and labels, (B, S) each, and maybe attention_mask.

        Returns:
            Ids (B, S, k) int32 and log-probs (B, S, k), zeros at positions without a row.

        Raises:
            GrowthError: the rows of an example cannot be had.
        """
