"""Connections that bring no request, or bring one in an odd way, over raw sockets."""

from __future__ import annotations

import gzip
import hashlib
import json
import select
import socket
from contextlib import ExitStack

import h11
import httpx
import pytest

from engine.serve import connection, sse
from engine.serve.keys import Keys

VERSION = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
BODY = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


def connect(running) -> socket.socket:
    address = httpx.URL(running.url)
    return socket.create_connection((address.host, address.port), timeout=20)


def ended(client: socket.socket) -> bytes:
    """What comes until the server closes."""
    found = b""
    try:
        while data := client.recv(1 << 16):
            found += data
    except ConnectionResetError:
        pass
    return found


def asked(client: socket.socket, data: bytes) -> bytes:
    """The head of the answer, of a connection that stays open; its body comes with it or soon after."""
    client.sendall(data)
    found = b""
    while b"\r\n\r\n" not in found:
        found += client.recv(1 << 16)
    head, _, body = found.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += client.recv(1 << 16)
    return head


@pytest.mark.parametrize("head", [b"", VERSION[:20], VERSION[:-2]])
def test_a_head_that_does_not_come_ends_its_connection(running, monkeypatch, head):
    """The first of a connection, and a later one; a connection that idles between two stays for longer."""
    monkeypatch.setattr(connection, "_HEAD_S", 0.2)
    with connect(running) as idle, connect(running) as first, connect(running) as later:
        assert asked(idle, VERSION).startswith(b"HTTP/1.1 200")
        first.sendall(head)
        assert asked(later, VERSION).startswith(b"HTTP/1.1 200")
        if head:
            later.sendall(head)
            assert ended(later) == b""
        assert ended(first) == b""
        assert asked(idle, VERSION).startswith(b"HTTP/1.1 200")


def test_connections_idle_for_longer_than_proxies_keep_them(running):
    """nginx and others send the next request on one within 60 s, and have a 502 where it is closed meanwhile."""
    assert running.server.config.timeout_keep_alive > 60


def test_what_is_slow_after_its_head_stays(running, monkeypatch):
    monkeypatch.setattr(connection, "_HEAD_S", 0.1)
    with connect(running) as slow, connect(running) as silent:
        slow.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(BODY))
        assert ended(silent) == b""
        assert asked(slow, BODY).startswith(b"HTTP/1.1 200")


def test_there_are_no_more_connections_than_files_for_them(running, monkeypatch):
    """Those beyond are closed at once, and there is room again when others go."""
    running.wait_until(lambda: not running.server.server_state.connections)
    monkeypatch.setattr(connection, "most_connections", lambda: 3)
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(running)) for _ in range(3)]
        running.wait_until(lambda: len(running.server.server_state.connections) == 3)
        with connect(running) as beyond:
            assert ended(beyond) == b""
        clients[0].close()
        running.wait_until(lambda: len(running.server.server_state.connections) == 2)
        with connect(running) as beyond:
            assert asked(beyond, VERSION).startswith(b"HTTP/1.1 200")


def test_connections_leave_files_to_others(monkeypatch):
    for limit, most in ((256, 192), (1024, 960), (64, 32), (-1, 1 << 31)):
        monkeypatch.setattr(connection.resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert connection.most_connections() == most


def test_bodies_of_many_small_chunks_are_refused(running):
    """Where they are many; a small body may come byte by byte."""
    with connect(running) as client:
        small = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
        assert asked(client, CHUNKED + small).startswith(b"HTTP/1.1 200")
        assert asked(client, CHUNKED + b"200\r\n%s\r\n" % (b" " * 512) * 8192 + b"0\r\n\r\n").startswith(
            b"HTTP/1.1 400"
        )
        client.sendall(CHUNKED + b"1\r\n \r\n" * 5000)
        answer = ended(client)
    assert answer.startswith(b"HTTP/1.1 400") and b"too many chunks; send them of 256 bytes at least." in answer


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/api/generate"])
def test_bodies_that_are_encoded_are_refused(running, path):
    with running.http as http:
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        refused = http.post(path, content=gzip.compress(BODY), headers=headers)
        for none in ("identity", "Identity", ""):
            plain = http.post("/v1/completions", content=BODY, headers=headers | {"content-encoding": none})
            assert plain.status_code == 200, plain.text
    assert refused.status_code == 415 and "is encoded as gzip; send it as it is" in refused.text


def test_a_whole_url_as_target(running):
    with connect(running) as client:
        for target in (b"http://x/version", b"HTTP://x:80/version?a=b"):
            assert asked(client, VERSION.replace(b"/version", target)).startswith(b"HTTP/1.1 200")
        assert asked(client, VERSION.replace(b"/version", b"http://x")).startswith(b"HTTP/1.1 200")


def test_a_path_with_a_slash_behind_it_is_answered_there(start):
    running = start(keys=Keys({hashlib.sha256(b"secret").digest(): "me"}))
    with running.http as client:
        assert client.get("/health/").status_code == 200
        assert client.get("/v1/models/tiny/").status_code == 401
        client.headers["Authorization"] = "Bearer secret"
        assert client.post("/v1/completions/?a=b", json=json.loads(BODY)).json()["object"] == "text_completion"
        assert client.get("/v1/models/tiny/").json() == client.get("/v1/models/tiny").json()
        assert client.get("/v1/models/").json() == client.get("/v1/models").json()
        assert client.get("/no/").status_code == client.get("/v1/models//").status_code == 404


def test_a_length_that_is_told_twice_is_the_last_of_its_connection(running):
    with connect(running) as client:
        length = CHUNKED.replace(b"Transfer", b"Content-Length: 3\r\nTransfer")
        client.sendall(length + b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY) + VERSION)
        answer = ended(client)
    assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer and answer.count(b"HTTP/1.1") == 1


