"""What strangers send: whatever it is, it gets a 4xx, and the server answers the next request."""

from __future__ import annotations

import http.client
import json
import random
import socket

import numpy as np
import pytest

HEADERS = {"Content-Type": "application/json"}
GOOD = {"model": "tiny", "prompt": "x", "max_tokens": 1}
DEEP = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BODIES = {
    "empty": b"",
    "no_json": b"{prompt: x}",
    "invalid_utf8": b'{"prompt": "\xff\xfe"}',
    "lone_surrogate": rb'{"prompt": "\ud800"}',
    "nan": b'{"prompt": "x", "temperature": NaN}',
    "infinity": b'{"prompt": "x", "temperature": Infinity}',
    "huge_number": b'{"prompt": "x", "max_tokens": 1' + b"0" * 5000 + b"}",
    "huge_float": b'{"prompt": "x", "temperature": 1e999}',
    "utf16": '{"prompt": "x"}'.encode("utf-16"),
    "list": b"[1, 2]",
    "null": b"null",
    "deep": DEEP,
    "deep_schema": b'{"prompt": "x", "structured_outputs": {"json": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}}",
    "negative_ids": b'{"prompt": [-1, 5]}',
    "ids_too_large": b'{"prompt": [999999999999]}',
    "no_prompt": b'{"prompt": []}',
    "empty_among_prompts": b'{"prompt": [[1], []]}',
    "booleans": b'{"prompt": [true, false]}',
    "many_prompts": json.dumps({"prompt": ["x"] * 5000}).encode(),
    "regex_bomb": b'{"prompt": "x", "structured_outputs": {"regex": "((((a{100}){100}){100}){100}){100}"}}',
    "schema_bomb": json.dumps(
        {"prompt": "x", "structured_outputs": {"json": {"properties": {str(n): {} for n in range(2000)}}}}
    ).encode(),
}


def post(running, body, path="/v1/completions", headers=HEADERS):
    connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=60)
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read() or "null")
    finally:
        connection.close()


def answers(running):
    status, body = post(running, json.dumps(GOOD))
    assert status == 200 and body["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("name", BODIES)
def test_bodies(running, name):
    status, body = post(running, BODIES[name])
    assert 400 <= status < 500, body
    assert body["error"]["message"].endswith(".")
    answers(running)


def test_bodies_that_are_too_large(running):
    parts = running.url.removeprefix("http://").split(":")
    with socket.create_connection((parts[0], int(parts[1])), timeout=60) as client:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 104857600\r\n\r\n"
        client.sendall(head.encode())
        assert client.recv(64).startswith(b"HTTP/1.1 413")
    answers(running)


@pytest.mark.parametrize("chunked", [True, False])
def test_who_sends_too_large_a_body_sees_why(running, chunked):
    parts = running.url.removeprefix("http://").split(":")
    for megabytes in (9, 40):
        body = (b"x" * (1 << 20) for _ in range(megabytes)) if chunked else b"x" * (megabytes << 20)
        connection = http.client.HTTPConnection(*parts, timeout=60)
        connection.request("POST", "/v1/completions", body, HEADERS, encode_chunked=chunked)
        answer = connection.getresponse()
        assert answer.status == 413 and b"The body is larger than" in answer.read()
        connection.close()
    answers(running)


def test_a_body_is_not_asked_for_to_be_refused(running):
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 104857600\r\n\r\n"
        client.sendall(head.encode())
        assert client.recv(64).startswith(b"HTTP/1.1 413")


def test_bytes_that_are_no_http(running):
    host, port = running.url.removeprefix("http://").split(":")
    rng = np.random.default_rng()
    for data in (b"\x16\x03\x01\x00", b"GET / HTTP/9\r\n\r\n", rng.bytes(500), b"POST /v1/completions HTTP/1.1\r\n"):
        with socket.create_connection((host, int(port)), timeout=60) as client:
            client.sendall(data)
    answers(running)


def test_a_body_that_ends_early_and_one_that_stays_half_open(running):
    host, port = running.url.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    with (
        socket.create_connection((host, int(port)), timeout=60) as half,
        socket.create_connection((host, int(port))) as cut,
    ):
        half.sendall(head + b'{"prompt"')
        cut.sendall(head + b"{")
        cut.close()
        answers(running)
    running.wait_until_free()


def test_a_reader_that_takes_nothing_holds_up_nobody(running):
    host, port = running.url.removeprefix("http://").split(":")
    body = json.dumps(GOOD | {"stream": True, "max_tokens": 900, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(head.encode() + body)
        answers(running)
    running.wait_until_free()


PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/tokenize", "/detokenize"]


@pytest.mark.parametrize("path", PATHS)
def test_random_fields_never_break_the_server(running, path):
    """Fields of random kinds: 200 or a refusal, never a fault of the server."""
    schema = running.http.get("/openapi.json").json()
    name = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].split("/")[-1]
    fields = [f for f in schema["components"]["schemas"][name]["properties"] if f != "stream"]
    random.seed(int(np.random.default_rng().integers(2**32)))
    values = [None, True, -1, 0, 3, 2**63, 1.5, "", "tiny", "x", [], {}, [1, 2], ["a"], [{}], {"type": "x"}, {"1": 2}]
    values += [[{"role": "user", "content": "x"}], {"type": "json_object"}, {"regex": "a+"}, [{"role": "tool"}]]
    for _ in range(60):
        body = {
            "model": "tiny",
            "prompt": "x",
            "messages": [{"role": "user", "content": "x"}],
            "tokens": [1],
            "input": "x",
        }
        body |= {"max_tokens": 2, "max_output_tokens": 2}
        body = {key: value for key, value in body.items() if key in fields}
        body |= {random.choice(fields): random.choice(values) for _ in range(random.randint(1, 3))}
        status, answer = post(running, json.dumps(body), path)
        assert status == 200 or 400 <= status < 500, (body, answer)
    running.wait_until_free()


def test_paths_and_methods_that_are_not_there(running):
    with running.http as client:
        assert client.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
        assert client.get("/v1/chat/completions").status_code == 405
        assert client.get("/v1/models/../../etc/passwd").status_code == 404
        named = client.get("/health", headers={"x-request-id": "mine-1"})
        assert named.headers["x-request-id"] == "mine-1"
        assert client.get("/health", headers={"x-request-id": "a b\tc"}).headers["x-request-id"] != "a b\tc"
