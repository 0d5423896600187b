"""Teachers that are known by the k likeliest tokens of each row, and training with one.

Such a teacher is a cache on disk, a server, or a model whose top k is to be kept. The predictions
of a masked language model are valid only for the masks that it saw. A cache stores them for the
masks of its first epochs, and training cycles through these masks. A causal model saw the text
without masks, so its predictions serve every epoch. An example whose tokens or masks are not in the
cache is refused.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.ops.loss.topk_kl_mlm_loss import topk_kl_mlm_loss
from growkern.train.loss import (
    TEACHER_IDS,
    Teachers,
    check_padding,
    check_same_objective,
    real_tokens,
    taught_rows,
    teacher_rows,
    tokenizer_fingerprint,
)
from growkern.train.model import IGNORE_INDEX, align_labels, align_rows
from growkern.train.objectives import Collator, IndexedDataset, OuterCollator
from growkern.train.rules import check
from growkern.train.sections import InheritanceSchedule

IDS, LOGPROBS = TEACHER_IDS, "teacher_topk_logprobs"
# stand where the teacher has no row. No vocabulary has this id, and NaN is no log-prob: the loss
# refuses both
NO_ID, NO_LOGPROB = -1, float("nan")
# ids are stored in 32 bits with a sign
MOST_IDS = 1 << 31
# what bfloat16 rounds away of a number, and so of each log-prob of a teacher that computes in it
ROUNDING = 2.0**-7

Rows: TypeAlias = tuple[Tensor, Tensor]


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

    def misfit(self, schedule: InheritanceSchedule) -> str | None:
        """What these rows and a schedule disagree on; None if they fit."""
        made = {"temperature": self.temperature, "kl_rows": self.rows}
        wanted = {"temperature": schedule.temperature, "kl_rows": schedule.kl_rows}
        if made == wanted or made == wanted | {"kl_rows": "all"}:
            return None
        return f"{made}, but the inheritance asks for {wanted}"


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
    def batch(self, batch: dict[str, Any]) -> Rows:
        """The rows of a collated batch: ids (B, S, k) int32, log-probs (B, S, k); -1, NaN: none."""

    def fingerprint(self) -> str:
        """A SHA-256 that changes with the teacher, as far as that is known: of its name."""
        return hashlib.sha256(self.name.encode()).hexdigest()


def fault_of(ids_Rk: Tensor, logprobs_Rk: Tensor, columns: int | None) -> str | None:
    """The first fault in words: what no row of a teacher holds; or None.

    Args:
        ids_Rk: (R, k) integers.
        logprobs_Rk: (R, k). A token that is not the likeliest may have the probability 0.
        columns: of the teacher's softmax; None if unknown.
    """
    limit = MOST_IDS if columns is None else columns
    is_outside = (ids_Rk < 0) | (ids_Rk > limit - 1)
    if bool(is_outside.any()):
        return (
            f"token {int(ids_Rk[is_outside][0])}, but vocab_size is {limit}: teacher and student "
            "must have the same tokenizer"
        )
    ordered_Rk = ids_Rk.sort(-1).values
    is_double = ordered_Rk[:, 1:] == ordered_Rk[:, :-1]
    if bool(is_double.any()):
        return f"token {int(ordered_Rk[:, 1:][is_double][0])} twice in a row"
    wide_Rk = logprobs_Rk.float()
    is_wrong = ~(wide_Rk <= ROUNDING)
    is_wrong[:, :1] |= wide_Rk[:, :1].isinf()
    if bool(is_wrong.any()):
        return f"the log-prob {float(wide_Rk[is_wrong][0]):g}: check the teacher's weights"
    # each log-prob l is off by at most ROUNDING |l|, and the sum of p |l| is at most log k
    mass_R = wide_Rk.exp().sum(-1)
    if bool((mass_R > 1 + ROUNDING * (1 + math.log(ids_Rk.shape[-1]))).any()):
        return f"probabilities that add up to {float(mass_R.max()):g}: check the teacher"
    return None


def no_rows(shape: tuple[int, ...], dtype: torch.dtype) -> Rows:
    """Ids and log-probs of positions without a row, in the shape (B, S, k)."""
    return torch.full(shape, NO_ID, dtype=torch.int32), torch.full(shape, NO_LOGPROB, dtype=dtype)


def placed(kept_BS: Tensor, ids_Rk: Tensor, logprobs_Rk: Tensor) -> Rows:
    """Rows at their positions of a batch, and none elsewhere."""
    ids_BSk, logprobs_BSk = no_rows((*kept_BS.shape, ids_Rk.shape[-1]), logprobs_Rk.dtype)
    ids_BSk[kept_BS], logprobs_BSk[kept_BS] = ids_Rk.int(), logprobs_Rk
    return ids_BSk, logprobs_BSk


def rows_of(batch: dict[str, Any], rows: str, causal: bool, known: int) -> Tensor:
    """The positions of a batch that have a row in the cache, (B, S) bool.

    A causal teacher has no row where it saw no token, even if a label is there. No teacher has one
    whose label or context it lacks: it knows `known` tokens.
    """
    labels_BS = align_labels(batch["labels"], causal=causal)
    if rows == "labels":
        wanted_BS = labels_BS != IGNORE_INDEX
    else:
        wanted_BS = align_rows(real_tokens(batch), causal=causal)
    wanted_BS = wanted_BS & taught_rows(batch, labels_BS, known, causal=causal)
    return wanted_BS & teacher_rows(batch) if causal else wanted_BS


def keys_of(batch: dict[str, Any]) -> np.ndarray:
    """The keys of the examples of a batch, (B,) uint64. They do not depend on the padding."""
    tokens_BS, labels_BS = (batch[name].cpu().numpy() for name in ("input_ids", "labels"))
    mask_BS = np.ones(tokens_BS.shape, bool)
    if batch.get("attention_mask") is not None:
        mask_BS = batch["attention_mask"].cpu().numpy().astype(bool)
    keys = []
    for tokens_S, labels_S, mask_S in zip(tokens_BS, labels_BS, mask_BS, strict=True):
        content = np.stack([tokens_S[mask_S], labels_S[mask_S]]).astype("<i8")
        keys.append(hashlib.blake2b(content.tobytes(), digest_size=8).digest())
    return np.frombuffer(b"".join(keys), "<u8")


# ----------------------------------------------------------------- training


def cache_arguments(schedule: InheritanceSchedule) -> dict[str, Any]:
    """The arguments of `growkern.cache_teacher` for a run with this schedule."""
    return {"temperature": schedule.temperature, "rows": schedule.kl_rows}


class TopKTeacher(Teachers):
    """A teacher that is read from a cache or a server. No model runs.

    The rows are refused if they do not fit the schedule: it needs their temperature, and no rows
    that they lack.
    """

    lacks_rows = True

    def __init__(self, rows: TopKRows, schedule: InheritanceSchedule) -> None:
        super().__init__([], None)
        self.rows = rows
        self._tail = schedule.tail or "bucket"
        self._columns: int | None = None
        check("cached", rows=rows, schedule=schedule)

    def check_objective(self, causal: bool) -> None:
        """Check that the teacher predicted what the student does."""
        name = f"{self.rows.name} holds a teacher that"
        check_same_objective(name, self.rows.facts.causal, causal)

    def compare(self, student: Any, tokenizer: Any | None, own: Any | None) -> None:
        """Do nothing: `common_vocabulary` compares the tokenizers, and sets `known`."""

    def common_vocabulary(self, student: Any, tokenizer: Any | None) -> int | None:
        """The vocabulary columns of the student that are not padding; `known` is set too.

        None when both vocabularies have the same size, or the teacher's is unknown. Without a
        tokenizer of the student, that of the teacher is not compared.
        """
        name, facts = self.rows.name, self.rows.facts
        columns = student.get_output_embeddings().weight.shape[0]
        self._columns = columns
        self.known, size = None, facts.vocab_size
        # the rows were made with this tokenizer, or with one that has its first tokens
        if None not in (tokenizer, facts.tokenizer) and facts.tokenizer not in (
            tokenizer_fingerprint(tokenizer),
            tokenizer_fingerprint(tokenizer, size),
        ):
            raise GrowthError(
                f"{name} was made with another tokenizer: every token must have the same id for "
                "teacher and student"
            )
        if size is None or size == columns:
            return None
        if tokenizer is not None and facts.tokenizer and size < len(tokenizer) <= columns:
            self.known = size
            return len(tokenizer)
        if size > columns or tokenizer is None or size < len(tokenizer):
            raise GrowthError(
                f"{name} has a vocabulary of {size} tokens, but the student's head has "
                f"{columns} columns. If they differ in padding only, make it with "
                "vocab_size=len(tokenizer) and pass the tokenizer as processing_class"
            )
        if facts.tokenizer is None:
            remedy = "make it with tokenizer=. Otherwise choose a teacher with that tokenizer"
            check_padding(name, size, len(tokenizer), remedy)
        return size

    def trained(self, collator: Collator, dataset: Any) -> "TopKCollator":
        """Wrap the collator that the rows were made with, so that batches hold them too.

        If the data can be indexed, the rows of its first and last example are read at once.
        """
        wrapped = TopKCollator(collator, self.rows, self._columns)
        if isinstance(dataset, IndexedDataset) and len(dataset):
            for i in (0, len(dataset) - 1):
                wrapped([dataset[i]])
        return wrapped

    def loss_function(self, inputs: dict[str, Any], taught: bool) -> Callable[..., Any]:
        """`topk_kl_mlm_loss` for a batch without labels, whose rows of the teacher are removed."""
        topk = {name: inputs.pop(name, None) for name in (IDS, LOGPROBS)}
        topk = topk if taught else dict.fromkeys(topk)
        return partial(topk_kl_mlm_loss, **topk, tail=self._tail)


class TopKCollator(OuterCollator):
    """Adds the rows of such a teacher to the batches of another collator.

    An id beyond the columns of the student's head is refused here, if these are known: a GPU could
    only stop with an assertion. An evaluation has no teacher.
    """

    def __init__(self, collator: Collator, rows: TopKRows, columns: int | None = None) -> None:
        super().__init__(collator)
        self.rows, self.columns = rows, columns
        # shared memory: `leave_out` reaches data workers that already run, forked or spawned
        self._gone = torch.zeros((), dtype=torch.bool).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Draw the masks of this epoch; after the teacher's last one begin again."""
        super().set_epoch(epoch % self.rows.facts.epochs)

    def leave_out(self, gone: bool) -> None:
        """Make batches without a teacher (True) or with one. The masks stay the same."""
        self._gone.fill_(gone)

    def __call__(self, features: Any) -> dict[str, Any]:
        batch = self.inner(features)
        if self._gone:
            return batch
        ids_BSk, logprobs_BSk = self.rows.batch(batch)
        if self.columns is not None and int(ids_BSk.max()) >= self.columns:
            raise GrowthError(
                f"{self.rows.name} gives token {int(ids_BSk.max())}, but the student's head has "
                f"{self.columns} columns: teacher and student must have the same tokenizer"
            )
        return batch | {IDS: ids_BSk, LOGPROBS: logprobs_BSk}
