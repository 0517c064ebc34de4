"""engine chat: answers through the template, commands, Ctrl-C, a full context."""

from __future__ import annotations

import io
import os
import re
import sys

import pytest

REFERENCE = ("--backend", "reference", "--temperature", "0")


def test_one_message_through_the_template(engine, talker):
    asked = engine("chat", talker, "-p", "hello", "--system", "short", "--max-tokens", 9, *REFERENCE)
    assert asked.status == 0 and re.fullmatch(r"[A-Za-z]{9}\n", asked.out), asked
    assert "The answer is cut: --max-tokens is 9." in asked.err and re.search(r"context \d+/32768\]", asked.err)
    prompt = engine("tokenize", talker, "<system>short<user>hello<assistant>").out
    raw = engine("generate", talker, "--prompt-ids", prompt, "--max-tokens", 9, *REFERENCE)
    assert raw.out == asked.out


def test_answers_keep_to_a_form(engine, talker, monkeypatch, tmp_path):
    _typed(monkeypatch, "one\ntwo\n")
    assert re.fullmatch(r"([ab]{4}\n){2}", engine("chat", talker, "--regex", "[ab]{4}", *REFERENCE).out)
    grammar = tmp_path / "g"
    grammar.write_text('start: "a" "b"')
    assert engine("chat", talker, "-p", "hello", "--grammar", grammar, *REFERENCE).out == "ab\n"


def _typed(monkeypatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_the_conversation_is_kept_and_forgotten(engine, talker, monkeypatch):
    _typed(monkeypatch, "one\n\ntwo\n/reset\none\n/exit\nnot read\n")
    done = engine("chat", talker, "--max-tokens", 5, *REFERENCE)
    first, second, third = done.out.splitlines()
    used = [int(n) for n in re.findall(r"context (\d+)/", done.err)]
    assert done.status == 0 and third == first and used[2] == used[0]
    assert "forgotten" in done.err
    history = engine("tokenize", talker, f"<user>one<assistant>{first}<user>two<assistant>").out.split()
    assert used[1] == len(history) + 5 and len(second) == 5


def test_commands_and_the_end_of_input(engine, talker, monkeypatch):
    _typed(monkeypatch, "/help\n/exti\n /tmp is a folder\n")
    done = engine("chat", talker, "--max-tokens", 3, *REFERENCE)
    assert done.status == 0 and len(done.out.splitlines()) == 1
    assert "/reset" in done.err and "There is no command /exti" in done.err


def test_a_full_context_is_told_and_the_message_taken_back(engine, talker, monkeypatch):
    _typed(monkeypatch, "a\n" + "b" * 60 + "\nc\n")
    done = engine("chat", talker, "--max-context", 60, "--max-tokens", 4, *REFERENCE)
    assert done.status == 0 and len(done.out.splitlines()) == 2
    assert "the context holds 60; start anew with /reset" in done.err
    _typed(monkeypatch, "a\n")
    cut = engine("chat", talker, "--max-context", 60, *REFERENCE)
    assert "The answer is cut: the context of 60 tokens is full." in cut.err and "context 60/60" in cut.err


def test_what_the_template_refuses_is_told(engine, refusal, talker, monkeypatch):
    assert "forbidden it is" in refusal("chat", talker, "-p", "forbidden", *REFERENCE)
    _typed(monkeypatch, "forbidden\na\n")
    done = engine("chat", talker, "--max-tokens", 3, *REFERENCE)
    assert done.status == 0 and "forbidden it is" in done.err and len(done.out.splitlines()) == 1


def test_a_model_without_template_and_wrong_options_are_refused(refusal, llama, talker):
    assert "no chat template" in refusal("chat", llama, *REFERENCE)
    assert "temperature" in refusal("chat", talker, "--backend", "reference", "--temperature", "-3")


def test_a_full_context_ends_a_single_message_with_status_2(refusal, talker):
    assert "the context holds 20" in refusal("chat", talker, "-p", "b" * 60, "--max-context", 20, *REFERENCE)


@pytest.fixture
def terminal(talker):
    """Starts a chat in a terminal."""
    pexpect = pytest.importorskip("pexpect", reason="pexpect is not installed")
    started = []

    def start(*options: str):
        arguments = ["-m", "engine.cli.main", "chat", str(talker), *REFERENCE, *options]
        child = pexpect.spawn(
            sys.executable, arguments, timeout=30, encoding="utf-8", env=os.environ | {"TERM": "dumb"}
        )
        started.append(child)
        child.expect_exact("> ")
        return child

    yield start
    for child in started:
        child.close(force=True)


def _status(child) -> int:
    """The exit status of a chat that ends by itself."""
    child.read()
    child.wait()
    return child.exitstatus


def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(terminal):
    child = terminal()
    child.sendline("hello")
    child.expect("[A-Za-z]{30}")
    child.sendintr()
    child.expect(r"\[(\d+) tokens, .*context (\d+)/32768\]")
    tokens, first = map(int, child.match.groups())
    child.expect_exact("> ")
    child.sendline("again")
    child.expect("[A-Za-z]{10}")
    child.sendintr()
    child.expect(r"\[(\d+) tokens, .*context (\d+)/32768\]")
    again, second = map(int, child.match.groups())
    assert second - again > first - tokens, "the first answer is not in the conversation"
    child.expect_exact("> ")
    child.sendline("/exit")
    assert _status(child) == 0


def test_two_ctrl_c_at_the_prompt_leave_with_130(terminal):
    child = terminal()
    child.sendintr()
    child.expect_exact("Press Ctrl-C once more")
    child.expect_exact("> ")
    child.sendline("/help")  # any line between takes the first one back
    child.expect_exact("/reset")
    child.expect_exact("> ")
    child.sendintr()
    child.expect_exact("Press Ctrl-C once more")
    child.expect_exact("> ")
    child.sendintr()
    assert _status(child) == 130


def test_ctrl_d_leaves_with_0(terminal):
    child = terminal()
    child.sendeof()
    assert _status(child) == 0
