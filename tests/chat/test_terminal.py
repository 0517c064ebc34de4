"""engine chat in a real terminal: typing, pasting, Ctrl-C, resizing, being killed, a full context, tools, Markdown."""

from __future__ import annotations

import json
import re
import sqlite3
import sys
import termios
import time

import pytest

from engine.chat.store import Store

GREEDY = ("--temperature", "0")


def test_fifty_pasted_lines_are_one_message(terminal, server):
    lines = [f'line {n} of what was copied, with /slash and "quotes"' for n in range(50)]
    server.scripts = [["Fifty", " lines."]]
    child = terminal("--attach", server.url)
    child.send("\x1b[200~" + "\r".join(lines) + "\x1b[201~")
    child.wait("line 49 of")
    assert not server.requests, "pasting has sent something"
    child.send("\r")
    child.wait("Fifty lines.")
    assert server.requests[0]["messages"] == [{"role": "user", "content": "\n".join(lines)}]


def test_messages_of_several_lines(terminal, server):
    server.scripts = [["first"], ["second"], ["third"]]
    child = terminal("--attach", server.url)
    child.send("one\ntwo\x1b\rthree\r")  # Ctrl-J, and Alt-Enter
    child.wait("first")
    child.wait_prompt()
    child.line('"""four')
    child.line('five"""')
    child.wait("second")
    child.wait_prompt()
    child.line("six\\")
    child.line("seven")
    child.wait("third")
    said = [m["content"] for m in server.requests[-1]["messages"] if m["role"] == "user"]
    assert said == ["one\ntwo\nthree", "four\nfive", "six\nseven"]


def test_ctrl_c_stops_the_answer_and_the_next_turn_works(terminal, server):
    from server import HOLD

    server.scripts = [["Never", " ending", HOLD, "unheard"], ["All well."]]
    child = terminal("--attach", server.url)
    child.line("go on and on")
    child.wait("Never ending")
    child.send("typed ahead")  # it must not be drawn into the answer, nor be lost
    child.send("\x03")
    child.wait("Stopped")
    assert server.gone.wait(10), "the server was not told"
    child.wait("> typed ahead")
    child.line("")
    child.wait("All well")
    roles = [(m["role"], m["content"]) for m in server.requests[1]["messages"]]
    assert roles == [("user", "go on and on"), ("assistant", "Never ending"), ("user", "typed ahead")]
    child.wait_prompt()
    child.send("\x03")
    child.wait("Press Ctrl-C once more")
    child.line("/help")  # whatever is typed between takes the first one back
    child.wait("Ctrl-G opens")
    child.wait_prompt()
    child.send("\x03")
    child.wait("(?s)Press Ctrl-C once more.*Press Ctrl-C once more")
    child.wait_prompt()
    child.send("\x03")
    assert child.ended() == 130


def test_ctrl_c_stops_a_model_that_runs_here_and_again_leaves(terminal, talker):
    child = terminal(talker, *GREEDY, "--no-markdown")
    child.line("hello")
    child.wait("[A-Za-z]{60}")
    child.send("\x03")
    child.wait("Stopped")
    child.wait_prompt()
    first = int(child.wait(r"context (\d+)/32768")[1])
    child.line("again")
    child.wait(r"(?s)again.*[A-Za-z]{60}")
    child.send("\x03")
    child.wait("(?s)Stopped.*Stopped")
    child.wait_prompt()
    status = re.findall(r"context (\d+)/32768.*?(\d+) cached", child.text())[-1]
    assert int(status[0]) > first and int(status[1]) > 16, "the first answer was not in the conversation"
    child.send("\x03")
    assert child.ended() == 130
    (kept,) = Store(_database(child)).list()
    assert kept.messages == 4


def test_a_long_prompt_shows_how_far_it_has_been_read(terminal, talker, tmp_path):
    (tmp_path / "long.txt").write_text("word " * 1600)
    child = terminal(talker, *GREEDY, "--backend", "reference", "--max-tokens", 5)
    child.line(f"/read {tmp_path / 'long.txt'}")
    child.wait("goes before")
    child.line("hello")
    child.wait(r"reading \d{4} tokens, \d+ %")
    child.wait("--max-tokens is 5")


