"""Servers that redirect, drip, answer too much or nonsense are refused in one line."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from growkern import GrowthError, ServedTeacher
from growkern.train.topk_teacher import http
from growkern.train.topk_teacher.http import Connection, run_apart


@contextlib.contextmanager
def answering(answer):
    """A server whose requests are handled by `answer(handler)`; gives its URL and its requests."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(dict(self.headers))
            self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with contextlib.suppress(OSError):
                answer(self)

        do_POST = do_GET

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()


def sends(body, status=200, headers=()):
    def answer(handler):
        handler.send_response(status)
        for name, value in headers:
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def refused(answer, message, timeout=5.0, retries=0):
    """Both kinds of request fail with this message, in one line."""
    with answering(answer) as (url, seen):
        connection = Connection(url, timeout, retries, "SECRET")
        for ask in (connection.ask, lambda path: connection.ask(path, {})):
            with pytest.raises(GrowthError, match=message) as error:
                run_apart(ask, ["/x"])
            text = str(error.value)
            assert "\n" not in text and "SECRET" not in text and url in text and len(text) < 1000
    return seen


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_the_key_does_not_follow_a_redirect(status, host):
    with answering(sends(b"{}")) as (thief, seen):
        place = thief.replace("127.0.0.1", host) + "/y"
        refused(sends(b"", status, [("Location", place)]), f"redirects to '{place}': give that URL")
        assert not seen


def drip_of(*parts):
    def answer(handler):
        for part in parts:
            handler.wfile.write(part)
        while True:
            handler.wfile.write(parts[-1])
            time.sleep(0.01)

    return answer


@pytest.mark.parametrize(
    "parts",
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b" "),
        (b"HTTP/1.1 500 No\r\nContent-Length: 100000\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (b"HTTP/1.1 200 OK\r\nX: ", b"y"),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n",),
    ],
    ids=["body", "error", "chunks", "header", "hints"],
)
def test_a_server_that_drips_is_given_up(parts, monkeypatch):
    monkeypatch.setattr(http, "FIRST_WAIT", 0.0)
    seen = refused(drip_of(*parts), r"no answer within 0\.3 s: raise timeout \(2 a", 0.3, retries=1)
    assert len(seen) == 4


@pytest.mark.parametrize("status", [200, 404])
@pytest.mark.parametrize("headers", [[], [("Content-Length", "100000000")]])
def test_an_answer_has_a_size(status, headers, monkeypatch):
    monkeypatch.setattr(http, "MOST_BYTES", 1000)
    body = b"[" + b" " * 5_000_000
    refused(sends(body, status, headers), "has more than 1000 bytes")
    refused(sends(b"[" + b" " * 999, headers=[("Content-Length", "1000")]), "is not JSON")


@pytest.mark.parametrize(
    "body, message",
    [
        (b"[" * 200_000, "not JSON"),
        (b'{"a": 1, "a": 2}', "not JSON .'a' is given twice"),
        (b"\xff\xfe", "not JSON"),
        (b"1" * 5000, "not JSON"),
        (b"", "not JSON"),
    ],
)
def test_an_answer_that_is_not_json_is_one_line(body, message):
    refused(sends(body), message)


@pytest.mark.parametrize("kept", [0, 1, 9, 14, 21, 23])
def test_an_answer_that_ends_too_early_is_asked_for_again(kept, monkeypatch):
    """A proxy may pass on the beginning with status 200."""
    monkeypatch.setattr(http, "FIRST_WAIT", 0.0)
    whole = b'{"a": [1, {"b": "x y"}]}'
    answers = [whole[:kept], whole[:kept], whole]
    with answering(lambda handler: sends(answers.pop(0))(handler)) as (url, _):
        found = run_apart(Connection(url, 5.0, 2, None).ask, ["/x"])
    assert found == [{"a": [1, {"b": "x y"}]}] and not answers


def test_a_compressed_answer_is_not_unpacked():
    import gzip

    packed = gzip.compress(b" " * 10_000_000)
    refused(sends(packed, headers=[("Content-Encoding", "gzip")]), "is not JSON")


@pytest.mark.parametrize(
    "proxy", ["socks5://127.0.0.1:9", "foo://127.0.0.1:9", "http://[", "http://127.0.0.1:9"]
)
def test_a_proxy_that_cannot_be_used_is_one_line(proxy, monkeypatch):
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(GrowthError) as error:
        run_apart(Connection("http://127.0.0.2:9", 5.0, 0).ask, ["/x"])
    assert "\n" not in str(error.value) and "http://127.0.0.2:9" in str(error.value)


def test_a_thread_with_an_event_loop_can_ask():
    async def cell():
        return run_apart(Connection(url, 5.0, 0).ask, ["/x"])

    with answering(sends(b'{"a": 1}')) as (url, _):
        assert asyncio.run(cell()) == [{"a": 1}]


