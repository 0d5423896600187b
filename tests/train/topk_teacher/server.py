"""A server that speaks the schema of vLLM, and runs a model of the tests."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch


class TeacherServer:
    """The state of the server.

    Args:
        model: answers in float64.

    Attributes:
        faults: (status, headers, body) of the answers to the next POST requests; then it works.
        requests: (path, headers, body) of each request so far.
        most: tokens per row that it gives.
        edit: changes an answer before it is sent.
    """

    def __init__(self, model):
        self.model, self.longest = model, 4096
        self.faults, self.requests, self.most = [], [], 10**6
        self.names = ["teacher"]
        self.edit = lambda answer: answer

    def models(self):
        cards = [
            {"id": name, "owned_by": "vllm", "max_model_len": self.longest} for name in self.names
        ]
        return {"object": "list", "data": cards}

    @torch.no_grad()
    def top(self, tokens, k):
        logits = self.model(input_ids=torch.tensor([tokens])).logits[0, :-1].double()
        return logits.log_softmax(-1), logits.log_softmax(-1).topk(min(k, self.most))

    def vllm(self, body):
        tokens = body["prompt"]
        assert body["max_tokens"] == 1 and body["model"] in self.names
        log_p, best = self.top(tokens, body["prompt_logprobs"])
        entries = [None]
        for place, token in enumerate(tokens[1:]):
            entry = {str(token): {"logprob": float(log_p[place, token]), "rank": 999}}
            for rank, (value, found) in enumerate(zip(best.values[place], best.indices[place])):  # noqa: B905
                entry[str(int(found))] = {
                    "logprob": float(value), "rank": rank + 1, "decoded_token": "?"
                }  # fmt: skip
            entry[str(token)]["own"] = True
            entries.append(entry)
        return {"object": "text_completion", "choices": [{"text": "?", "prompt_logprobs": entries}]}


@contextlib.contextmanager
def serving(model):
    """Run such a server in a thread.

    Returns:
        Its state and its URL.
    """
    state = TeacherServer(model)

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status, headers, body):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            state.requests.append((self.path, dict(self.headers), None))
            self.answer(200, {}, json.dumps(state.models()).encode())

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.requests.append((self.path, dict(self.headers), body))
            if state.faults:
                return self.answer(*state.faults.pop(0))
            self.answer(200, {}, json.dumps(state.edit(state.vllm(body))).encode())

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield state, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
