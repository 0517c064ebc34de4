"""The chat's parts without a model: reasoning, calls, Markdown's blocks, input of several lines, settings, tools."""

from __future__ import annotations

import errno
import json
import tempfile
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from engine.chat.conversation import Conversation, Message, ToolCall
from engine.chat.markdown import finished_blocks
from engine.chat.settings import ToolSetting, change, load_settings
from engine.chat.terminal import Typed, message, shortest, unfinished
from engine.chat.tools import DECLINED, Tools
from engine.errors import RequestError, UsageError


def test_blocks_that_are_finished_stay_as_they_are():
    blocks = [
        "# A\n",
        "text\nmore\n",
        "```py\na\n\n\nb\n```\n",
        "- one\n\n  inside\n- two\n",
        "| a |\n|---|\n| 1 |\n",
        "end\n",
    ]
    rng = np.random.default_rng()
    text = "\n".join(rng.permutation(blocks))
    ends = [finished_blocks(text[:n]) for n in range(len(text) + 1)]
    assert ends == sorted(ends) and ends[-1] > 0
    for end in set(ends) - {0}:
        assert text[:end].endswith("\n\n") and text[:end].count("```") % 2 == 0
        assert text[end] not in " \n"


def test_messages_of_several_lines():
    assert unfinished('"""a') and unfinished('"""') and unfinished("a\\") and not unfinished('"""a"""')
    assert message('"""\na\nb"""') == "a\nb" and message("a\\\nb") == "a\nb" and message("plain") == "plain"


def test_a_text_that_cannot_be_written_for_an_editor_ends_no_chat(monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(Path, "write_text", Mock(side_effect=full))
    with pytest.raises(UsageError, match="written for an editor: No space left on device; TMPDIR"):
        Typed.edit(Typed.__new__(Typed), "text")
    monkeypatch.setattr(tempfile, "TemporaryDirectory", Mock(side_effect=full))
    with pytest.raises(UsageError, match="written for an editor"):
        Typed.edit(Typed.__new__(Typed), "text")


def test_letters_that_choose_are_one_choice_s_alone():
    assert list(shortest(("summarize", "drop", "stop"))) == ["su", "d", "st"]
    assert list(shortest(("yes", "no"))) == ["y", "n"]


def test_flags_come_before_the_environment_and_that_before_the_file(tmp_path, monkeypatch):
    file = tmp_path / "config.toml"
    file.write_text('temperature = 0.1\ntop_p = 0.2\nthink = "fold"\nstop = ["a", "b"]\n')
    monkeypatch.setenv("ENGINE_CONFIG", str(file))
    monkeypatch.setenv("ENGINE_TOP_P", "0.3")
    monkeypatch.setenv("ENGINE_MARKDOWN", "false")
    settings = load_settings({"temperature": 0.9})
    assert (settings.temperature, settings.top_p, settings.think, settings.markdown) == (0.9, 0.3, "fold", False)
    assert settings.stop == ["a", "b"] and settings.max_batch_tokens is None
    change(settings, "max_tokens", "7")
    change(settings, "stop", "END")
    assert (settings.max_tokens, settings.stop) == (7, ["END"])
    change(settings, "max_tokens", "none")
    assert settings.max_tokens is None
    with pytest.raises(UsageError, match="max_tokens is '-1'"):
        change(settings, "max_tokens", "-1")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a = ", "no TOML file"),
        ("colour = 1", r"no setting colour.* It comes from .*config\.toml\."),
        ("temperature = 'x'", r"temperature.* It comes from .*config\.toml\."),
        ("\xff", "not UTF-8"),
    ],
)
def test_a_wrong_file_is_told(tmp_path, monkeypatch, text, said):
    (tmp_path / "config.toml").write_bytes(text.encode("latin-1"))
    monkeypatch.setenv("ENGINE_CONFIG", str(tmp_path / "config.toml"))
    with pytest.raises(UsageError, match=said):
        load_settings({})