def _database(child):
    import os
    from pathlib import Path

    del child
    return Path(os.environ["XDG_DATA_HOME"]) / "engine" / "chats.db"


def test_what_is_typed_while_the_model_loads_is_the_first_message():
    pytest.importorskip("pexpect", reason="pexpect is not installed")
    pytest.importorskip("pyte", reason="pyte is not installed")
    from terminal import Terminal

    child = Terminal(["--no-save", "--max-tokens", "4"])
    child.wait("built-in demo")
    child.line("early")
    child.line("/exit")
    assert child.ended() == 0
    assert child.text().count("early") == 1 and "The answer is cut" in child.text()


def test_leaving(terminal, server):
    for leave in ("\x04", "/exit\r"):
        child = terminal("--attach", server.url)
        child.send(leave)
        assert child.ended() == 0


def test_resizing_in_the_middle_of_an_answer_loses_nothing(terminal, server):
    from server import HOLD

    words = [f"word{n} " for n in range(300)]
    server.scripts = [[*words[:150], HOLD, *words[150:]], ["fine"]]
    child = terminal("--attach", server.url)
    child.line("many words")
    child.wait("word149")
    child.resize(12, 44)
    server.release.set()
    child.wait("word299")
    child.wait_prompt()
    shown = set(re.findall(r"word\d+", child.text()))
    assert shown >= {word.strip() for word in words[150:]}
    child.line("still there?")
    child.wait("fine")


def test_killed_chats_lose_no_finished_turn(terminal, server):
    from server import HOLD

    server.scripts = [["the answer is 42"], ["half of", HOLD], ["of course"]]
    child = terminal("--attach", server.url)
    child.line("remember this")
    child.wait("the answer is 42")
    child.wait_prompt()
    child.line("and this")
    child.wait("half of")
    child.kill()
    child = terminal("--attach", server.url, "-c")
    child.wait("(?s)remember this.*the answer is 42")
    child.line("do you remember?")
    child.wait("of course")
    said = [m["content"] for m in server.requests[-1]["messages"]]
    assert said == ["remember this", "the answer is 42", "do you remember?"]


def test_a_full_context_is_warned_of_and_the_person_chooses(terminal, talker):
    child = terminal(talker, *GREEDY, "--max-context", 300, "--max-tokens", 20, ENGINE_CONTEXT_WARNING="0.5")
    for n in range(1, 9):
        child.line("b" * 40)
        child.wait(rf"(?s)(-max-tokens is 20.*){{{n}}}|context is full")
        if "context is full" in child.text():
            break
        child.wait_prompt()
    assert "% full" in child.text(), "no warning came"
    child.wait(r"\[su\]mmarize, \[d\]rop, \[st\]op")
    child.line("typed ahead of the question")
    child.wait("The answer is one of summarize, drop, stop")
    child.line("stop")
    child.wait("nothing was sent")
    child.wait("> typed ahead of the question")
    child.send("\x03")
    child.wait_prompt()
    before = int(re.findall(r"context (\d+)/300", child.text())[-1])
    child.line("b" * 40)
    child.wait(r"(?s)nothing was sent.*\[d\]rop")
    child.line("d")
    child.wait(r"no longer sees the \d+ oldest")
    child.wait_prompt()
    assert int(re.findall(r"context (\d+)/300", child.text())[-1]) <= before  # one turn out, one in
    child.line("b" * 100)
    child.wait(r"(?s)no longer sees.*\[d\]rop")
    child.line("summarize")
    child.wait("sees this summary in place")
    child.wait_prompt()


