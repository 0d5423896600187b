"""Computes the contents of a teacher cache: collated examples, and the teacher's top k per row.

Shape letters used in this file: B examples, S positions, R rows, E examples of all epochs, V
vocabulary, H width.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from growkern.errors import GrowthError
from growkern.ops.loss import project
from growkern.train.loss import as_known, real_tokens
from growkern.train.model import check_causal, check_head, head_inputs, is_causal, softcap_of
from growkern.train.objectives import Collator, EpochCollator
from growkern.train.topk_teacher.store import DTYPES, MAX_ID_BITS, CacheHeader
from growkern.train.topk_teacher.teacher import (
    RowFacts,
    Rows,
    TopKRows,
    keys_of,
    placed,
    rows_of,
)

# float32 logits that are made at a time: 64 MiB
LOGIT_ELEMENTS = 1 << 24


# ---------------------------------------------------------------- examples


@dataclass(frozen=True)
class Examples:
    """The batches of a data set, epoch after epoch, as training would collate them.

    The data set has a length and is read by index, each time with the masks of the next epoch.
    """

    dataset: Any
    collator: Collator
    epochs: int
    batch_size: int

    def __len__(self) -> int:
        return self.epochs * len(self.dataset)

    def batches(self, start: int = 0, end: int | None = None) -> Iterator[dict[str, Any]]:
        """Collate the examples from `start` to `end` of all epochs. Those of a batch are of one."""
        end = len(self) if end is None else end
        while start < end:
            epoch, first = divmod(start, len(self.dataset))
            if isinstance(self.collator, EpochCollator):
                self.collator.set_epoch(epoch)
            size = min(self.batch_size, len(self.dataset) - first, end - start)
            batch = self.collator([self.dataset[i] for i in range(first, first + size)])
            if "input_ids" not in batch or "labels" not in batch:
                raise GrowthError(
                    f"the collator gives {sorted(batch)}: it must give input_ids and labels, as in "
                    "training"
                )
            yield batch
            start += size


class Contents(NamedTuple):
    """The result of the first pass over the data."""

    keys_E: np.ndarray  # uint64, from `keys_of`
    rows_E: np.ndarray  # number of rows of each example
    tokens: int  # of all examples together, without padding


def survey(examples: Examples, rows: str, causal: bool, known: int, progress: bool) -> Contents:
    """Read all examples once, without running the teacher, which knows so many tokens."""
    keys, counts, tokens = [], [], 0
    bar = tqdm(total=len(examples), desc="reading", unit=" examples", disable=not progress)
    with bar:
        for batch in examples.batches():
            keys.append(keys_of(batch))
            counts.append(rows_of(batch, rows, causal, known).sum(1).numpy())
            tokens += int(real_tokens(batch).sum())
            bar.update(len(keys[-1]))
    if not keys or not sum(map(np.sum, counts)):
        raise GrowthError(f"none of the {len(examples)} examples has a row to store")
    return Contents(np.concatenate(keys), np.concatenate(counts), tokens)


# ----------------------------------------------------------------- teacher


class ModelTeacher(TopKRows):
    """The rows of a model that runs in this process, in evaluation mode."""

    remedy = "keep other rows of the model"

    def __init__(
        self,
        model: Any,
        k: int,
        temperature: float = 2.0,
        rows: str = "labels",
        vocab_size: int | None = None,
    ) -> None:
        check_head(model)
        causal = is_causal(model)
        if causal:
            check_causal(model)
        self.name, self.model, self.k = "the model", model, k
        columns = model.get_output_embeddings().weight.shape[0]
        self._known = columns_that_count(self.name, columns, vocab_size, k)
        self.facts = RowFacts(temperature, rows, causal, self._known, None, epochs=1)

    def fingerprint(self) -> str:
        """The SHA-256 of all parameters and buffers with their names, dtypes and shapes."""
        digest = hashlib.sha256()
        for name, tensor in self.model.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    @torch.no_grad()
    def batch(self, batch: dict[str, Any]) -> Rows:
        """The rows of a collated batch, as the model computes them now."""
        model, facts = self.model, self.facts
        kept_BS = rows_of(batch, facts.rows, facts.causal, self._known)
        inputs = {name: x.to(model.device) for name, x in batch.items() if name != "labels"}
        hidden, weight, bias = head_inputs(model, as_known(inputs, self._known))
        rows = topk_of_head(
            hidden[kept_BS.to(model.device)], weight, bias, self._known, self.k, facts.temperature,
            softcap_of(model),
        )  # fmt: skip
        return placed(kept_BS, *(values.cpu() for values in rows))


def columns_that_count(name: str, columns: int | None, vocab_size: int | None, k: int) -> int:
    """The columns of a teacher that count: all of its softmax, or fewer if others are padding."""
    columns = columns or vocab_size
    if columns is None:
        raise GrowthError(f"{name} does not say how many columns it has: give vocab_size")
    vocabulary = columns if vocab_size is None else vocab_size
    if not 0 < vocabulary <= columns or k > vocabulary or vocabulary > 1 << MAX_ID_BITS:
        raise GrowthError(
            f"k is {k}, vocab_size is {vocabulary} and the teacher's head has {columns} columns: "
            f"k <= vocab_size <= columns must hold, and vocab_size <= {1 << MAX_ID_BITS}"
        )
    return vocabulary


def kept_rows(
    teacher: TopKRows, batch: dict[str, Any], header: CacheHeader, keys_B: np.ndarray
) -> Rows:
    """Ask the teacher for the k likeliest tokens of each row of a batch.

    The keys of the examples are those of the first pass: a batch that differs from it is refused,
    and so are another k or temperature, and a missing row. Gives ids (R, k) int32 and log-probs
    (R, k) in the dtype of the cache.
    """
    if not np.array_equal(keys_of(batch), keys_B):
        raise GrowthError(
            "the collator draws other masks each time it is called, so training would find no "
            "batch of its own in the cache. Use growkern's MaskedLMCollator, or a data set that is "
            "masked already"
        )
    kept_BS = rows_of(batch, header.rows, header.causal, header.vocab_size)
    ids_BSk, logprobs_BSk = teacher.batch(batch)
    given = {"k": ids_BSk.shape[-1], "temperature": teacher.facts.temperature}
    wanted = {"k": header.k, "temperature": header.temperature}
    if given != wanted:
        raise GrowthError(f"{teacher.name} gives {given}, but the cache is to have {wanted}")
    ids_Rk, logprobs_Rk = ids_BSk[kept_BS], logprobs_BSk[kept_BS]
    missing = int((ids_Rk[:, 0] < 0).sum())
    if missing:
        raise GrowthError(
            f"{teacher.name} lacks {missing} of {len(ids_Rk)} rows that the cache is to have "
            f"(rows={header.rows!r})"
        )
    if not bool(torch.isfinite(logprobs_Rk[:, 0]).all()):
        raise GrowthError("the teacher gives NaN or Inf: check its weights, or run it in float32")
    return ids_Rk, logprobs_Rk.to(DTYPES[header.dtype])


def topk_of_head(
    hidden_RH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    vocab: int,
    k: int,
    temperature: float,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens of an output projection, at a temperature and maybe with a softcap.

    The softmax runs over the first `vocab` columns; later ones are padding. Gives ids (R, k) int64
    and log-probs (R, k) float32, likeliest first.
    """
    bias_V = None if bias_V is None else bias_V[:vocab]
    kept = []
    for x_CH in hidden_RH.split(max(1, LOGIT_ELEMENTS // vocab)):
        z_CV = torch.empty(len(x_CH), vocab, dtype=torch.float32, device=x_CH.device)
        project(x_CH, weight_VH[:vocab], bias_V, z_CV)
        if cap is not None:
            z_CV.div_(cap).tanh_().mul_(cap)
        top = z_CV.div_(temperature).topk(k)
        m_C1 = top.values[:, :1]
        # not z - logsumexp(z): that is off by the rounding of a logit, 4e-6 at 100
        log_sum_C1 = z_CV.sub_(m_C1).exp_().sum(-1, keepdim=True).double().log()
        log_p_Ck = top.values.double() - m_C1 - log_sum_C1
        kept.append((top.indices, log_p_Ck.float()))
    ids, log_p = zip(*kept, strict=True)
    return torch.cat(ids), torch.cat(log_p)
