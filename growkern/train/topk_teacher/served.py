"""`ServedTeacher`: the k likeliest tokens of a teacher that runs on a server of vLLM.

The server gives the log-probs of a prompt's tokens: ``/v1/completions`` with ``prompt_logprobs``
lists one entry per token of the prompt. Entry i holds the likeliest tokens at the place of token i,
given the tokens before it, as a map from token id to ``{"logprob", "rank", "decoded_token"}``. So
the first entry is empty, and entry i + 1 is the prediction of position i.

The prompt's own token is added if it is not one of the k. It shows whether the answer belongs to
the prompt.

Shape letters used in this file: k tokens per row.
"""

from __future__ import annotations

import math
import os
import re
import reprlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from growkern.arguments import real_number, whole_number
from growkern.errors import GrowthError
from growkern.train.loss import (
    document_starts,
    real_tokens,
    teacher_rows,
    tokenizer_fingerprint,
)
from growkern.train.topk_teacher.http import (
    KEY_VARIABLE,
    MOST_TEXT,
    Connection,
    check_url,
    run_apart,
)
from growkern.train.topk_teacher.teacher import (
    MOST_IDS,
    NO_ID,
    NO_LOGPROB,
    RowFacts,
    Rows,
    TopKRows,
    fault_of,
    no_rows,
)

# what a header can hold
KEY = re.compile(r"[!-~]+")
# the largest float32: rows are stored as such
LARGEST = float(np.finfo(np.float32).max)
# (log-prob, token id) of the likeliest tokens of each position but the last
ServedRows = list[list[tuple[float, int]]]

PATH = "/v1/completions"

# -------------------------------------------------------------------- schema


def _rows_in(answer: Any, tokens: Sequence[int]) -> ServedRows:
    """The rows of an answer to the request for these tokens.

    An answer of another schema, or to another prompt, raises errors of many kinds. A log-prob that
    is no number, or not finite as a float32, raises a GrowthError.
    """
    entries = answer["choices"][0]["prompt_logprobs"]
    if len(entries) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens were sent, and {len(entries)} came back")
    if entries[0]:
        raise ValueError("the first token has a row, so the rows are shifted")
    for place, entry in enumerate(entries[1:], 1):
        # the prompt's own token is always among the entries
        if str(tokens[place]) not in entry:
            raise ValueError(f"its token {place} is not {tokens[place]}, which was sent")
    return [
        [(_logprob(values["logprob"], token), _id_of(token)) for token, values in entry.items()]
        for entry in entries[1:]
    ]


def _logprob(value: Any, token: str) -> float:
    """The log-prob of a token. What only looks like a number is refused."""
    if type(value) not in (int, float) or not abs(value) <= LARGEST:
        # fewer tokens than k have a probability above 0, or the teacher's weights are damaged
        raise GrowthError(
            f"token {token[:MOST_TEXT]} with {reprlib.repr(value)}, which is no log-prob: give a "
            "smaller k, or check the teacher's weights"
        )
    return float(value)


def _id_of(text: str) -> int:
    """The id that a name in a JSON object stands for."""
    token = int(text)
    if str(token) != text or not 0 <= token < MOST_IDS:
        raise ValueError(f"{reprlib.repr(text)} is no token id")
    return token


# ------------------------------------------------------------------- teacher


