"""The two schemas in which servers give the log-probs of a prompt's tokens.

Both list one entry per token of the prompt. Entry i holds the likeliest tokens at the place of
token i, given the tokens before it. So the first entry is empty, and entry i + 1 is the prediction
of position i.

- vLLM, ``/v1/completions`` with ``prompt_logprobs``: a map from token id to
  ``{"logprob", "rank", "decoded_token"}``. The prompt's own token is added if it is not one of the
  k.
- SGLang, ``/generate`` with ``return_logprob``: a list of ``[logprob, token id, text]``.
"""

import re
from collections.abc import Sequence
from typing import Any, Protocol

# (log-prob, token id) of the likeliest tokens of each position but the last
Rows = list[list[tuple[float, int]]]


class Schema(Protocol):
    """How a server is asked.

    Attributes:
        name: of the server.
        path: of the requests.
        more: says how to let the server give {k} tokens.
    """

    name: str
    path: str
    more: str

    def most_tokens(self, refusal: str) -> int | None:
        """The most tokens per row, if the server refused the request for asking for more."""
        ...

    def body(self, model: str, tokens: Sequence[int], k: int) -> dict[str, Any]:
        """The request for one prompt."""
        ...

    def rows(self, answer: Any) -> Rows:
        """The rows of an answer.

        Raises:
            KeyError, IndexError, TypeError, ValueError, AttributeError: it has another schema.
        """
        ...


class Vllm:
    """vLLM's extension of the completions of OpenAI."""

    name, path = "vLLM", "/v1/completions"
    more = "start vLLM with --max-logprobs {k}"

    def most_tokens(self, refusal: str) -> int | None:
        """The limit that the message of a refusal names."""
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

    def rows(self, answer: Any) -> Rows:
        """The rows of an answer."""
        entries = answer["choices"][0]["prompt_logprobs"]
        return [
            [(float(found["logprob"]), int(token)) for token, found in entry.items()]
            for entry in entries[1:]
        ]


class Sglang:
    """SGLang's own requests."""

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

    def rows(self, answer: Any) -> Rows:
        """The rows of an answer."""
        one = answer[0] if isinstance(answer, list) else answer
        entries = one["meta_info"]["input_top_logprobs"]
        return [
            [(float(logprob), int(token)) for logprob, token, *_ in entry] for entry in entries[1:]
        ]


SCHEMAS: dict[str, Schema] = {"vllm": Vllm(), "sglang": Sglang()}
