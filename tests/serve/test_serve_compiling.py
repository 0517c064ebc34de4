"""Forms that take long to compile hold up nobody who has none, or one that is known."""

from __future__ import annotations

import json
import select
import socket
import threading
import uuid

import httpx
import pytest

from engine.sampling import grammar

SHORT = {"model": "tiny", "prompt": "x", "max_tokens": 2}
KNOWN = SHORT | {"structured_outputs": {"regex": "[ab]{4}"}}


def bomb() -> bytes:
    """A request whose form, which no other has, costs more than a second and gets 400."""
    name = uuid.uuid4().hex
    parts = {f"{name}{n}": {"allOf": [{"$ref": f"#/$defs/{name}{n + 1}"}] * 2} for n in range(40)}
    schema = {"$defs": {**parts, f"{name}40": {"type": "string", "pattern": "a+"}}, "$ref": f"#/$defs/{name}0"}
    body = json.dumps(SHORT | {"structured_outputs": {"json": schema}}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


@pytest.fixture
def compiled(start, monkeypatch):
    """A server with one place, and the forms that it has begun to compile."""
    begun = []

    def compiling(wanted, vocabulary, compile_grammar=grammar._compile):
        begun.append(wanted)
        return compile_grammar(wanted, vocabulary)

    monkeypatch.setattr(grammar, "_compile", compiling)
    return start(max_num_seqs=1), begun


def send(running) -> socket.socket:
    address = httpx.URL(running.url)
    client = socket.create_connection((address.host, address.port), timeout=60)
    client.sendall(bomb())
    return client


def test_a_form_that_is_compiled_holds_up_no_others(compiled):
    """Neither a plain request nor one whose form is known: both are answered before it is."""
    running, begun = compiled
    with running.http as http:
        assert http.post("/v1/completions", json=KNOWN).status_code == 200
        with send(running) as client:
            running.wait_until(lambda: len(begun) == 2)
            for body in (SHORT, KNOWN):
                assert http.post("/v1/completions", json=body).status_code == 200
            unanswered = not select.select([client], [], [], 0)[0]
            assert unanswered and not running.models.known(None).admission.running
            assert b" 400 " in client.recv(64)
    running.wait_until_free()


def test_a_deadline_ends_the_wait_for_a_form(start, monkeypatch):
    compiled = threading.Event()
    monkeypatch.setattr(grammar, "_compile", lambda *_: compiled.wait(30))
    with start(options={"deadline": 0.2}).http as http:
        late = http.post("/v1/completions", json=SHORT | {"structured_outputs": {"regex": "[cd]{4}"}})
        assert not compiled.is_set() and (late.status_code, late.json()["error"]["code"]) == (504, "deadline")
        compiled.set()


def test_forms_of_clients_that_have_left_are_not_compiled(compiled):
    running, begun = compiled
    clients = [send(running) for _ in range(8)]
    running.wait_until(lambda: bool(begun))
    for client in clients:
        client.close()
    running.wait_until(lambda: [entry["status"] for entry in running.logs] == [499] * 8)
    with running.http as http:
        assert http.post("/v1/completions", json=KNOWN).status_code == 200
    assert len(begun) == 2
