"""A kept teacher in the place of models that run: `TeacherCache` as training uses it.

What a masked language model's teacher says belongs to the masks it saw. Training therefore goes
round the maskings of the cache (epoch e draws the masks of epoch e modulo theirs) for its whole
length, and an example whose tokens or masks the cache does not have is refused. A causal model's
teacher saw the text itself: one pass of it serves every epoch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from growkern.errors import GrowthError
from growkern.ops.loss.topk_kl_mlm_loss import topk_kl_mlm_loss
from growkern.train.cached_teacher.store import TeacherCache
from growkern.train.inheritance import InheritanceSchedule, tokenizer_fingerprint

IDS, LOGPROBS = "teacher_topk_ids", "teacher_topk_logprobs"


class CachedTeacher:
    """`Teachers` that do not run.

    raises: GrowthError when the cache does not fit the schedule.
    """

    models: tuple[()] = ()  # nothing to count FLOPs of

    def __init__(self, cache: TeacherCache, schedule: InheritanceSchedule) -> None:
        self.cache, header = cache, cache.header
        found = {"temperature": header.temperature, "kl_rows": header.rows}
        if schedule.temperature != header.temperature or (
            schedule.kl_rows == "all" and header.rows != "all"
        ):
            wanted = {"temperature": schedule.temperature, "kl_rows": schedule.kl_rows}
            raise GrowthError(
                f"{cache.directory} was made with {found}, the inheritance wants {wanted}: make "
                "the cache again, or follow it"
            )
        if schedule.teacher_weights is not None and len(schedule.teacher_weights) != 1:
            raise GrowthError("a cache is one teacher: leave teacher_weights out")

    def freeze(self, student: nn.Module, device: torch.device) -> None:
        """Nothing to freeze: log-probs are numbers."""

    def common_vocabulary(self, student: Any, tokenizer: Any | None) -> int | None:
        """Columns that mean the same token on both sides; None when the heads have one size.

        raises: GrowthError when tokenizers or vocabularies cannot be matched.
        """
        header, columns = self.cache.header, student.get_output_embeddings().weight.shape[0]
        if (
            tokenizer is not None
            and header.tokenizer is not None
            and tokenizer_fingerprint(tokenizer) != header.tokenizer
        ):
            raise GrowthError(
                f"{self.cache.directory} was made with another tokenizer: a teacher must share "
                "the student's vocabulary token by token"
            )
        if header.vocab_size == columns:
            return None
        if header.vocab_size > columns or tokenizer is None or header.vocab_size < len(tokenizer):
            raise GrowthError(
                f"{self.cache.directory} is over {header.vocab_size} tokens, the student's head "
                f"has {columns} columns: pass processing_class and make the cache with "
                "vocab_size=len(tokenizer) if they only differ in padding"
            )
        return header.vocab_size

    def collator(self, collator: Callable[[Any], Any], dataset: Any) -> "CachedCollator":
        """The run's collator, with the teacher's rows in every training batch.

        raises: GrowthError when the first or the last example of the data is not in the cache.
        """
        wrapped = CachedCollator(collator, self.cache)
        if hasattr(dataset, "__getitem__") and len(dataset):
            for i in (0, len(dataset) - 1):
                wrapped([dataset[i]])
        return wrapped

    def loss_function(self, inputs: dict[str, Any], alpha: float) -> Callable[..., Any]:
        """`topk_kl_mlm_loss` of a batch's teacher rows, which leave `inputs`."""
        topk = {name: inputs.pop(name, None) for name in (IDS, LOGPROBS)}
        return partial(topk_kl_mlm_loss, **(topk if alpha > 0 else dict.fromkeys(topk)))


class CachedCollator:
    """A collator whose batches carry the teacher's rows too."""

    def __init__(self, collator: Callable[[Any], Any], cache: TeacherCache) -> None:
        self.inner, self.cache = collator, cache
        # shared memory: a data worker, forked or spawned, learns that the teacher is gone
        self._gone = torch.zeros((), dtype=torch.bool).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """The epoch whose masks the next batches get, among those of the cache."""
        if hasattr(self.inner, "set_epoch"):
            self.inner.set_epoch(epoch % self.cache.header.epochs)

    def frozen(self) -> Callable[[Any], Any]:
        """For evaluation, where no teacher takes part."""
        return self.inner.frozen() if hasattr(self.inner, "frozen") else self.inner

    def leave_out(self, gone: bool) -> None:
        """Whether the next batches come without a teacher; their masks stay the same."""
        self._gone.fill_(gone)

    def __call__(self, features: Any) -> dict[str, Any]:
        batch = self.inner(features)
        if self._gone:
            return batch
        return batch | dict(zip((IDS, LOGPROBS), self.cache.batch(batch), strict=True))
