"""Exchanges JSON with a server: time limits, repeated attempts, errors in one line."""

from __future__ import annotations

import json
import os
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPException, InvalidURL
from typing import Any

from growkern.errors import GrowthError

# the server is busy, restarts, or a proxy before it gave up waiting
TEMPORARY = (408, 425, 429, 500, 502, 503, 504)
# seconds before the second attempt; each further wait is twice as long
FIRST_WAIT = 0.5
LONGEST_WAIT = 60.0
# characters of a server's own message that an error repeats
MOST_TEXT = 300
SCHEMES = ("http://", "https://")
# a server without them: a host and a port
HOST = re.compile(r"[\w.-]+:\d+(/.*)?")


def is_server(name: str) -> bool:
    """Whether a name, which may be that of a directory, means a server.

    Raises:
        GrowthError: it is that of a server, without the scheme.
    """
    if HOST.fullmatch(name) and not os.path.exists(name):
        check_url(name)
    return name.startswith(SCHEMES)


def check_url(url: str) -> None:
    """Refuse a URL without scheme, which no attempt to connect would accept.

    Raises:
        GrowthError: it has none.
    """
    if not url.startswith(SCHEMES):
        rest = url.rpartition("://")[2].lstrip("/") or "host:8000"
        raise GrowthError(f"{url!r} is not the URL of a server: give http://{rest}")


@dataclass(frozen=True)
class Connection:
    """A server and how patient to be with it.

    Attributes:
        url: without a slash at its end.
        timeout: seconds that one answer may take.
        retries: further attempts after a failure that may pass.
        api_key: sent as a bearer token, if there is one.
    """

    url: str
    timeout: float
    retries: int
    api_key: str | None = field(default=None, repr=False)

    def get(self, path: str) -> Any:
        """The answer to a GET request, from JSON.

        Raises:
            GrowthError: as `post`.
        """
        return self._ask(path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer to a POST request with a JSON body, from JSON.

        Raises:
            GrowthError: the server cannot be reached, refuses the request, answers too late or
                without JSON, and all attempts are used up.
        """
        return self._ask(path, json.dumps(body).encode())

    def _ask(self, path: str, body: bytes | None) -> Any:
        for attempt in range(self.retries + 1):
            try:
                return self._ask_once(path, body)
            except _PassingError as error:
                if attempt == self.retries:
                    times = f" ({attempt + 1} attempts)" if attempt else ""
                    raise GrowthError(f"{self.url}{path}: {error}{times}") from error
                time.sleep(min(max(error.wait, FIRST_WAIT * 2**attempt), LONGEST_WAIT))
        raise AssertionError("the last attempt returns or raises")

    def _ask_once(self, path: str, body: bytes | None) -> Any:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(self.url + path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise self._of_status(path, error) from error
        except TimeoutError as error:
            raise _PassingError(f"no answer within {self.timeout:g} s: raise timeout") from error
        except (InvalidURL, ValueError) as error:
            raise GrowthError(
                f"{self.url}: {error}: give a URL such as http://host:8000"
            ) from error
        except HTTPException as error:
            # a server that ends while it answers, or a proxy before it
            why = " ".join(str(error).split())
            raise _PassingError(f"the answer was cut short ({why})") from error
        except (OSError, urllib.error.URLError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise _PassingError(
                    f"no answer within {self.timeout:g} s: raise timeout"
                ) from error
            raise _PassingError(f"{reason}: is the server running?") from error
        try:
            return json.loads(text)
        except ValueError as error:
            raise GrowthError(f"{self.url}{path}: the answer is not JSON: {text[:80]!r}") from error

    def _of_status(self, path: str, error: urllib.error.HTTPError) -> Exception:
        message = f"{error.code} {error.reason}: {_message_of(error)}".rstrip(": ")
        if error.code in TEMPORARY:
            wait = error.headers.get("Retry-After", "")
            return _PassingError(message, float(wait) if wait.isdecimal() else 0.0)
        if error.code in (401, 403):
            message += ": give the server's api_key"
        return GrowthError(f"{self.url}{path}: {message}")


class _PassingError(Exception):
    """A failure after which another attempt may succeed; `wait` is in seconds."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


def _message_of(error: urllib.error.HTTPError) -> str:
    """What the server itself says of an error, in one line."""
    try:
        text = error.read().decode(errors="replace")
    except (HTTPException, OSError):
        return ""
    try:
        table = json.loads(text)
        inner = table.get("error", table)
        text = str(inner.get("message", inner)) if isinstance(inner, dict) else str(inner)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:MOST_TEXT]
