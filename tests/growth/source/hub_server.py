"""A server on this machine that speaks the Hub's API as `huggingface_hub` uses it."""

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

API = re.compile(r"/api/models/([\w.-]+/[\w.-]+)(?:/(revision|tree)/([\w.%-]+))?$")
FILE = re.compile(r"/([\w.-]+/[\w.-]+)/resolve/([\w.%-]+)/(.+)$")


def commit_of(directory):
    """A made-up commit hash that changes with the files."""
    digest = hashlib.sha1()
    for name, content in sorted(files_of(directory).items()):
        digest.update(name.encode() + content)
    return digest.hexdigest()


def files_of(directory):
    found = [file for file in directory.rglob("*") if file.is_file()]
    return {file.relative_to(directory).as_posix(): file.read_bytes() for file in found}


class Refused(Exception):
    """An answer that is an error, with its code in the header that the client reads."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, *, with_body):
        path = self.path.split("?")[0]
        try:
            status, headers, body = self.found(path)
        except Refused as refused:
            status, code = refused.args
            headers, body = {"X-Error-Code": code, "X-Error-Message": code}, b"{}"
        self.server.asked.append((self.command, path, self.headers.get("Range")))
        if with_body:
            self.server.sent += len(body)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        # a kept connection would outlive the server
        self.send_header("Connection", "close")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def snapshot(self, name, revision):
        """The commit and the files of a model."""
        repository = self.server.models.get(name)
        if repository is None:
            raise Refused(401, "RepoNotFound")
        if repository == "gated":
            raise Refused(403, "GatedRepo")
        by_commit = {commit_of(directory): directory for directory in repository.values()}
        directory = repository.get(revision) or by_commit.get(revision)
        if directory is None:
            raise Refused(404, "RevisionNotFound")
        return commit_of(directory), files_of(directory)

    def found(self, path):
        if match := API.match(path):
            name, kind, revision = match.groups()
            commit, files = self.snapshot(name, revision or "main")
            if kind == "tree":
                value = [entry(name, content) for name, content in files.items()]
            else:
                siblings = [{"rfilename": name} for name in files]
                value = {"id": name, "sha": commit, "siblings": siblings, "private": False}
            return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()
        if match := FILE.match(path):
            name, revision, file = match.groups()
            commit, files = self.snapshot(name, revision)
            if file not in files:
                raise Refused(404, "EntryNotFound")
            headers = {"X-Repo-Commit": commit, "ETag": f'"{oid(files[file])}"'}
            headers["Accept-Ranges"] = "bytes"
            part = re.match(r"bytes=(\d+)-(\d*)$", self.headers.get("Range") or "")
            if not part:
                return 200, headers, files[file]
            size = len(files[file])
            start, stop = int(part[1]), min(int(part[2] or size - 1), size - 1)
            headers["Content-Range"] = f"bytes {start}-{stop}/{size}"
            return 206, headers, files[file][start : stop + 1]
        raise Refused(404, "EntryNotFound")


def oid(content):
    return hashlib.sha256(content).hexdigest()


def entry(name, content):
    found = {"type": "file", "path": name, "size": len(content), "oid": oid(content)[:40]}
    if name.endswith(".safetensors"):
        found["lfs"] = {"oid": oid(content), "size": len(content), "pointerSize": 130}
    return found


@contextmanager
def serving(models):
    """A server for models by id: each has directories by revision, or is "gated".

    Its attribute `asked` lists the requests (method, path, range), `sent` counts bytes of bodies.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.models, server.asked, server.sent = models, [], 0
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
