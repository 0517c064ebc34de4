"""Chats with a server over real sockets: what is sent, what comes back, and what goes wrong."""

from __future__ import annotations

import json

import pytest
from server import BREAK


def test_conversation_settings_and_figures(chat, server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    server.scripts = [["Hel", "lo \x1b[31mred"], ["two"]]
    done = chat(
        "--attach", f"{server.url}/v1/", "--system", "s", "--top-p", "0.5", "--stop", "END", given="a\nb\n/info\n"
    )
    assert done.status == 0 and done.out == "Hello \x1b[31mred\ntwo\n"  # no terminal: as it came
    first, second = server.requests
    assert first["model"] == "scripted" and first["stream"] is True
    assert first["top_p"] == 0.5 and first["stop"] == ["END"] and "min_p" not in first and "top_k" not in first
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "user"]
    assert server.headers[0]["Authorization"] == "Bearer secret-key" and "secret-key" not in done.err
    assert "context 6/4096" in done.err and "2 cached" in done.err


def test_forms_reasoning_and_a_model_by_name(chat, server, tmp_path):
    schema = tmp_path / "s.json"
    schema.write_text('{"type": "object"}')
    server.scripts = [[("reasoning", "hm"), '{"a": 1}']]
    done = chat("other", "--attach", server.url, "-p", "x", "--schema", schema, "--no-reasoning")
    assert json.loads(done.out) == {"a": 1}
    (sent,) = server.requests
    assert sent["model"] == "other" and sent["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}
    assert json.loads(chat("--export", "json").out)["messages"][1]["reasoning"] == "hm"


def test_refusals_and_broken_connections_are_one_sentence_and_lose_nothing(chat, server):
    server.scripts = [["first"], [429], ["half", BREAK], ["last"]]
    done = chat("--attach", server.url, given="one\ntwo\nthree\nfour\n")
    assert done.status == 2 and done.out.split() == ["first", "half", "last"]
    assert "The server refuses with 429: it is too much." in done.err and "broke off" in done.err
    said = [m["content"] for m in server.requests[-1]["messages"]]
    assert said == ["one", "first", "three", "half", "four"]


@pytest.mark.parametrize("again", ["/regen", "/edit other"])
@pytest.mark.parametrize("failing", [[429], [BREAK], ["half", BREAK]])
def test_a_turn_stays_until_another_answer_is_there(chat, server, again, failing):
    server.scripts = [["first"], failing, ["then"]]
    done = chat("--attach", server.url, given=f"one\n{again}\nmore\n")
    assert done.status == 2 and "The turn before stays as it was." in done.err
    assert [m["content"] for m in server.requests[-1]["messages"]] == ["one", "first", "more"]
    kept = json.loads(chat("--export", "json").out)["messages"]
    assert [m["content"] for m in kept] == ["one", "first", "more", "then"]


@pytest.mark.parametrize("given", ['"""\nnot closed\n', "goes on \\\n", "goes on \\"])
def test_a_piped_message_without_its_end_is_refused(chat, server, given):
    server.scripts = [["first"]]
    done = chat("--attach", server.url, given=f"one\n{given}")
    assert done.status == 2 and done.out == "first\n" and "The input ends within a message" in done.err
    assert len(server.requests) == 1


def test_a_context_that_the_server_tells_is_kept_to(chat, server):
    server.model["max_model_len"] = 40
    server.scripts = [["x " * 3], ["y"], ["z"]]
    many = "word " * 30
    done = chat("--attach", server.url, "--context-full", "stop", given=f"{many}\nmore\n")
    assert done.status == 2 and ("nothing was sent" in done.err or "context is" in done.err)
    assert len(server.requests) == 1


def test_sampling_that_is_set_is_sent_and_nothing_else(chat, server, home, monkeypatch):
    (home / "config" / "engine").mkdir(parents=True)
    (home / "config" / "engine" / "config.toml").write_text("frequency_penalty = 0.0\n")
    monkeypatch.setenv("ENGINE_MIN_P", "0")
    server.scripts = [["a"]] * 3
    lines = ["one", "/show temperature", "/set top_k 0", "/set stop END", "two"]
    lines += ["/set temperature 1", "/set stop none", "three"]
    done = chat("--attach", server.url, "--top-p", 1, given="\n".join(lines) + "\n")
    assert done.status == 0, done.err
    first, second, third = (
        {k: v for k, v in body.items() if k not in ("model", "messages", "stream", "stream_options")}
        for body in server.requests
    )
    assert first == {"top_p": 1.0, "min_p": 0.0, "frequency_penalty": 0.0}
    assert second == first | {"top_k": 0, "stop": ["END"]}
    assert third == first | {"top_k": 0, "temperature": 1.0}
    shown = [line.strip() for line in done.err.splitlines() if " = " in line]
    has = "as the server has it"
    wanted = [f"temperature = {has}", "top_k = 0", 'stop = ["END"]', "temperature = 1.0", f"stop = {has}"]
    assert shown == wanted


@pytest.mark.parametrize("body", [b"no json", b"[1]", b'{"data": 3}'])
def test_what_is_no_such_server_is_told(chat, body):
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.handle_request, daemon=True).start()
        done = chat("--attach", f"127.0.0.1:{other.server_address[1]}")
        assert done.status == 2 and done.err.count("\n") == 1
        assert "does not speak OpenAI's protocol" in done.err or "names no model" in done.err
