"""Trains with a cached teacher: `TeacherCache` in the place of models that run.

The predictions of a masked language model are valid only for the masks that it saw. A cache stores
them for the masks of its first epochs, and training cycles through these masks. A causal model
saw the text without masks, so its predictions serve every epoch. An example whose tokens or masks
are not in the cache is refused.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from growkern.errors import GrowthError
from growkern.ops.loss.topk_kl_mlm_loss import topk_kl_mlm_loss
from growkern.train.cached_teacher.store import TeacherCache
from growkern.train.data import Collator, EpochCollator, IndexedDataset, evaluation_collator
from growkern.train.inheritance import InheritanceSchedule, objective, tokenizer_fingerprint

IDS, LOGPROBS = "teacher_topk_ids", "teacher_topk_logprobs"


class CachedTeacher:
    """A teacher that is read from a cache, with the methods of `Teachers`.

    Args:
        cache: of one teacher.
        schedule: its temperature must be the one of the cache, which must hold all rows it needs.

    Raises:
        GrowthError: the cache does not fit the schedule.
    """

    # no model runs, so there are no FLOPs to count
    models: tuple[()] = ()

    def __init__(self, cache: TeacherCache, schedule: InheritanceSchedule) -> None:
        self.cache, header = cache, cache.header
        found = {"temperature": header.temperature, "kl_rows": header.rows}
        if schedule.temperature != header.temperature or (
            schedule.kl_rows == "all" and header.rows != "all"
        ):
            wanted = {"temperature": schedule.temperature, "kl_rows": schedule.kl_rows}
            raise GrowthError(
                f"{cache.directory} was made with {found}, but the inheritance asks for {wanted}: "
                "change the inheritance, or make the cache again"
            )
        if schedule.teacher_weights is not None and len(schedule.teacher_weights) != 1:
            raise GrowthError("a cache holds one teacher: leave teacher_weights out")

    def freeze(self, student: nn.Module, device: torch.device) -> None:
        """Do nothing: there is no model to freeze."""

    def check_objective(self, causal: bool) -> None:
        """Check that the cached teacher predicted the same tokens as the student.

        Args:
            causal: whether the student predicts the next token.

        Raises:
            GrowthError: it has the other objective.
        """
        if self.cache.header.causal != causal:
            raise GrowthError(
                f"{self.cache.directory} holds a teacher that predicts "
                f"{objective(not causal)}, but the student predicts {objective(causal)}: choose a "
                "teacher with the student's objective"
            )

    def common_vocabulary(self, student: Any, tokenizer: Any | None) -> int | None:
        """The number of vocabulary columns that mean the same token in student and cache.

        Args:
            student: the model in training.
            tokenizer: of the student; None skips the comparison with the tokenizer of the cache.

        Returns:
            The number of columns, or None when both vocabularies have the same size.

        Raises:
            GrowthError: the tokenizers or the vocabularies cannot be matched.
        """
        header, columns = self.cache.header, student.get_output_embeddings().weight.shape[0]
        if (
            tokenizer is not None
            and header.tokenizer is not None
            and tokenizer_fingerprint(tokenizer) != header.tokenizer
        ):
            raise GrowthError(
                f"{self.cache.directory} was made with another tokenizer: every token must have "
                "the same id for teacher and student"
            )
        if header.vocab_size == columns:
            return None
        if header.vocab_size > columns or tokenizer is None or header.vocab_size < len(tokenizer):
            raise GrowthError(
                f"{self.cache.directory} has a vocabulary of {header.vocab_size} tokens, but the "
                f"student's head has {columns} columns. If they differ in padding only, make the "
                "cache with vocab_size=len(tokenizer) and pass the tokenizer as processing_class"
            )
        return header.vocab_size

    def collator(self, collator: Collator, dataset: Any) -> "CachedCollator":
        """Wrap a collator so that training batches hold the rows of the teacher.

        Args:
            collator: the one the cache was made with.
            dataset: the training data. If it can be indexed, its first and last example are
                looked up in the cache at once.

        Raises:
            GrowthError: one of these examples is not in the cache.
        """
        wrapped = CachedCollator(collator, self.cache)
        if isinstance(dataset, IndexedDataset) and len(dataset):
            for i in (0, len(dataset) - 1):
                wrapped([dataset[i]])
        return wrapped

    def loss_function(self, inputs: dict[str, Any], alpha: float) -> Callable[..., Any]:
        """The loss for a batch. The rows of the teacher are removed from `inputs`.

        Args:
            inputs: a batch without labels.
            alpha: share of the KL term.

        Returns:
            `topk_kl_mlm_loss` with the arguments of the teacher filled in.
        """
        topk = {name: inputs.pop(name, None) for name in (IDS, LOGPROBS)}
        return partial(topk_kl_mlm_loss, **(topk if alpha > 0 else dict.fromkeys(topk)))


class CachedCollator:
    """Adds the rows of a cached teacher to the batches of another collator.

    Args:
        collator: makes the batches.
        cache: holds the rows of every example.
    """

    def __init__(self, collator: Collator, cache: TeacherCache) -> None:
        self.inner, self.cache = collator, cache
        # shared memory: `leave_out` reaches data workers that already run, forked or spawned
        self._gone = torch.zeros((), dtype=torch.bool).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Draw the masks of this epoch; after the last one in the cache begin again."""
        if isinstance(self.inner, EpochCollator):
            self.inner.set_epoch(epoch % self.cache.header.epochs)

    def frozen(self) -> Collator:
        """The variant for evaluation, which has no teacher."""
        return evaluation_collator(self.inner)

    def leave_out(self, gone: bool) -> None:
        """Make batches without a teacher (True) or with one. The masks stay the same."""
        self._gone.fill_(gone)

    def __call__(self, features: Any) -> dict[str, Any]:
        batch = self.inner(features)
        if self._gone:
            return batch
        return batch | dict(zip((IDS, LOGPROBS), self.cache.batch(batch), strict=True))
