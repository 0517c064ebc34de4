"""A small server that speaks OpenAI's protocol over real sockets, and answers as a test has written."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOLD = object()
"""In a script: wait until ``release`` is set."""
BREAK = object()
"""In a script: close the connection in the middle."""


class Server(ThreadingHTTPServer):
    """``scripts``: for each request to come what the answer is made of: texts, ("reasoning", text), ("tool", name,
    arguments), ("finish", reason), events as they are, HOLD, BREAK, or an integer, a status to refuse with, and why.
    As servers do, it refuses by itself calls without a JSON object and, words being its tokens, what is longer than its
    context."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.scripts: list[list[Any]] = []
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.release = threading.Event()
        self.gone = threading.Event()  # a client has left in the middle
        self.model: dict[str, Any] = {"id": "scripted", "max_model_len": 4096}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Nothing: stderr is the test's."""

    def do_GET(self) -> None:
        self._whole(200, {"data": [self.server.model]} if self.path == "/v1/models" else {"error": "no such page"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        self.server.headers.append(dict(self.headers))
        if wrong := _wrong(body, self.server.model["max_model_len"]):
            self._whole(400, {"error": {"message": wrong}})
            return
        script = self.server.scripts.pop(0)
        if isinstance(script[0], int):
            self._whole(script[0], {"error": {"message": script[1] if script[1:] else "it is too much"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            self._play(script, body)
        except OSError:
            self.server.gone.set()
        self.close_connection = True

    def _play(self, script: list[Any], body: dict[str, Any]) -> None:
        tokens, calls, reason = 0, 0, "stop"
        for item in script:
            if item is HOLD:
                while not self.server.release.wait(0.02):
                    self.wfile.write(b": still there\n\n")
                continue
            if item is BREAK:
                self.connection.close()
                return
            if isinstance(item, dict):
                self._event(item)
                continue
            if item[0] == "finish":
                reason = item[1]
                continue
            tokens += 1
            if isinstance(item, str):
                self._delta({"content": item})
            elif item[0] == "reasoning":
                self._delta({"reasoning_content": item[1]})
            else:
                reason, calls = "tool_calls", calls + 1
                half = len(item[2]) // 2  # arguments come in pieces
                place = {"index": calls - 1}
                function = {"name": item[1], "arguments": ""}
                self._delta({"tool_calls": [place | {"id": f"c{calls}", "function": function}]})
                for part in (item[2][:half], item[2][half:]):
                    self._delta({"tool_calls": [place | {"function": {"arguments": part}}]})
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        usage = {"prompt_tokens": _words(body), "completion_tokens": tokens} | {
            "prompt_tokens_details": {"cached_tokens": 2}
        }
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _delta(self, delta: dict[str, Any]) -> None:
        self._event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def _whole(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _words(body: dict[str, Any]) -> int:
    return sum(len(str(message["content"]).split()) for message in body["messages"])


def _wrong(body: dict[str, Any], limit: int) -> str:
    """What is wrong with a request; empty if nothing."""
    for message in body["messages"]:
        for call in message.get("tool_calls", ()):
            try:
                json.loads(call["function"]["arguments"])
            except ValueError:
                return f"The arguments of a call of {call['function']['name']} are no JSON."
    wanted = _words(body) + (body.get("max_tokens") or 1)
    return f"{wanted} tokens are wanted, and the context holds {limit}." if wanted > limit else ""
