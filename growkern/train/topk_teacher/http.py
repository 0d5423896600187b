"""Exchanges JSON with a server: limits of time and size, repeated attempts, errors in one line.

Coroutines run in a thread of their own, for callers that may be interrupted at any moment. The
caller has a thread to itself, because that of a notebook has an event loop already. It is a daemon,
so that nothing waits for it at exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import re
import ssl
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from growkern.errors import GrowthError
from growkern.files import parse_json

X = TypeVar("X")
Y = TypeVar("Y")
# seconds between two looks for a signal, where a signal does not end the waiting itself
LOOK = 0.1
# the server is busy, restarts, or a proxy before it gave up waiting
TEMPORARY = (408, 425, 429, 500, 502, 503, 504)
# seconds before the second attempt; each further wait is twice as long
FIRST_WAIT = 0.5
LONGEST_WAIT = 60.0
# characters of a server's own message that an error repeats
MOST_TEXT = 300
# bytes of an answer that holds no rows: a list of models, an error
MOST_BYTES = 16 << 20
# the same for each token of each row: an id, a log-prob, a rank and a text
MOST_TOKEN_BYTES = 1024
SCHEMES = ("http://", "https://")
# a server without them: a host and a port
HOST = re.compile(r"(\S*@)?[\w.-]+:\d+(/.*)?")
KEY_VARIABLE = "GROWKERN_TEACHER_API_KEY"


def is_server(name: str) -> bool:
    """Whether a name, which may be that of a directory, means a server. It needs its scheme."""
    if HOST.fullmatch(name) and not os.path.exists(name):
        check_url(name)
    return name.startswith(SCHEMES)


def check_url(url: str) -> None:
    """Refuse a URL that no attempt to connect would accept.

    It has no scheme, or white space, a password, a query or a fragment.
    """
    # neither may be shown, because either may hold a secret
    if "@" in url:
        raise GrowthError(
            "the URL of the server holds a user or a password, with an '@': give the URL without, "
            f"such as http://host:8000, and the server's key in the variable {KEY_VARIABLE}"
        )
    address = re.split("[?#]", url)[0]
    if address != url:
        raise GrowthError(
            f"the URL of the server has a query or a fragment: give {address!r} alone, and a key "
            f"in the variable {KEY_VARIABLE}"
        )
    if not url.startswith(SCHEMES):
        rest = url.rpartition("://")[2].lstrip("/") or "host:8000"
        raise GrowthError(f"{url!r} is not the URL of a server: give http://{rest}")
    if url.split() != [url]:
        raise GrowthError(f"{url!r} holds white space: give a URL such as http://host:8000")


@dataclass(frozen=True)
class Connection:
    """A server, without a slash at the end of its URL, and how patient to be with it.

    The other fields are arguments of `growkern.ServedTeacher`.
    """

    url: str
    timeout: float
    retries: int
    api_key: str | None = field(default=None, repr=False)

    async def ask(self, path: str, body: dict[str, Any] | None = None, most_tokens: int = 0) -> Any:
        """The answer to a GET request, or to a POST request with a JSON body, from JSON.

        All its rows together may have `most_tokens`. A server that cannot be reached, refuses the
        request, redirects it, or answers too late, too much or without JSON is refused in the end.
        """
        for attempt in itertools.count():
            try:
                return await self._ask_once(path, body, most_tokens)
            except _PassingError as error:
                if attempt == self.retries:
                    times = f" ({attempt + 1} attempts)" if attempt else ""
                    raise GrowthError(f"{self.url}{path}: {error}{times}") from error
                await asyncio.sleep(min(max(error.wait, FIRST_WAIT * 2**attempt), LONGEST_WAIT))

    async def _ask_once(self, path: str, body: dict[str, Any] | None, most_tokens: int) -> Any:
        httpx, most_bytes = _client(), MOST_BYTES + MOST_TOKEN_BYTES * most_tokens
        try:
            client = httpx.AsyncClient(verify=_certificates(), timeout=None)
            answer, content = await asyncio.wait_for(
                self._exchange(client, path, body, most_bytes), self.timeout
            )
        except asyncio.TimeoutError as error:
            raise _PassingError(f"no answer within {self.timeout:g} s: raise timeout") from error
        except ImportError as error:
            # HTTP_PROXY or ALL_PROXY names a SOCKS proxy, for which a package is missing
            raise GrowthError(f"{self.url}: {error}") from error
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, ValueError) as error:
            raise GrowthError(
                f"{self.url}: {error}: give a URL such as http://host:8000"
            ) from error
        except (httpx.RemoteProtocolError, httpx.ReadError) as error:
            # a server that ends while it answers, or a proxy before it
            why = " ".join(str(error).split())
            raise _PassingError(f"the answer was cut short ({why})") from error
        except (httpx.HTTPError, OSError) as error:
            raise _PassingError(f"{error}: is the server running?") from error
        if len(content) > most_bytes:
            raise GrowthError(
                f"{self.url}{path}: the answer has more than {most_bytes} bytes: is this a server "
                "of vLLM?"
            )
        if answer.status_code != 200:
            raise self._of_status(path, answer, content)
        try:
            return parse_json(content)
        except ValueError as error:
            # a proxy that loses its server passes on what it has
            why = f"the answer is not JSON ({error}): {content[:80]!r}"
            raise _PassingError(why) from error

    async def _exchange(
        self, client: Any, path: str, body: dict[str, Any] | None, most_bytes: int
    ) -> tuple[Any, bytes]:
        """The response and its content, up to its end or a little beyond `most_bytes`."""
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        method = "GET" if body is None else "POST"
        # redirects are not followed: the key belongs to this server alone
        async with (
            client,
            client.stream(method, self.url + path, json=body, headers=headers) as answer,
        ):
            content = bytearray()
            async for part in answer.aiter_raw():
                content += part
                if len(content) > most_bytes:
                    break
        return answer, bytes(content)

    def _of_status(self, path: str, answer: Any, content: bytes) -> Exception:
        status, line = answer.status_code, f"{answer.status_code} {answer.reason_phrase}"
        message = f"{line}: {_message_of(content)}".rstrip(": ")
        if status in TEMPORARY:
            wait = answer.headers.get("Retry-After", "")
            return _PassingError(message, float(wait) if wait.isdecimal() else 0.0)
        if 300 <= status < 400:
            place = answer.headers.get("Location", "")[:MOST_TEXT]
            message = f"{line}: it redirects to {place!r}: give that URL"
        if status in (401, 403):
            message += ": give the server's api_key"
        return GrowthError(f"{self.url}{path}: {message}")


def _client() -> Any:
    """The HTTP library that huggingface_hub brings: httpx, or from its version 2 on httpx2.

    Both have the same interface. The client of `huggingface_hub.get_session` is for the Hub alone:
    with HF_HUB_OFFLINE=1 it refuses every server.
    """
    try:
        import httpx2
    except ImportError:
        import httpx

        return httpx
    return httpx2


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Whom HTTPS trusts. Reading the certificates takes longer than a request."""
    return _client().create_ssl_context()


