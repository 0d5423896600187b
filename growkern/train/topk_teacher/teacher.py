"""Trains with a teacher that is known by its k likeliest tokens, in the place of models that run.

The predictions of a masked language model are valid only for the masks that it saw. A cache stores
them for the masks of its first epochs, and training cycles through these masks. A causal model
saw the text without masks, so its predictions serve every epoch. An example whose tokens or masks
are not in the cache is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from growkern.errors import GrowthError
from growkern.ops.loss.topk_kl_mlm_loss import topk_kl_mlm_loss
from growkern.train.loss.inheritance import InheritanceSchedule, check_same_objective
from growkern.train.loss.rows import TEACHER_IDS
from growkern.train.loss.vocabulary import check_padding, tokenizer_fingerprint
from growkern.train.objectives.language_modeling import (
    Collator,
    IndexedDataset,
    OuterCollator,
)
from growkern.train.rules import check
from growkern.train.topk_teacher.facts import TopKRows
from growkern.train.topk_teacher.http import check_url

IDS, LOGPROBS = TEACHER_IDS, "teacher_topk_logprobs"


@dataclass(frozen=True)
class TeacherSection:
    """Section [teacher] of a run file. The run's tokenizer must begin with that of the teachers.

    Args:
        paths: checkpoint directories of the teachers. Or a table of the names in `data.train` and
            one directory each: that teacher then teaches the rows of this source alone.
        cache: directory that `growkern cache-teacher` wrote.
        url: of a server of vLLM or SGLang that runs the teacher, see `growkern.ServedTeacher`.
        served_model: the name of the teacher on the server, if that has several.
        k: tokens per row that the server is asked for.
        vocab_size: tokens of the teacher on the server, if the run's tokenizer has more.

    Raises:
        GrowthError: not exactly one of paths, cache and url is given, or url and k apart, or
            the url names no server.
    """

    paths: tuple[str, ...] | dict[str, str] = ()
    cache: str | None = None
    url: str | None = None
    served_model: str | None = None
    k: int | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        check("teacher", self)
        if self.url is not None:
            check_url(self.url)

    @property
    def names(self) -> tuple[str, ...]:
        """The sources of the teachers; empty if each teacher teaches all rows."""
        return tuple(self.paths) if isinstance(self.paths, dict) else ()

    @property
    def directories(self) -> tuple[str, ...]:
        """The checkpoint of each teacher that runs."""
        return tuple(self.paths.values() if isinstance(self.paths, dict) else self.paths)

    @property
    def is_model(self) -> bool:
        """Whether the teachers are models that run in the training processes."""
        return bool(self.paths)


class TopKTeacher:
    """A teacher that is read from a cache, a server or a file, with the methods of `Teachers`.

    The rows are refused if they do not fit the schedule: it needs their temperature, and no rows
    that they lack.
    """

    # no model runs, so there are no FLOPs to count
    models: tuple[()] = ()
    # tokens that the teacher knows, if the student has further ones
    known: int | None = None

    def __init__(self, rows: TopKRows, schedule: InheritanceSchedule) -> None:
        self.rows, facts = rows, rows.facts
        self._tail = schedule.tail or "bucket"
        self._columns: int | None = None
        found = {"temperature": facts.temperature, "kl_rows": facts.rows}
        if schedule.temperature != facts.temperature or (
            schedule.kl_rows == "all" and facts.rows != "all"
        ):
            wanted = {"temperature": schedule.temperature, "kl_rows": schedule.kl_rows}
            raise GrowthError(
                f"{rows.name} was made with {found}, but the inheritance asks for {wanted}: "
                f"change the inheritance, or {rows.remedy}"
            )
        if schedule.teacher_weights is not None and len(schedule.teacher_weights) != 1:
            raise GrowthError(f"{rows.name} holds one teacher: leave teacher_weights out")

    def freeze(self, student: nn.Module, device: torch.device) -> None:
        """Do nothing: there is no model to freeze."""

    def check_objective(self, causal: bool) -> None:
        """Check that the teacher predicted what the student does."""
        name = f"{self.rows.name} holds a teacher that"
        check_same_objective(name, self.rows.facts.causal, causal)

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

    def collator(self, collator: Collator, dataset: Any) -> "TopKCollator":
        """Wrap a collator so that training batches hold the rows of the teacher.

        It is the one that the rows were made with. If the training data can be indexed, the rows of
        its first and last example are read at once.
        """
        wrapped = TopKCollator(collator, self.rows, self._columns)
        if isinstance(dataset, IndexedDataset) and len(dataset):
            for i in (0, len(dataset) - 1):
                wrapped([dataset[i]])
        return wrapped

    def loss_function(self, inputs: dict[str, Any], alpha: float) -> Callable[..., Any]:
        """`topk_kl_mlm_loss` for a batch without labels, whose rows of the teacher are removed."""
        topk = {name: inputs.pop(name, None) for name in (IDS, LOGPROBS)}
        topk = topk if alpha > 0 else dict.fromkeys(topk)
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