def test_a_wrong_variable_is_told(monkeypatch):
    monkeypatch.setenv("ENGINE_TEMPERATURE", "abc")
    with pytest.raises(UsageError, match=r"temperature is 'abc'.* It comes from ENGINE_TEMPERATURE\."):
        load_settings({})
    assert load_settings({"temperature": 0.5}).temperature == 0.5
    with pytest.raises(UsageError, match=r"temperature is 'x'[^.]*\.$"):
        load_settings({"temperature": "x"})


def test_a_file_that_is_named_has_to_be_there(tmp_path, monkeypatch):
    assert load_settings({}).temperature == 1.0
    monkeypatch.setenv("ENGINE_CONFIG", str(tmp_path / "nothing.toml"))
    with pytest.raises(UsageError, match=r"ENGINE_CONFIG is .*nothing\.toml, and there is no such file"):
        load_settings({})


def test_settings_that_no_request_could_have_are_refused_at_once(monkeypatch):
    settings = load_settings({})
    for name, value in (("top_p", "7"), ("temperature", "-3"), ("max_tokens", str(1 << 40)), ("seed", "-1")):
        with pytest.raises(RequestError, match=f"^{name} is .*; it must be"):
            change(settings, name, value)
        monkeypatch.setenv(f"ENGINE_{name.upper()}", value)
        with pytest.raises(RequestError, match=f"^{name} is"):
            load_settings({})
        monkeypatch.delenv(f"ENGINE_{name.upper()}")
    assert (settings.top_p, settings.temperature, settings.max_tokens, settings.seed) == (1.0, 1.0, None, None)


def twice(number: int, word: str = "x") -> dict[str, object]:
    """Doubles a number."""
    return {"result": number * 2, "word": word}


def _tools(**settings) -> Tools:
    return Tools({"t": ToolSetting(**settings)})


def _yes(question, choices):
    return "yes"


def test_functions_are_tools():
    tools = _tools(function=f"{__name__}:twice")
    described = tools.described()[0]["function"]
    assert described["description"] == "Doubles a number." and described["parameters"]["required"] == ["number"]
    assert json.loads(tools.run(ToolCall("1", "t", '{"number": 4}'), _yes).text) == {"result": 8, "word": "x"}
    assert "number" in tools.run(ToolCall("1", "t", '{"number": "four"}'), _yes).text
    asked = []
    for arguments in ("{", "[]", "{}", '{"number": 1, "other": 2}'):
        assert (
            "wrong" in (said := tools.run(ToolCall("1", "t", arguments), lambda *a: asked.append(a)).text)
            or "JSON" in said
        )
    assert not asked, "a call that cannot be run was shown for approval"
    assert tools.run(ToolCall("1", "t", '{"number": 4}'), lambda q, c: "no").text == DECLINED
    assert tools.run(ToolCall("1", "t", '{"number": 4}'), lambda q, c: "stop").stopped


def test_commands_are_tools_that_fail_by_their_status_and_end_in_time():
    assert "[exit status 3]" in _tools(command="echo out; exit 3").run(ToolCall("1", "t", "{}"), _yes).text
    start = time.monotonic()
    slow = _tools(command="sleep 60 & sleep 60", timeout=0.3).run(ToolCall("1", "t", "{}"), _yes)
    assert "took longer than 0.3 s" in slow.text and time.monotonic() - start < 20
    long = _tools(command="yes | head -c 100000").run(ToolCall("1", "t", "{}"), _yes).text
    assert "cut after 16384 of 100000" in long


@pytest.mark.parametrize("wrong", [{}, {"command": "a", "function": "b:c"}, {"function": "no_such_module:f"}])
def test_wrong_tools_are_told(wrong):
    with pytest.raises(UsageError, match="tool t"):
        _tools(**wrong)


def test_undo_takes_the_whole_turn_and_what_hides_it():
    talk = Conversation(messages=[Message(role, str(n)) for n, role in enumerate(["user", "assistant", "tool"] * 3)])
    talk.start, talk.summary = 9, "all of it"
    assert talk.undo() == "6" and len(talk.messages) == 6 and (talk.start, talk.summary) == (0, None)
    assert talk.undo() == "3" and talk.undo() == "0" and talk.undo() is None