def test_tools_are_shown_and_run_only_when_approved(terminal, server, home):
    (home / "config" / "engine").mkdir(parents=True)
    (home / "config" / "engine" / "config.toml").write_text(
        '[tools.count]\ndescription = "Counts words"\ncommand = "echo ran >> $HOME/ran; printf %s \\"$text\\" | wc -w"\n'
        'parameters = {text = "what to count"}\n'
    )
    tricky = "a b; touch $HOME/oops $(touch $HOME/oops)"
    call = ("tool", "count", json.dumps({"text": tricky}))
    server.scripts = [[call], ["It is counted."], [call], ["As you wish."]]
    child = terminal("--attach", server.url)
    child.line("count")
    child.wait(r"\[y\]es, \[n\]o, \[s\]top")
    assert 'count(text = "a b; touch' in child.text() and "wc -w" in child.text()
    assert not (home / "ran").exists(), "it ran before it was approved"
    child.line("\x1ay")  # no letter of the answer
    child.wait("It is counted", 20)
    assert server.requests[0]["tools"][0]["function"]["parameters"]["required"] == ["text"]
    last = server.requests[1]["messages"][-1]
    assert last["role"] == "tool" and int(last["content"]) == len(tricky.split()) and last["tool_call_id"] == "c1"
    assert (home / "ran").read_text() == "ran\n" and not (home / "oops").exists()
    child.wait_prompt()
    child.line("again")
    child.wait(r"(?s)\[y\]es.*\[y\]es, \[n\]o")
    child.line("no")
    child.wait("As you wish")
    assert "declined" in server.requests[3]["messages"][-1]["content"]
    assert (home / "ran").read_text() == "ran\n", "it ran though it was declined"


def test_nothing_is_asked_after_a_stop(terminal, server, home):
    (home / "config" / "engine").mkdir(parents=True)
    (home / "config" / "engine" / "config.toml").write_text('[tools.ring]\ncommand = "touch $HOME/rang"\n')
    server.scripts = [[("tool", "ring", "{}")] * 3, ["As you wish."]]
    child = terminal("--attach", server.url)
    child.line("ring three times")
    child.wait(r"\[y\]es, \[n\]o, \[s\]top")
    child.line("stop")
    child.wait("(?s)(ring is not run.*){3}")
    child.wait_prompt()
    assert child.text().count("The model asks for the tool ring") == 1 and not (home / "rang").exists()
    child.line("never mind")
    child.wait("As you wish")
    told = [m["tool_call_id"] for m in server.requests[1]["messages"] if m["role"] == "tool"]
    assert told == ["c1", "c2", "c3"], "a call has no result"


def test_a_tool_that_ctrl_c_stops_is_told(terminal, server, home):
    (home / "config" / "engine").mkdir(parents=True)
    (home / "config" / "engine" / "config.toml").write_text('[tools.wait]\ncommand = "touch $HOME/began; sleep 60"\n')
    server.scripts = [[("tool", "wait", "{}")]]
    child = terminal("--attach", server.url)
    child.line("wait")
    child.wait(r"\[y\]es, \[n\]o, \[s\]top")
    child.line("yes")
    end = time.monotonic() + 20
    while not (home / "began").exists():
        assert time.monotonic() < end, "the tool has not begun"
        time.sleep(0.02)
    child.send("\x03")
    child.wait("wait is stopped", 10)
    child.wait_prompt()


def test_markdown_is_rendered_and_long_answers_are_whole(terminal, server):
    code = [f"    value_{n} = {n}\n" for n in range(60)]
    text = [
        "# Title\n",
        "\nSome **bold** text with <b>tags</b>.\n\n",
        "```python\n",
        *code,
        "```\n",
        "\n- one\n- two\n\nThe end.",
    ]
    server.scripts = [text, ["\x1b]0;owned\x07plain\x1b[2Jtext"]]
    child = terminal("--attach", server.url)
    child.line("show code")
    child.wait("The end.")
    child.wait_prompt()
    shown = child.text()
    assert "**" not in shown and "```" not in shown and "bold text with <b>tags</b>" in shown
    assert re.findall(r"value_(\d+) = \1\b", shown) == [str(n) for n in range(60)]
    assert "• one" in shown
    child.line("escape")
    child.wait("plain.*text")
    assert child.screen.title != "owned" and "The end." in child.text()


def test_a_table_is_whole_where_a_word_is_wider_than_the_terminal(terminal, server):
    word = "".join(chr(ord("A") + n % 26) for n in range(60))
    server.scripts = [[f"| a | b |\n|---|---|\n| 1 | {word} |\n\nend"]]
    child = terminal("--attach", server.url, rows=24, columns=40)
    child.line("a table")
    child.wait("end")
    assert word in re.sub(r"\s", "", child.text())