class ServedTeacher(TopKRows):
    """A causal teacher on a server of vLLM, asked for the log-probs of its prompt.

    `TwoStageTrainer` takes it as a teacher, `growkern.cache_teacher` keeps its rows, and `batch`
    gives the arguments of `growkern.topk_kl_mlm_loss`. Servers give log-probs at temperature 1, so
    the inheritance must have that temperature. An answer holds text for every number: k from 8 to
    32 is practical in training. For more, or for several epochs, keep the rows in a cache.

    Every data worker asks by itself. The server sees the token ids of the batch, one request for
    each example, so both sides must use the same tokenizer.

    Args:
        url: of the server, such as "http://host:8000".
        k: tokens per row. vLLM gives at most 20 unless it was started with ``--max-logprobs``.
        model: the name under which the server knows the teacher; None takes its only one.
        vocab_size: columns of the teacher's softmax; ids beyond are refused. None skips the check.
        tokenizer: of the teacher. It is compared with the student's when training starts.
        api_key: sent as a bearer token. None reads the variable GROWKERN_TEACHER_API_KEY.
        timeout: seconds from the start of a request to the end of its answer.
        retries: further attempts when the server is busy or out of reach. The first wait is half a
            second, and each further one twice as long.
        concurrency: requests at a time.

    Raises:
        GrowthError: an option is wrong, or the server cannot be reached or has no such model.
    """

    remedy = "run the teacher yourself: a server gives log-probs at temperature 1 only"

    def __init__(
        self,
        url: str,
        k: int,
        *,
        model: str | None = None,
        vocab_size: int | None = None,
        tokenizer: Any | None = None,
        api_key: str | None = None,
        timeout: float = 120.0,
        retries: int = 4,
        concurrency: int = 8,
    ) -> None:
        k, retries = whole_number("k", k), whole_number("retries", retries)
        concurrency = whole_number("concurrency", concurrency)
        timeout = real_number("timeout", timeout)
        for name, value, least in (
            ("k", k, 1), ("timeout", timeout, 1e-3), ("retries", retries, 0),
            ("concurrency", concurrency, 1),
        ):  # fmt: skip
            # NaN is not less than anything
            if not value >= least:
                raise GrowthError(f"{name} is {value:g}: it must be at least {least:g}")
        check_url(url)
        key = api_key or os.environ.get(KEY_VARIABLE)
        if key is not None and not KEY.fullmatch(key):
            raise GrowthError(
                f"api_key (or {KEY_VARIABLE}) holds white space or letters beyond ASCII: give the "
                "key alone, without the end of its line"
            )
        self.name = url.rstrip("/").removesuffix("/v1")
        self._connection = Connection(self.name, timeout, retries, key)
        self.k, self.concurrency = k, concurrency
        card = self._find_model(model)
        self.model: str = card["id"]
        self._longest = card.get("max_model_len")
        if type(self._longest) not in (int, type(None)):
            raise GrowthError(
                f"{self.name}/v1/models: max_model_len is {self._longest!r}, which is no number"
            )
        known = None if tokenizer is None else tokenizer_fingerprint(tokenizer)
        self.facts = RowFacts(1.0, "all", True, vocab_size, known, epochs=1)

    def _find_model(self, name: str | None) -> dict[str, Any]:
        """The server's own record of the teacher."""
        # a wrong URL is noticed soon, a server that is busy later
        connection = replace(self._connection, retries=min(1, self._connection.retries))
        (answer,) = run_apart(connection.ask, ["/v1/models"])
        try:
            cards = {str(card["id"]): card for card in answer["data"]}
        except (TypeError, KeyError) as error:
            raise GrowthError(
                f"{self.name}/v1/models lists no models: is this a server of vLLM?"
            ) from error
        if name is None and len(cards) == 1:
            return next(iter(cards.values()))
        if name not in cards:
            what = "has several models" if name is None else f"has no model {name!r}"
            raise GrowthError(f"{self.name} {what}: give model, one of {sorted(cards)}")
        return cards[name]

    def batch(self, batch: dict[str, Any]) -> Rows:
        """The rows of a collated batch: none at padding and at the last token of each document."""
        ids_BS, real_BS = batch["input_ids"].cpu(), real_tokens(batch).cpu()
        has_row_BS, starts_BS = teacher_rows(batch).cpu(), document_starts(batch)
        starts_BS = (
            torch.zeros_like(ids_BS) if starts_BS is None else starts_BS.cpu().expand_as(ids_BS)
        )
        places = []
        for b, (real_S, starts_S) in enumerate(zip(real_BS, starts_BS, strict=True)):
            # a packed row has no padding, so its starts count its tokens
            texts = real_S.nonzero()[:, 0].tensor_split(starts_S.nonzero()[1:, 0])
            places += [(b, at) for at in texts if len(at) > 1]
        rows = self._of_texts([ids_BS[b, at].tolist() for b, at in places])
        ids_BSk, logprobs_BSk = no_rows((*ids_BS.shape, self.k if rows else 1), torch.float32)
        for (b, at), (ids_Rk, logprobs_Rk) in zip(places, rows, strict=True):
            ids_BSk[b, at[:-1]], logprobs_BSk[b, at[:-1]] = ids_Rk, logprobs_Rk
        none_BS1 = ~has_row_BS[..., None]
        logprobs_BSk.masked_fill_(none_BS1, NO_LOGPROB)
        return ids_BSk.masked_fill_(none_BS1, NO_ID), logprobs_BSk

    def _of_texts(self, texts: list[list[int]]) -> list[Rows]:
        """Ask for the rows (n - 1, k) of texts of n tokens, each up to the first that it lacks."""
        limit = self.facts.vocab_size or math.inf
        read = [list(takewhile(lambda token: token < limit, text)) for text in texts]
        asked = [text for text in read if len(text) > 1]
        answers = iter(run_apart(self._rows_of, asked, self.concurrency))
        rows = []
        for text, known in zip(texts, read, strict=True):
            ids, logprobs = next(answers) if len(known) > 1 else no_rows((0, self.k), torch.float32)
            rest = no_rows((len(text) - 1 - len(ids), self.k), torch.float32)
            rows.append((torch.cat([ids, rest[0]]), torch.cat([logprobs, rest[1]])))
        return rows

    @property
    def _more(self) -> str:
        """How to let the server give k tokens."""
        return f"start vLLM with --max-logprobs {self.k}"

    async def _rows_of(self, tokens: Sequence[int]) -> Rows:
        """The rows (len(tokens) - 1, k) of one prompt."""
        if self._longest is not None and len(tokens) >= self._longest:
            raise GrowthError(
                f"{self.name}: an example has {len(tokens)} tokens, but {self.model} is served "
                f"with room for {self._longest}, one of them generated: shorten the sequences"
            )
        # at least one token must be generated
        body = {"model": self.model, "prompt": list(tokens), "prompt_logprobs": self.k}
        body |= {"max_tokens": 1, "temperature": 0.0}
        try:
            answer = await self._connection.ask(PATH, body, (self.k + 1) * len(tokens))
        except GrowthError as error:
            limit = re.search(r"greater than max allowed: (\d+)", str(error))
            if limit is None:
                raise
            raise GrowthError(f"{error}: {self._more}, or give k = {limit[1]}") from error
        try:
            rows = _rows_in(answer, tokens)
        except GrowthError as error:
            raise GrowthError(f"{self.name} gives {error}") from error
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            why = " ".join(str(error).split())[:MOST_TEXT]
            raise GrowthError(
                f"{self.name}{PATH}: the answer lacks a prompt's log-probs in the schema of vLLM "
                f"({why}): is this a server of vLLM?"
            ) from error
        return self._checked(rows)

    def _checked(self, rows: ServedRows) -> Rows:
        """The k likeliest tokens of each row, likeliest first."""
        fewest = min(map(len, rows))
        if fewest < self.k:
            raise GrowthError(
                f"{self.name} gives {fewest} tokens per row, not k={self.k}: {self._more}"
            )
        # the prompt's own token may stand beside the k
        kept = [sorted(row, reverse=True)[: self.k] for row in rows]
        logprobs = torch.tensor([[logprob for logprob, _ in row] for row in kept])
        ids = torch.tensor([[token for _, token in row] for row in kept], dtype=torch.int32)
        fault = fault_of(ids, logprobs, self.facts.vocab_size)
        if fault is not None:
            raise GrowthError(f"{self.name} gives {fault}")
        return ids, logprobs
