"""The two schemas in which servers give the log-probs of a prompt's tokens.

Both list one entry per token of the prompt. Entry i holds the likeliest tokens at the place of
token i, given the tokens before it. So the first entry is empty, and entry i + 1 is the prediction
of position i.

An answer also holds the prompt's own tokens, which show whether it belongs to the prompt:

- vLLM, ``/v1/completions`` with ``prompt_logprobs``: a map from token id to
  ``{"logprob", "rank", "decoded_token"}``. The prompt's own token is added if it is not one of the
  k.
- SGLang, ``/generate`` with ``return_logprob``: a list of ``[logprob, token id, text]``. Another
  list, ``input_token_logprobs``, has one such triple for each of the prompt's own tokens. Its
  log-probs show whether the rows are at their places.
"""

import math
import re
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from growkern.errors import GrowthError
from growkern.train.topk_teacher.facts import MOST_IDS, ROUNDING

# the largest float32: rows are stored as such
LARGEST = float(np.finfo(np.float32).max)
# (log-prob, token id) of the likeliest tokens of each position but the last
Rows = list[list[tuple[float, int]]]


def _row(entry: Iterable[tuple[Any, Any]]) -> list[tuple[float, int]]:
    """The log-probs and ids of one row. Numbers that only look like some are refused."""
    found = []
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
        found.append((float(logprob), token))
    return found


def _check_prompt(entries: Sequence[Any], own: Sequence[Any], tokens: Sequence[int]) -> None:
    """Compare the prompt of an answer, and its tokens where they are known, with the one sent."""
    for found in (len(entries), len(own)):
        if found != len(tokens):
            raise ValueError(f"{len(tokens)} tokens were sent, and {found} came back")
    if entries[0]:
        raise ValueError("the first token has a row, so the rows are shifted")
    places = [i for i, (x, y) in enumerate(zip(own, tokens, strict=True)) if x != y]
    if places:
        raise ValueError(f"its token {places[0]} is not {tokens[places[0]]}, which was sent")


def _check_own(row: list[tuple[float, int]], own: Any, place: int) -> None:
    """Compare a row with the log-prob that the answer gives for the prompt's own token there."""
    logprob, token, *_ = own
    # JSON has no number for the log-prob of the probability 0
    found = -math.inf if logprob is None else _row([(logprob, token)])[0][0]
    if found > ROUNDING:
        raise ValueError(f"its token {place} has the log-prob {found:g}, which is above 0")
    in_row = [p for p, other in row if other == token]
    # a token beside the row is no likelier than the last in it
    for expected in in_row or [p for p, _ in row]:
        rounding = ROUNDING * max(1.0, -expected)
        if found > expected + rounding or (in_row and found < expected - rounding):
            raise ValueError(
                f"its token {place} has the log-prob {found:g}, which its row lacks: the rows are "
                "shifted"
            )


class Vllm:
    """vLLM's extension of the completions of OpenAI.

    Attributes:
        name: of the server.
        path: of the requests.
        more: says how to let the server give {k} tokens.
    """

    name, path = "vLLM", "/v1/completions"
    more = "start vLLM with --max-logprobs {k}"

    def most_tokens(self, refusal: str) -> int | None:
        """The most tokens per row, if the server refused the request for asking for more."""
        found = re.search(r"greater than max allowed: (\d+)", refusal)
        return int(found[1]) if found else None

    def body(self, model: str, tokens: Sequence[int], k: int) -> dict[str, Any]:
        """The request for one prompt. At least one token must be generated."""
        return {
            "model": model,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": k,
        }

    def rows(self, answer: Any, tokens: Sequence[int]) -> Rows:
        """The rows of an answer to the request for these tokens.

        Raises:
            KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError: it has
                another schema, or belongs to another prompt.
            GrowthError: a log-prob is null, or not finite as a float32.
        """
        entries = answer["choices"][0]["prompt_logprobs"]
        # the prompt's own token is always among the entries
        own = [x if str(x) in entry else None for x, entry in zip(tokens[1:], entries[1:])]  # noqa: B905
        _check_prompt(entries, [tokens[0], *own], tokens)
        return [
            _row((found["logprob"], _id_of(token)) for token, found in entry.items())
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

    def rows(self, answer: Any, tokens: Sequence[int]) -> Rows:
        """The rows of an answer to the request for these tokens."""
        one = answer[0] if isinstance(answer, list) else answer
        entries = one["meta_info"]["input_top_logprobs"]
        own = one["meta_info"]["input_token_logprobs"]
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
