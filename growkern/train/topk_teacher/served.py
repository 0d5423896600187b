"""`ServedTeacher`: the k likeliest tokens of a teacher that runs on a server.

Servers give the log-probs of a prompt's tokens in one of two schemas. Both list one entry per token
of the prompt. Entry i holds the likeliest tokens at the place of token i, given the tokens before
it. So the first entry is empty, and entry i + 1 is the prediction of position i.

An answer also holds the prompt's own tokens, which show whether it belongs to the prompt:

- vLLM, ``/v1/completions`` with ``prompt_logprobs``: a map from token id to
  ``{"logprob", "rank", "decoded_token"}``. The prompt's own token is added if it is not one of the
  k.
- SGLang, ``/generate`` with ``return_logprob``: a list of ``[logprob, token id, text]``. Another
  list, ``input_token_logprobs``, has one such triple for each of the prompt's own tokens. Its
  log-probs show whether the rows are at their places.

Shape letters used in this file: k tokens per row.
"""

from __future__ import annotations

import math
import os
import re
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, TypeAlias

import numpy as np
import torch

from growkern.arguments import real_number, whole_number
from growkern.errors import GrowthError, nearest
from growkern.train.topk_teacher.http import (
    KEY_VARIABLE,
    MOST_TEXT,
    Connection,
    check_url,
    run_apart,
)
from growkern.train.topk_teacher.teacher import (
    MOST_IDS,
    ROUNDING,
    CausalRows,
    Rows,
    causal_facts,
    fault_of,
    no_rows,
)

# what a header can hold
KEY = re.compile(r"[!-~]+")
# the largest float32: rows are stored as such
LARGEST = float(np.finfo(np.float32).max)
# (log-prob, token id) of the likeliest tokens of each position but the last
ServedRows = list[list[tuple[float, int]]]

# ------------------------------------------------------------------- schemas


def _row(entry: Iterable[tuple[Any, Any]]) -> list[tuple[float, int]]:
    """The log-probs and ids of one row. Numbers that only look like some are refused."""
    row = []
    for logprob, token in entry:
        if type(token) is not int or not 0 <= token < MOST_IDS:
            raise ValueError(f"{reprlib.repr(token)} is no token id")
        if logprob is None or (type(logprob) is float and not abs(logprob) <= LARGEST):
            # fewer tokens than k have a probability above 0, or the teacher's weights are damaged
            raise GrowthError(
                f"token {token} with {logprob}, which is no log-prob: give a smaller k, or check "
                "the teacher's weights"
            )
        if type(logprob) not in (int, float):
            raise ValueError(f"{reprlib.repr(logprob)} is no log-prob")
        row.append((float(logprob), token))
    return row


def _check_prompt(entries: Sequence[Any], own: Sequence[Any], tokens: Sequence[int]) -> None:
    """Compare the prompt of an answer, and its tokens where they are known, with the one sent."""
    for count in (len(entries), len(own)):
        if count != len(tokens):
            raise ValueError(f"{len(tokens)} tokens were sent, and {count} came back")
    if entries[0]:
        raise ValueError("the first token has a row, so the rows are shifted")
    places = [i for i, (x, y) in enumerate(zip(own, tokens, strict=True)) if x != y]
    if places:
        raise ValueError(f"its token {places[0]} is not {tokens[places[0]]}, which was sent")


def _check_own(row: list[tuple[float, int]], own: Any, place: int) -> None:
    """Compare a row with the log-prob that the answer gives for the prompt's own token there."""
    logprob, token, *_ = own
    # JSON has no number for the log-prob of the probability 0
    own_logprob = -math.inf if logprob is None else _row([(logprob, token)])[0][0]
    if own_logprob > ROUNDING:
        raise ValueError(f"its token {place} has the log-prob {own_logprob:g}, which is above 0")
    in_row = [p for p, other in row if other == token]
    # a token beside the row is no likelier than the last in it
    for expected in in_row or [p for p, _ in row]:
        rounding = ROUNDING * max(1.0, -expected)
        is_lower = in_row and own_logprob < expected - rounding
        if is_lower or own_logprob > expected + rounding:
            raise ValueError(
                f"its token {place} has the log-prob {own_logprob:g}, which its row lacks: the "
                "rows are shifted"
            )


class Vllm:
    """vLLM's extension of the completions of OpenAI."""

    name, path = "vLLM", "/v1/completions"
    # how to let the server give {k} tokens
    more = "start vLLM with --max-logprobs {k}"

    def most_tokens(self, refusal: str) -> int | None:
        """The most tokens per row, if the server refused the request for asking for more."""
        limit = re.search(r"greater than max allowed: (\d+)", refusal)
        return int(limit[1]) if limit else None

    def body(self, model: str, tokens: Sequence[int], k: int) -> dict[str, Any]:
        """The request for one prompt. At least one token must be generated."""
        return {
            "model": model,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": k,
        }

    def rows(self, answer: Any, tokens: Sequence[int]) -> ServedRows:
        """The rows of an answer to the request for these tokens.

        An answer of another schema, or to another prompt, raises errors of many kinds. A log-prob
        that is null, or not finite as a float32, raises a GrowthError.
        """
        entries = answer["choices"][0]["prompt_logprobs"]
        # the prompt's own token is always among the entries
        own = [x if str(x) in entry else None for x, entry in zip(tokens[1:], entries[1:])]  # noqa: B905
        _check_prompt(entries, [tokens[0], *own], tokens)
        return [
            _row((values["logprob"], _id_of(token)) for token, values in entry.items())
            for entry in entries[1:]
        ]


