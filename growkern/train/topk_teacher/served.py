"""`ServedTeacher`: the k likeliest tokens of a teacher that runs on a server.

Shape letters used in this file: k tokens per row.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch

from growkern.arguments import real_number, whole_number
from growkern.errors import GrowthError, nearest
from growkern.train.topk_teacher.apart import run_apart
from growkern.train.topk_teacher.facts import CausalRows, Rows, causal_facts, fault_of, no_rows
from growkern.train.topk_teacher.http import KEY_VARIABLE, MOST_TEXT, Connection, check_url
from growkern.train.topk_teacher.schemas import SCHEMAS, Schema

# what a header can hold
KEY = re.compile(r"[!-~]+")


class ServedTeacher(CausalRows):
    """A causal teacher on a server of vLLM or SGLang, asked for the log-probs of its prompt.

    `TwoStageTrainer` takes it as a teacher, `growkern.cache_teacher` keeps its rows, and `batch`
    gives the arguments of `growkern.topk_kl_mlm_loss`. Servers give log-probs at temperature 1, so
    the inheritance must have that temperature. An answer holds text for every number: k from 8 to
    32 is practical in training. For more, or for several epochs, keep the rows in a cache.

    Every data worker asks by itself. The server sees the token ids of the batch, one request for
    each example, so both sides must use the same tokenizer.

    Args:
        url: of the server, such as "http://host:8000".
        k: tokens per row. vLLM gives at most 20 unless it was started with ``--max-logprobs``.
        server: "vllm" or "sglang"; None asks the server.
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
        server: str | None = None,
        model: str | None = None,
        vocab_size: int | None = None,
        tokenizer: Any | None = None,
        api_key: str | None = None,
        timeout: float = 120.0,
        retries: int = 4,
        concurrency: int = 8,
    ) -> None:
        if server is not None and server not in SCHEMAS:
            raise GrowthError(f"server is {server!r}{nearest(server, tuple(SCHEMAS))}")
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
        self._schema = _schema_of(self.name, server or card.get("owned_by"))
        self.facts = causal_facts(1.0, vocab_size, tokenizer)

    def _find_model(self, name: str | None) -> dict[str, Any]:
        """The server's own record of the teacher."""
        # a wrong URL is noticed soon, a server that is busy later
        connection = replace(self._connection, retries=min(1, self._connection.retries))
        (answer,) = run_apart(connection.get, ["/v1/models"])
        try:
            cards = {str(card["id"]): card for card in answer["data"]}
        except (TypeError, KeyError) as error:
            raise GrowthError(
                f"{self.name}/v1/models lists no models: is this a server of vLLM or SGLang?"
            ) from error
        if name is None and len(cards) == 1:
            return next(iter(cards.values()))
        if name not in cards:
            what = "has several models" if name is None else f"has no model {name!r}"
            raise GrowthError(f"{self.name} {what}: give model, one of {sorted(cards)}")
        return cards[name]

    def of_texts(self, texts: list[list[int]]) -> list[Rows]:
        """Ask the server for the rows of several texts, each up to the first token it lacks."""
        limit = self.facts.vocab_size or math.inf
        read = [list(takewhile(lambda token: token < limit, text)) for text in texts]
        asked = [text for text in read if len(text) > 1]
        answers = iter(run_apart(self._rows_of, asked, self.concurrency))
        found = []
        for text, known in zip(texts, read, strict=True):
            ids, logprobs = next(answers) if len(known) > 1 else no_rows((0, self.k), torch.float32)
            rest = no_rows((len(text) - 1 - len(ids), self.k), torch.float32)
            found.append((torch.cat([ids, rest[0]]), torch.cat([logprobs, rest[1]])))
        return found

    async def _rows_of(self, tokens: Sequence[int]) -> Rows:
        """The rows (len(tokens) - 1, k) of one prompt."""
        if self._longest is not None and len(tokens) >= self._longest:
            raise GrowthError(
                f"{self.name}: an example has {len(tokens)} tokens, but {self.model} is served "
                f"with room for {self._longest}, one of them generated: shorten the sequences"
            )
        schema = self._schema
        try:
            answer = await self._connection.post(
                schema.path,
                schema.body(self.model, tokens, self.k),
                (self.k + 1) * len(tokens),
            )
        except GrowthError as error:
            limit = schema.most_tokens(str(error))
            if limit is None:
                raise
            more = schema.more.format(k=self.k)
            raise GrowthError(f"{error}: {more}, or give k = {limit}") from error
        try:
            found = schema.rows(answer, tokens)
        except GrowthError as error:
            raise GrowthError(f"{self.name} gives {error}") from error
        except (
            KeyError,
            IndexError,
            TypeError,
            ValueError,
            AttributeError,
            OverflowError,
        ) as error:
            why = " ".join(str(error).split())[:MOST_TEXT]
            raise GrowthError(
                f"{self.name}{schema.path}: the answer lacks a prompt's log-probs in the schema of "
                f"{schema.name} ({why}): give server, one of {sorted(SCHEMAS)}"
            ) from error
        return self._checked(found)

    def _checked(self, found: list[list[tuple[float, int]]]) -> Rows:
        """The k likeliest tokens of each row, likeliest first."""
        fewest = min(map(len, found))
        if fewest < self.k:
            raise GrowthError(
                f"{self.name} gives {fewest} tokens per row, not k={self.k}: "
                f"{self._schema.more.format(k=self.k)}"
            )
        # the prompt's own token may stand beside the k
        kept = [sorted(row, reverse=True)[: self.k] for row in found]
        logprobs = torch.tensor([[logprob for logprob, _ in row] for row in kept])
        ids = torch.tensor([[token for _, token in row] for row in kept], dtype=torch.int32)
        fault = fault_of(ids, logprobs, self.facts.vocab_size)
        if fault is not None:
            raise GrowthError(f"{self.name} gives {fault}")
        return ids, logprobs


def _schema_of(url: str, server: Any) -> Schema:
    """The schema of a server, by the name that it gives itself."""
    schema = SCHEMAS.get(str(server).lower())
    if schema is None:
        raise GrowthError(f"{url} calls itself {server!r}: give server, one of {sorted(SCHEMAS)}")
    return schema
