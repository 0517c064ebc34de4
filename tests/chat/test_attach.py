"""Chats with a server over real sockets: what is sent, what comes back, and what goes wrong."""

from __future__ import annotations

import json
import re
from contextlib import closing

import pytest
from server import BREAK

from engine.chat.conversation import Conversation, Message, ToolCall
from engine.chat.store import Store


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


def test_a_bad_byte_loses_its_message_alone(chat, server):
    server.scripts = [["one"], ["two"]]
    done = chat("--attach", server.url, given='h\u00e9\n"""h\udcffllo\nfoo"""\nb\u00e4r\r\n')
    assert done.status == 2 and "The message is not UTF-8: byte 4 is 0xff." in done.err
    said = [m["content"] for m in server.requests[-1]["messages"] if m["role"] == "user"]
    assert said == ["h\u00e9", "b\u00e4r"] and done.out == "one\ntwo\n"


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


TEN = "word " * 9 + "word"


def test_a_full_context_drops_the_oldest_turns(chat, server):
    server.model["max_model_len"] = 60
    server.scripts = [["yes"]] * 9
    lines = [f"{n} {TEN[5:]}" for n in range(9)]
    done = chat("--attach", server.url, "--context-full", "drop", given="\n".join(lines) + "\n")
    assert done.status == 0 and done.out == "yes\n" * 9, done.err
    assert "no longer sees the" in done.err and server.requests[-1]["messages"][0]["content"] != lines[0]
    assert len(json.loads(chat("--export", "json").out)["messages"]) == 18, "what is kept was cut"


def test_a_message_too_long_for_the_context_stops_no_later_one(chat, server):
    server.model["max_model_len"] = 40
    server.scripts = [["x"], ["y"]]
    given = f"{TEN} {TEN} {TEN}\n{TEN} {TEN} {TEN} {TEN} {TEN}\nmore\n"
    done = chat("--attach", server.url, "--context-full", "drop", given=given)
    assert done.status == 2 and done.out == "x\ny\n" and "no longer sees the 2 oldest" in done.err
    assert "The server refuses with 400: 51 tokens are wanted, and the context holds 40." in done.err
    assert [m["content"] for m in server.requests[-1]["messages"]] == ["more"]


def test_a_full_context_is_summarized(chat, server):
    server.model["max_model_len"] = 100
    server.scripts = [["yes"]] * 12
    done = chat("--attach", server.url, "--context-full", "summarize", given=f"{TEN}\n" * 9)
    assert done.status == 0 and done.out == "yes\n" * 9, done.err
    assert re.search(r"sees this summary in place of the \d oldest messages, which are kept: yes", done.err)
    assert server.requests[-1]["messages"][0]["content"] == "A summary of our conversation so far:\nyes"


def _keep_ten_turns(home):
    messages = [Message(role, text) for _ in range(10) for role, text in (("user", TEN), ("assistant", "yes"))]
    with closing(Store(home / "data" / "engine" / "chats.db")) as store:
        store.save(Conversation(messages=messages))


@pytest.mark.parametrize(("how", "status"), [("drop", 0), ("stop", 2)])
def test_what_the_server_refuses_as_too_long_is_a_full_context(chat, server, home, how, status):
    server.model["max_model_len"] = 60
    _keep_ten_turns(home)
    server.scripts = [["yes"]]
    done = chat("--attach", server.url, "-c", "--context-full", how, given="more\n")
    assert done.status == status and "The server refuses with 400: 112 tokens are wanted" in done.err
    assert ("no longer sees the" in done.err and done.out == "yes\n") is (how == "drop"), done.err
    assert ("/compact summarizes it" in done.err and len(server.requests) == 1) is (how == "stop")


def test_a_kept_conversation_that_is_too_long_can_be_summarized(chat, server, home):
    """Nothing is known of its tokens but what the server refuses."""
    server.model["max_model_len"] = 60
    _keep_ten_turns(home)
    server.scripts = [["in short"], ["yes"]]
    done = chat("--attach", server.url, "-c", "--context-full", "drop", given="/compact\nmore\n")
    assert done.status == 0 and done.out == "yes\n", done.err
    assert "sees this summary in place of the 2 oldest" in done.err and "no longer sees the" in done.err


@pytest.mark.parametrize(("refusal", "tries"), [([400, "No context has room for it."], 2), ([400], 1)])
def test_a_summary_that_is_refused_changes_nothing(chat, server, refusal, tries):
    server.scripts = [["yes"], ["yes"], *[refusal] * tries, ["yes"]]
    done = chat("--attach", server.url, given="one\ntwo\n/compact\nthree\n")
    assert done.status == 2 and "The server refuses with 400: " in done.err
    asked = [[m["content"] for m in body["messages"]] for body in server.requests]
    assert sum("Summarize" in messages[-1] for messages in asked) == tries
    assert asked[-1] == ["one", "yes", "two", "yes", "three"]