class _PassingError(Exception):
    """A failure after which another attempt may succeed; `wait` is in seconds."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


def _message_of(content: bytes) -> str:
    """What the server itself says of an error, in one line."""
    text = content.decode(errors="replace")
    try:
        table = parse_json(content)
        inner = table.get("error", table)
        text = str(inner.get("message", inner)) if isinstance(inner, dict) else str(inner)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:MOST_TEXT]


# ------------------------------------------------------------------- threads


def run_apart(call: Callable[[X], Awaitable[Y]], items: Sequence[X], at_once: int = 1) -> list[Y]:
    """Call a coroutine function for each item, some at a time: the results, in their order.

    An exception in this thread, as a signal handler raises, or in any of the calls cancels the
    others. Nothing waits for their ends.
    """
    loop, done = asyncio.new_event_loop(), threading.Event()
    task = loop.create_task(_gather(call, items, at_once))

    def run() -> None:
        with contextlib.closing(loop):
            loop.run_until_complete(asyncio.wait([task]))
            done.set()
            loop.run_until_complete(loop.shutdown_asyncgens())

    try:
        threading.Thread(target=run, daemon=True).start()
        while not done.wait(LOOK):
            pass
    except BaseException:
        # the loop may be closed by now
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(task.cancel)
        raise
    return task.result()


async def _gather(call: Callable[[X], Awaitable[Y]], items: Sequence[X], at_once: int) -> list[Y]:
    turns = asyncio.Semaphore(at_once)

    async def in_turn(item: X) -> Y:
        async with turns:
            return await call(item)

    tasks = [asyncio.create_task(in_turn(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        # they close their connections
        await asyncio.gather(*tasks, return_exceptions=True)