class Sglang:
    """SGLang's own requests, with the attributes and methods of `Vllm`."""

    name, path = "SGLang", "/generate"
    more = "ask for fewer"

    def most_tokens(self, refusal: str) -> int | None:
        """None: it has no such limit."""
        return None

    def body(self, model: str, tokens: Sequence[int], k: int) -> dict[str, Any]:
        """The request for one prompt. No token is generated."""
        return {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": k,
        }

    def rows(self, answer: Any, tokens: Sequence[int]) -> ServedRows:
        """The rows of an answer to the request for these tokens."""
        facts = (answer[0] if isinstance(answer, list) else answer)["meta_info"]
        entries, own = facts["input_top_logprobs"], facts["input_token_logprobs"]
        _check_prompt(entries, [token for _, token, *_ in own], tokens)
        rows = [_row((logprob, token) for logprob, token, *_ in entry) for entry in entries[1:]]
        for place, row in enumerate(rows, 1):
            _check_own(row, own[place], place)
        return rows


def _id_of(text: str) -> int:
    """The id that a name in a JSON object stands for."""
    token = int(text)
    if str(token) != text:
        raise ValueError(f"{reprlib.repr(text)} is no token id")
    return token


Schema: TypeAlias = Vllm | Sglang
SCHEMAS: dict[str, Schema] = {"vllm": Vllm(), "sglang": Sglang()}

# ------------------------------------------------------------------- teacher


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
        known = server or card.get("owned_by")
        if str(known).lower() not in SCHEMAS:
            raise GrowthError(
                f"{self.name} calls itself {known!r}: give server, one of {sorted(SCHEMAS)}"
            )
        self._schema = SCHEMAS[str(known).lower()]
        self.facts = causal_facts(1.0, vocab_size, tokenizer)

    def _find_model(self, name: str | None) -> dict[str, Any]:
        """The server's own record of the teacher."""
        # a wrong URL is noticed soon, a server that is busy later
        connection = replace(self._connection, retries=min(1, self._connection.retries))
        (answer,) = run_apart(connection.ask, ["/v1/models"])
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
        rows = []
        for text, known in zip(texts, read, strict=True):
            ids, logprobs = next(answers) if len(known) > 1 else no_rows((0, self.k), torch.float32)
            rest = no_rows((len(text) - 1 - len(ids), self.k), torch.float32)
            rows.append((torch.cat([ids, rest[0]]), torch.cat([logprobs, rest[1]])))
        return rows

    async def _rows_of(self, tokens: Sequence[int]) -> Rows:
        """The rows (len(tokens) - 1, k) of one prompt."""
        if self._longest is not None and len(tokens) >= self._longest:
            raise GrowthError(
                f"{self.name}: an example has {len(tokens)} tokens, but {self.model} is served "
                f"with room for {self._longest}, one of them generated: shorten the sequences"
            )
        schema = self._schema
        try:
            body = schema.body(self.model, tokens, self.k)
            answer = await self._connection.ask(schema.path, body, (self.k + 1) * len(tokens))
        except GrowthError as error:
            limit = schema.most_tokens(str(error))
            if limit is None:
                raise
            more = schema.more.format(k=self.k)
            raise GrowthError(f"{error}: {more}, or give k = {limit}") from error
        try:
            rows = schema.rows(answer, tokens)
        except GrowthError as error:
            raise GrowthError(f"{self.name} gives {error}") from error
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            why = " ".join(str(error).split())[:MOST_TEXT]
            raise GrowthError(
                f"{self.name}{schema.path}: the answer lacks a prompt's log-probs in the schema of "
                f"{schema.name} ({why}): give server, one of {sorted(SCHEMAS)}"
            ) from error
        return self._checked(rows)

    def _checked(self, rows: ServedRows) -> Rows:
        """The k likeliest tokens of each row, likeliest first."""
        fewest = min(map(len, rows))
        if fewest < self.k:
            raise GrowthError(
                f"{self.name} gives {fewest} tokens per row, not k={self.k}: "
                f"{self._schema.more.format(k=self.k)}"
            )
        # the prompt's own token may stand beside the k
        kept = [sorted(row, reverse=True)[: self.k] for row in rows]
        logprobs = torch.tensor([[logprob for logprob, _ in row] for row in kept])
        ids = torch.tensor([[token for _, token in row] for row in kept], dtype=torch.int32)
        fault = fault_of(ids, logprobs, self.facts.vocab_size)
        if fault is not None:
            raise GrowthError(f"{self.name} gives {fault}")
        return ids, logprobs