def test_neither_a_servers_name_nor_an_entity_reaches_the_terminal(terminal, server):
    server.model["id"] = "a\x1b]0;owned\x07model"
    server.scripts = [["left &#x202e;right&#x1b;]0;owned&#7; &amp; **bold &#8238;**\n\n| a |\n|---|\n| &#x202E;c |"]]
    child = terminal("--attach", server.url)
    child.line("name")
    child.wait("left .right.* & bold")
    child.wait_prompt()
    assert child.screen.title != "owned" and "\u202e" not in child.text()


def test_reasoning_is_folded_dimmed_or_hidden(terminal, server):
    script = [("reasoning", "deep thought"), "The answer."]
    server.scripts = [script, ["<think>", "inner ", "voice", "</think>", "\n\nSecond."], script]
    child = terminal("--attach", server.url, "--think", "fold")
    child.line("one")
    child.wait("(?s)thought for .*The answer")
    child.wait_prompt()
    assert "deep thought" not in child.text()
    child.line("/think show")
    child.wait("displayed: show")
    child.line("two")
    child.wait("(?s)inner voice.*Second")
    child.wait_prompt()
    assert "<think>" not in child.text()
    child.line("/think hide")
    child.wait("displayed: hide")
    child.line("three")
    child.wait("(?s)The answer.*The answer")
    assert "deep thought" not in child.text()


def test_the_last_message_is_edited_in_an_editor(terminal, server, tmp_path):
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nsed -i s/cats/dogs/ "$1"\n')
    editor.chmod(0o755)
    server.scripts = [["About cats."], ["About dogs."], ["More."]]
    child = terminal("--attach", server.url, EDITOR=str(editor), VISUAL=str(editor))
    child.line("tell me about cats")
    child.wait("About cats.")
    child.wait_prompt()
    child.line("/edit")
    child.wait("About dogs.")
    assert [m["content"] for m in server.requests[1]["messages"]] == ["tell me about dogs"]
    child.wait_prompt()
    child.send("more cats\x07")  # Ctrl-G
    child.wait("> more dogs")
    child.line("")
    child.wait("More.")
    assert server.requests[2]["messages"][-1]["content"] == "more dogs"


def test_lines_typed_before_come_back(terminal, server):
    server.scripts = [["Answered."], ["two"]]
    child = terminal("--attach", server.url)
    child.line("a question worth asking twice")
    child.wait("Answered.")
    child.kill()
    child = terminal("--attach", server.url)
    child.send("\x1b[A")  # waits in the line editor until the history has been read
    child.wait("> a question worth asking twice")
    child.line("")
    child.wait("two")


def test_lines_are_not_kept_where_nothing_is_saved(terminal, server, home):
    server.scripts = [["Answered."]]
    child = terminal("--attach", server.url, "--no-save")
    child.line("a secret")
    child.wait("Answered.")
    child.send("\x1b[A")  # within the chat they come back
    child.wait("> a secret\n(.*\n)*> a secret")
    child.kill()
    assert not [file for file in home.rglob("*") if file.is_file() and b"a secret" in file.read_bytes()]


def test_a_database_that_cannot_be_used_is_told_and_the_chat_goes_on(terminal, server, tmp_path):
    (tmp_path / "file").write_text("no folder")
    server.scripts = [["Hello."]]
    child = terminal("--attach", server.url, "--database", tmp_path / "file" / "chats.db")
    child.wait("The chat goes on unsaved")
    child.wait(r"unsaved, context")
    child.line("hi")
    child.wait("Hello.")
    other = tmp_path / "other.db"
    sqlite3.connect(other).executescript("CREATE TABLE a (b); PRAGMA user_version = 99")
    told = terminal("--attach", server.url, "--database", other).text()
    assert "is of a newer release" in told.replace("\n", "")


def test_what_a_kept_conversation_takes_is_not_known_until_it_is_sent(chat, terminal, server):
    server.scripts = [["one"]]
    assert chat("--attach", server.url, "-p", "a").status == 0
    terminal("--attach", server.url, "-c").wait(r"scripted, context \?/4096$")