CUT = [
    [("tool", "weather", '{"city": "Pa')],
    ["I look.", ("tool", "weather", '{"city": "Paris"}'), ("tool", "weather", '{"ci')],
    [("tool", "weather", "")],
]


@pytest.mark.parametrize("script", CUT)
def test_a_call_that_is_cut_is_text(chat, server, script):
    server.scripts = [[*script, ("finish", "length")], ["then"]]
    done = chat("--attach", server.url, given="one\ntwo\n")
    assert done.status == 0, done.err
    assert "The answer is cut: the server has set a limit" in done.err
    parts = [part if isinstance(part, str) else f"{part[1]} {part[2]}" for part in script]
    assert done.out == "\n".join([*parts, "then", ""])
    _, answer, _ = server.requests[-1]["messages"]
    assert answer == {"role": "assistant", "content": "\n".join(parts)}


def test_a_whole_call_without_arguments_is_a_call(chat, server):
    server.scripts = [[("tool", "now", "")], ["It is late."]]
    done = chat("--attach", server.url, "-p", "what time is it?")
    assert done.out == "It is late.\n"
    assert server.requests[-1]["messages"][1]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}


def test_a_kept_call_that_was_cut_goes_on(chat, server, talker, home):
    call = ToolCall("c1", "weather", '{"city": "Pa')
    told = Message("tool", "The arguments of weather are no JSON.", tool_call_id="c1")
    messages = [Message("user", "one"), Message("assistant", "I look.", tool_calls=(call,)), told]
    with closing(Store(home / "data" / "engine" / "chats.db")) as store:
        store.save(Conversation(messages=messages))
    server.scripts = [["then"]]
    assert chat("--attach", server.url, "--id", 1, "-p", "two").out == "then\n"
    sent = [(m["role"], m["content"]) for m in server.requests[-1]["messages"]]
    assert sent == [("user", "one"), ("assistant", 'I look.\nweather {"city": "Pa'), ("user", "two")]
    local = chat(talker, "--id", 1, "-p", "three", "--max-tokens", 3, "--temperature", 0, "--backend", "reference")
    assert local.status == 0 and len(local.out.strip()) == 3, local.err


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


def _delta(**delta):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [None]},
        {"choices": {"a": 1}},
        _delta(content=[{"type": "text", "text": "hi"}]),
        _delta(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": {"a": 1}}}]),
    ],
)
def test_an_event_of_another_form_ends_the_answer_and_no_chat(chat, server, event):
    server.scripts = [["Half", event], ["All well."]]
    done = chat("--attach", server.url, given="one\ntwo\n")
    assert done.status == 2 and "not of OpenAI's form" in done.err and "defect" not in done.err, done
    assert done.out.startswith("Half") and done.out.endswith("All well.\n")


def test_an_error_that_is_null_is_none(chat, server):
    server.scripts = [[{"error": None, **_delta(content="All well.")}]]
    assert chat("--attach", server.url, "-p", "one").out == "All well.\n"


def test_halves_of_a_character_are_put_together(chat, server):
    server.scripts = [["a \ud83d", "\ude42 b \ud83d", " c \udc00"], ["then"]]
    done = chat("--attach", server.url, given="one\ntwo\n")
    assert (done.status, done.out) == (0, "a \N{SLIGHTLY SMILING FACE} b \ufffd c \ufffd\nthen\n"), done


def test_the_system_message_is_one_for_all_commands(chat, server):
    given = "/system You are a cat.\n/show system\n/set system Dog\n/system\n/system none\n/show system\n"
    done = chat("--attach", server.url, "--system", "first", given="/show system\n" + given)
    assert re.findall("  system = (.*)", done.err) == ['"first"', '"You are a cat."', '"Dog"', "null"]
    assert "The system message: Dog" in done.err


def test_what_is_refused_before_anything_came_is_one_line(chat, server):
    server.scripts = [[404, "There is no nope."]]
    done = chat("nope", "--attach", server.url, "-p", "x")
    assert done.status == 2 and "There is no nope." in done.err and done.err.count("\n") == 1


def test_reasoning_is_not_sent_back(chat, server):
    """Some servers refuse it."""
    server.scripts = [[("reasoning", "hm"), "one"], ["two"]]
    chat("--attach", server.url, "-p", "x")
    assert chat("--attach", server.url, "--continue", "-p", "y").out == "two\n"
    assert server.requests[-1]["messages"][1] == {"role": "assistant", "content": "one"}


def test_a_servers_name_is_harmless_after_an_answer(chat, server):
    server.model["id"] = "a\x1b]0;owned\x07model"
    server.scripts = [["yes"]]
    done = chat("--attach", server.url, "-p", "x")
    assert done.out == "yes\n" and "model" in done.err and "\x1b" not in done.err


def test_tokens_that_a_server_does_not_count_are_told_in_whole_sentences(chat, server):
    server.scripts = [["yes"]]
    done = chat("--attach", server.url, given="/tokens\nx\n/tokens\n")
    assert "What the conversation takes is not known before it is answered; the server" in done.err
    assert "The conversation took 2 when it was last sent; the server" in done.err