def test_the_time_limit_holds_while_a_name_is_looked_up(monkeypatch):
    ended, end = [], threading.Event()

    def look_up(*_, **__):
        end.wait(0.9)
        ended.append(True)
        raise OSError("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(GrowthError, match=r"no answer within 0\.1 s"):
        ServedTeacher("http://somewhere:9", 3, timeout=0.1, retries=0)
    assert not ended
    end.set()
    wait_for(lambda: ended)


def silent(closed, refusal_after=0):
    """A server that gives no answer to prompts, but refuses those that begin with 0.

    Args:
        closed: gets b"" for each request that the client gives up, and None at the end of each.
        refusal_after: requests that must wait before one is refused.
    """
    asked = []

    def answer(handler):
        if handler.path == "/v1/models":
            return sends(b'{"data": [{"id": "m", "owned_by": "vllm"}]}')(handler)
        if json.loads(handler.body)["prompt"][0] == 0:
            wait_for(lambda: len(asked) == refusal_after)
            return sends(b'{"error": "bad"}', 400)(handler)
        asked.append(handler)
        handler.connection.settimeout(5)
        with contextlib.suppress(TimeoutError):
            closed.append(handler.connection.recv(1))
        closed.append(None)

    return answer


def wait_for(condition):
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)


@pytest.mark.parametrize("at_once, beside", [(1, 0), (8, 2)])
def test_a_refused_request_cancels_those_beside_it(at_once, beside):
    closed = []
    with answering(silent(closed, beside)) as (url, seen):
        teacher = ServedTeacher(url, 3, concurrency=at_once)
        with pytest.raises(GrowthError, match="400 Bad Request: bad"):
            teacher.batch({"input_ids": torch.tensor([[0, 1], [5, 6], [7, 8]])})
        wait_for(lambda: closed.count(None) == beside)
    # the list of models is the first
    assert len(seen) == 2 + beside and closed.count(b"") == closed.count(None) == beside


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_requests(number):
    class Stop(BaseException):
        pass

    def handle(*_):
        raise Stop

    closed, threads = [], []

    def answer(handler):
        if handler.path != "/v1/models":
            threads.extend(threading.enumerate())
            os.kill(os.getpid(), number)
        silent(closed)(handler)

    before = signal.signal(number, handle)
    try:
        with answering(answer) as (url, _):
            teacher = ServedTeacher(url, 3, concurrency=1)
            known = threading.enumerate()
            with pytest.raises(Stop):
                teacher.batch({"input_ids": torch.tensor([[5, 6], [7, 8]])})
            wait_for(lambda: None in closed)
    finally:
        signal.signal(number, before)
    assert closed == [b"", None]
    assert all(thread.daemon for thread in threads if thread not in known)


@pytest.mark.parametrize("key", ["SECRET\n", "SEC RET", "SECRÉT", "SECRET\r\nX: y"])
def test_a_key_that_no_header_holds_is_refused_and_not_shown(key, monkeypatch):
    with pytest.raises(GrowthError, match=r"api_key .* give the key alone") as error:
        ServedTeacher("http://127.0.0.1:9", 3, api_key=key)
    assert "SEC" not in str(error.value)
    monkeypatch.setenv("GROWKERN_TEACHER_API_KEY", key)
    with pytest.raises(GrowthError, match="or GROWKERN_TEACHER_API_KEY"):
        ServedTeacher("http://127.0.0.1:9", 3)


@pytest.mark.parametrize(
    "url",
    [
        "http://user:SECRET@127.0.0.1:9",
        "https://SECRET@127.0.0.1:9/v1",
        "user:SECRET@127.0.0.1:9",
        "http://a b:SECRET@127.0.0.1:9",
        "http://127.0.0.1:9?key=SECRET",
        "http://127.0.0.1:9/v1#SECRET",
    ],
)
def test_a_secret_in_the_url_is_refused_and_not_shown(url):
    for check in (http.check_url, lambda url: ServedTeacher(url, 3, retries=0)):
        with pytest.raises(GrowthError, match=r"variable GROWKERN_TEACHER_API_KEY$") as error:
            check(url)
        assert "SECRET" not in str(error.value) and "\n" not in str(error.value)


def test_a_server_with_a_password_but_no_scheme_is_taken_for_no_directory():
    with pytest.raises(GrowthError, match="GROWKERN_TEACHER_API_KEY"):
        http.is_server("user:SECRET@host:8000")


CARD = '{"data": [{"id": "m", "owned_by": "vllm", "max_model_len": %s}]}'
LISTS = dict.fromkeys(["[]", "3", '{"data": 3}', '{"data": [[1]]}', '{"data": [3]}'], "lists no")
LISTS |= {CARD % length: "which is no number" for length in ('"4096"', "true", "1e3", "[1]")}


@pytest.mark.parametrize("body", LISTS)
def test_a_list_of_models_that_is_none_is_refused(body):
    refusal = pytest.raises(GrowthError, match=LISTS[body])
    with answering(sends(body.encode())) as (url, _), refusal:
        ServedTeacher(url, 3)