def test_bodies_on_their_way_have_room_for_so_many_bytes_in_all(start, monkeypatch):
    """Whoever comes beyond is told when to come again, and the others are answered."""
    monkeypatch.setattr("engine.serve.gate._BODIES", 2)
    running = start(options={"max_body": 0.125})
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(running)) for _ in range(3)]
        for client in clients:
            client.sendall(POST + b"Content-Length: %d\r\n\r\n" % (100_000 + len(BODY)) + b" " * 100_000)
        refused, _, _ = select.select(clients, [], [], 20)
        for client in clients:
            head = asked(client, BODY).lower()
            assert head.startswith(b"http/1.1 503" if client in refused else b"http/1.1 200")
            assert (b"retry-after: 5" in head) == (client in refused)
        assert len(refused) == 1
        sizes = b"Content-Length: %d\r\n\r\n" % (100_000 + len(BODY))
        assert asked(clients[0], POST + sizes + b" " * 100_000 + BODY).startswith(b"HTTP/1.1 200")


TLS = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
UPGRADE = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n"


def test_what_is_no_request_is_a_line_of_json_in_the_log(running, capsys, caplog):
    """As all lines there: nothing of the libraries' own comes between."""
    with connect(running) as secure, connect(running) as upgraded:
        secure.sendall(TLS)
        assert ended(secure).startswith(b"HTTP/1.1 400")
        assert asked(upgraded, VERSION[:-2] + UPGRADE + b"\r\n").startswith(b"HTTP/1.1 200")
    [line] = capsys.readouterr().err.splitlines()
    assert {"event": "no_request", "error": "Invalid HTTP request received."}.items() <= json.loads(line).items()
    assert not caplog.records


def streamed(running, version: str) -> bytes:
    """All that the server sends for a stream of 20 tokens."""
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 20, "temperature": 0, "stream": True}).encode()
    head = POST.replace(b"HTTP/1.1", version.encode()) + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    with connect(running) as client:
        client.sendall(head + body)
        return ended(client)


def test_a_stream_is_framed_as_its_reader_knows_it(running):
    """In chunks, which h11 reads, or up to the connection's end for a reader of HTTP/1.0."""
    reader = h11.Connection(h11.CLIENT)
    reader.send(h11.Request(method="POST", target="/", headers=[("Host", "x"), ("Content-Length", "0")]))
    reader.send(h11.EndOfMessage())
    reader.receive_data(streamed(running, "HTTP/1.1"))
    chunked = b""
    while not isinstance(event := reader.next_event(), h11.EndOfMessage):
        assert event is not h11.NEED_DATA, "the last chunk has not come"
        chunked += event.data if isinstance(event, h11.Data) else b""
    head, _, plain = streamed(running, "HTTP/1.0").partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    for found in (chunked, plain):
        texts = [json.loads(part[6:])["choices"][0]["text"] for part in found.split(b"\n\n")[:-2]]
        assert len("".join(texts)) == 20 and found.endswith(b"data: [DONE]\n\n")


def test_a_client_that_takes_nothing_has_gone(start, monkeypatch):
    """After a while in which no byte could be sent; one that only reads slowly has not."""
    monkeypatch.setattr(sse, "_WRITE_S", 2.0)
    running = start(max_model_len=32768, kv_cache_tokens=66000)
    body = json.dumps(
        {"model": "tiny", "prompt": "x", "max_tokens": 30000, "temperature": 0, "stream": True, "logprobs": 5}
    ).encode()
    request = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    address = httpx.URL(running.url)
    with socket.socket() as still, socket.socket() as slow:
        for client in (still, slow):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((address.host, address.port))
            client.sendall(request)

        def gone() -> bool:
            assert slow.recv(1 << 12)
            return any(line.get("gone") for line in running.logs)

        running.wait_until(gone)
        for _ in range(50):
            assert slow.recv(1 << 12)
        assert [line.get("gone") for line in running.logs if line["event"] == "request"] == [True]
    running.wait_until(lambda: not running.engine.health().running)