def test_a_narrow_terminal_shows_first_that_a_chat_is_unsaved(terminal, server):
    child = terminal("--attach", server.url, "--no-save", columns=30)
    child.wait(r"scripted, unsaved, context [?0]…")


@pytest.mark.parametrize("keys", ["\x07", "\x18\x05", "/edit\r"])
def test_an_editor_that_is_not_there_is_told(terminal, server, keys):
    server.scripts = [["first"]]
    child = terminal("--attach", server.url, EDITOR="/no/such/editor")
    child.line("one")
    child.wait("first")
    child.wait_prompt()
    child.send(keys)
    child.wait("The editor /no/such/editor cannot be run: No such file or directory; set EDITOR to another")
    child.wait_prompt()


def test_bytes_that_are_no_utf8_are_told_and_end_no_chat(terminal, server):
    server.scripts = [["All well."]]
    child = terminal("--attach", server.url, EDITOR="true", VISUAL="true")
    child.write(b"caf\xe9\r")
    child.wait("The message is not UTF-8: byte 3 is 0xe9")
    child.wait_prompt()
    child.write(b"caf\xe9\x07")  # Ctrl-G
    child.wait("message.md is not UTF-8")
    child.wait("> caf")
    child.send("\x03")
    child.wait_prompt()
    child.line("hello")
    child.wait("All well")


def test_what_is_typed_is_utf8_whatever_a_locale_says(terminal, server):
    server.scripts = [["fine"]]
    child = terminal("--attach", server.url, PYTHONIOENCODING="latin-1")
    child.send("d\u00e9j\u00e0 \u65e5")
    child.wait("> d\u00e9j\u00e0 \u65e5")
    child.send("\r")
    child.wait("fine")
    assert server.requests[0]["messages"][0]["content"] == "d\u00e9j\u00e0 \u65e5"


def test_backslashes_that_are_pasted_are_part_of_the_message(terminal, server):
    server.scripts = [["All well."]]
    child = terminal("--attach", server.url)
    child.send("\x1b[200~docker run \\\r  -it \\\r  image\x1b[201~")
    child.wait("  image")
    child.line("\\")
    child.line("what is it?")
    child.wait("All well")
    assert server.requests[0]["messages"][0]["content"] == "docker run \\\n  -it \\\n  image\nwhat is it?"


@pytest.fixture
def shell():
    pexpect = pytest.importorskip("pexpect", reason="pexpect is not installed")
    started = pexpect.spawn("bash", ["--norc", "-i"], encoding="utf-8", dimensions=(30, 100), timeout=20)
    yield started
    started.close(force=True)


def _begin_chat(shell, server):
    shell.sendline(f"PROMPT_TOOLKIT_NO_CPR=1 {sys.executable} -m engine.cli.main chat --attach {server.url}")
    shell.expect("(?s)lists the commands[^>]*>")


def test_ctrl_z_gives_the_shell_back_at_the_prompt(shell, server):
    server.scripts = [["All well."]]
    _begin_chat(shell, server)
    shell.send("half\x1a")
    shell.expect("Stopped")
    shell.sendline("echo $((6 * 7))$((6 * 7)); fg")
    shell.expect("4242")
    shell.expect("half")
    shell.send(" and half\r")
    shell.expect("All well")
    assert server.requests[0]["messages"][0]["content"] == "half and half"


def test_after_ctrl_z_in_an_answer_what_is_typed_is_kept_again(shell, server):
    from server import HOLD

    server.scripts = [["Never ending", HOLD, "unheard"]]
    _begin_chat(shell, server)
    shell.send("go on\r")
    shell.expect("Never ending")
    shell.send("\x1a")
    shell.expect("Stopped")
    shell.sendline("fg")
    shell.expect("chat --attach")
    end = time.monotonic() + 20
    while termios.tcgetattr(shell.child_fd)[3] & (termios.ECHO | termios.NOFLSH) != termios.NOFLSH:
        assert time.monotonic() < end, "what is typed is drawn into the answer, or is lost with Ctrl-C"
        time.sleep(0.02)
    shell.send("typed ahead\x03")
    shell.expect("Ctrl-C once more leaves")
    shell.expect("typed ahead")
