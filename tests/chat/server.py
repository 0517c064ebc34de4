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
    arguments), HOLD, BREAK, or an integer, a status to refuse with."""

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
        script = self.server.scripts.pop(0)
        if isinstance(script[0], int):
            self._whole(script[0], {"error": {"message": "it is too much"}})
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
        tokens, reason = 0, "stop"
        for item in script:
            if item is HOLD:
                while not self.server.release.wait(0.02):
                    self.wfile.write(b": still there\n\n")
                continue
            if item is BREAK:
                self.connection.close()
                return
            tokens += 1
            if isinstance(item, str):
                self._delta({"content": item})
            elif item[0] == "reasoning":
                self._delta({"reasoning_content": item[1]})
            else:
                reason = "tool_calls"
                half = len(item[2]) // 2  # arguments come in pieces
                self._delta({"tool_calls": [{"index": 0, "id": "c1", "function": {"name": item[1], "arguments": ""}}]})
                for part in (item[2][:half], item[2][half:]):
                    self._delta({"tool_calls": [{"index": 0, "function": {"arguments": part}}]})
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        words = sum(len(str(message["content"]).split()) for message in body["messages"])
        usage = {"prompt_tokens": words, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 2}}
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
