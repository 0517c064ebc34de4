"""engine chat with its input piped in: one message, many, commands, forms, a full context, conversations kept."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import tiny_models

from engine import LLM
from engine.chat.conversation import Conversation, Message
from engine.chat.store import Store

REFERENCE = ("--backend", "reference", "--temperature", "0")
CPU = ("--temperature", "0")


def test_one_message_through_the_template(chat, talker):
    asked = chat(talker, "-p", "hello", "--system", "short", "--max-tokens", 9, *REFERENCE)
    assert asked.status == 0 and re.fullmatch(r"[A-Za-z]{9}\n", asked.out), asked
    assert "The answer is cut: --max-tokens is 9." in asked.err and re.search(r"context \d+/32768", asked.err)
    sent = chat(talker, "-c", "--max-tokens", 9, *REFERENCE, given="/undo\nhello\n/undo\n/prompt\n")
    assert "<system>short<assistant>" in sent.err
    with LLM(talker, backend="reference") as llm:
        from engine import SamplingParams

        ids = llm.engine.encode("<system>short<user>hello<assistant>", add_special=False)
        params = SamplingParams(temperature=0, max_tokens=9)
        assert llm.generate([list(ids)], params)[0].outputs[0].text == asked.out.strip()


def test_what_is_piped_in_and_files_go_with_the_message(chat, talker, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("from a ``` file\n")
    done = chat(talker, "-p", "sum up", "-f", notes, "--max-tokens", 2, *REFERENCE, given="from a pipe\n")
    assert done.status == 0
    kept = json.loads(chat("--export", "json").out)
    assert kept["messages"][0]["content"] == "notes.txt:\n````\nfrom a ``` file\n````\n\nsum up\n\nfrom a pipe"
    assert kept["messages"][1]["content"] == done.out.strip() and len(kept["messages"]) == 2
    exported = chat("--export", "md", "--id", 1).out
    assert "## User" in exported and "from a pipe" in exported and done.out in exported
    missing = chat(talker, "-p", "x", "-f", tmp_path / "none", *REFERENCE)
    assert missing.status == 2 and "none cannot be read" in missing.err


def test_answers_keep_to_a_form(chat, talker, tmp_path):
    several = chat(talker, "--regex", "[ab]{4}", *REFERENCE, given="one\ntwo\n")
    assert re.fullmatch(r"([ab]{4}\n){2}", several.out)
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"enum": ["a longer text"]}))
    assert json.loads(chat(talker, "-p", "x", "--schema", schema, *REFERENCE).out) == "a longer text"


def test_commands_change_what_is_sent(chat, talker, tmp_path):
    lines = ["one", "/undo", "/system be brief", "two", "/regen", "/edit three", "/save the title", "/clear", "four"]
    lines += ["/load 1", "/set temperature 0.5", "/show temperature", "/set temperature warm", "/set nothing 1"]
    lines += ["/tokens", "/stats", "/info", "/list TITLE", "/image cat.png", "/think off", "/read none", "/exti"]
    lines += [f"/save {tmp_path}/out.md", f"/save {tmp_path}/out.md", "/help", "/prompt", "/exit", "not read"]
    done = chat(talker, "--max-tokens", 3, *REFERENCE, given="\n".join(lines) + "\n")
    assert done.status == 2 and len(done.out.splitlines()) == 5
    assert "Taken back: one" in done.err and "Conversation 1: the title" in done.err
    assert "<system>be brief<user>three<assistant>" in done.err
    assert "temperature = 0.5" in done.err and "temperature is 'warm'" in done.err
    assert "no setting 'nothing'" in done.err and "There is no command /exti" in done.err
    assert "does not know whether to reason" in done.err
    assert "see text alone" in done.err and "not asked for" in done.err and "none cannot be read" in done.err
    assert "out.md is there already" in done.err and "three" in (tmp_path / "out.md").read_text()
    assert re.search(r"1 +[\d-]+ [\d:]+ +2 messages  the title", done.err)
    listed = chat("--list").out.splitlines()
    assert len(listed) == 2 and "four" in chat("--search", "FOUR").out and chat("--search", "five").out == ""
    assert chat("--delete", 1).status == 0 and len(chat("--list").out.splitlines()) == 1
    assert "no conversation 1 " in chat("--id", 1, talker, *REFERENCE).err


def test_a_long_list_says_how_much_of_it_is_not_shown(chat, talker, home):
    assert chat(talker, "-p", "first", "--max-tokens", 1, *REFERENCE).status == 0
    with closing(Store(next(home.rglob("chats.db")))) as store:
        for n in range(24):
            store.save(Conversation(model="m", title=f"title {n}", messages=[Message("user", "a")]))
    done = chat(talker, *REFERENCE, given="/list\n/list title 1\n")
    assert done.err.count(" messages  ") == 20 + 11
    assert done.err.count("and 5 more; /list WORDS searches them, engine chat --list shows all.") == 1
    assert len(chat("--list").out.splitlines()) == 25


def test_the_cache_is_kept_across_turns_the_answer_included(chat, talker):
    """All full blocks of the conversation before, the last token alone not computed yet, are hits."""
    done = chat(talker, "--max-tokens", 50, *CPU, given="a first message\nand another\n/prompt\n/regen\n")
    used = [int(n) for n in re.findall(r"context (\d+)/", done.err)]
    cached = [int(n) for n in re.findall(r"(\d+) cached", done.err)]
    assert cached[0] == 0 and cached[1] == (used[0] - 1) // 16 * 16
    assert cached[2] >= cached[1]


def test_a_full_context_is_told_dropped_or_summarized(chat, talker):
    given = "a\n" + ("b" * 30 + "\n") * 4
    small = ("--max-context", 120, "--max-tokens", 10, *REFERENCE)
    stopped = chat(talker, *small, given=given)
    assert (
        stopped.status == 2 and "nothing was sent" in stopped.err and "Nobody can be asked here: stop." in stopped.err
    )
    answers = stopped.out.count("\n")
    assert 0 < answers < 5
    dropped = chat(talker, *small, "--context-full", "drop", given=given)
    assert "no longer sees" in dropped.err and len(dropped.out.splitlines()) == 5
    assert len(json.loads(chat("--export", "json").out)["messages"]) == 10, "what is kept was cut"
    summarized = chat(talker, *small[:1], 600, "--max-tokens", 40, *CPU, given="one\ntwo\n/compact\n/prompt\nthree\n")
    assert "2 oldest" not in summarized.err and "4 oldest messages" in summarized.err
    assert "<user>A summary of our conversation so far:" in summarized.err and "<user>one" not in summarized.err
    refused = chat(talker, "-p", "b" * 60, "--max-context", 20, *REFERENCE)
    assert refused.status == 2 and refused.err.count("\n") == 1 and "the context holds 20" in refused.err
    cut = chat(talker, "-p", "a", "--max-context", 60, *REFERENCE)
    assert "The answer is cut: the context of 60 tokens is full." in cut.err and "context 60/60" in cut.err


def test_what_the_template_refuses_is_told(chat, talker):
    alone = chat(talker, "-p", "forbidden", *REFERENCE)
    assert alone.status == 2 and "forbidden it is" in alone.err
    done = chat(talker, "--max-tokens", 3, *REFERENCE, given="forbidden\na\n")
    assert done.status == 2 and "forbidden it is" in done.err and len(done.out.splitlines()) == 1


def test_reasoning_of_a_template_that_begins_it(chat, tmp_path):
    opened = "{% if enable_thinking != false %}<think>\n{% endif %}"
    template = tiny_models.TEMPLATE.replace("<assistant>{% endif", f"<assistant>{opened}{{% endif")
    thinker = tiny_models.write_talker(tmp_path, template)
    regex = "[ab]{5}</think>\n\n[cd]{5}"
    hidden = chat(thinker, "-p", "x", "--reasoning", "--regex", regex, *REFERENCE)
    assert "changes nothing" not in hidden.err
    assert re.fullmatch("[cd]{5}\n", hidden.out)
    assert re.fullmatch(
        "[ab]{5}\n\n[cd]{5}\n", chat(thinker, "-p", "x", "--think", "show", "--regex", regex, *REFERENCE).out
    )
    assert re.search("> [ab]{5}\n\n[cd]{5}", chat("--export", "md").out)


def test_a_tool_of_a_model_that_runs_here_is_not_run_where_nobody_can_be_asked(chat, talker, home):
    (home / "config" / "engine").mkdir(parents=True)
    (home / "config" / "engine" / "config.toml").write_text(
        'tool_rounds = 2\n[tools.now]\ncommand = "touch $HOME/ran"\n'
    )
    call = re.escape('<tool_call>{"name": "now", "arguments": {}}</tool_call>')
    done = chat(talker, "-p", "x", "--regex", call, *REFERENCE)
    assert "no place for tools, so it is told of none" in done.err
    assert "The model asks for the tool now()" in done.err and "now is not run" in done.err
    assert not (home / "ran").exists()
    roles = [m["role"] for m in json.loads(chat("--export", "json").out)["messages"]]
    assert roles == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("/no/such/model",), "/no/such/model"),
        (("m", "--temperature", "-3"), "temperature"),
        (("m", "--think", "loudly"), "think"),
        (("--attach", "ftp://x"), "must be a server's URL"),
        (("--attach", "http://[x"), "must be a server's URL"),
        (("--attach", "a b"), "must be a server's URL"),
        (("--attach", "a" * 64), "must be a server's URL"),
        (("--attach", "localhost:9"), "cannot be reached"),
        (("m", "-c"), "no conversation"),
        (("m", "-c", "--database", "/dev/null/c.db"), "cannot be used for conversations"),
        (("--export", "pdf"), "must be md or json"),
        (("--list", "--delete", "1"), "Give one of --list, --export and --delete, not 2."),
    ],
)
def test_wrong_usage_is_one_line(chat, arguments, said):
    done = chat(*arguments)
    assert done.status == 2 and said in done.err and done.err.count("\n") == 1, done


def test_a_model_without_template_is_refused(chat, tmp_path):
    import numpy as np

    tiny_models.write_tokenizer(tmp_path)
    tiny_models.write_llama(tmp_path, np.random.default_rng())
    assert "no chat template" in chat(tmp_path, *REFERENCE).err


@pytest.mark.clock
def test_ten_thousand_lines_are_listed_in_a_fifth_of_a_second(chat, home):
    store = Store(home / "data" / "engine" / "chats.db")
    long = [Message("user" if n % 2 == 0 else "assistant", f"line {n} " * 10) for n in range(10_000)]
    store.save(Conversation(messages=long))
    for n in range(300):
        store.save(Conversation(messages=[Message("user", f"question {n}"), Message("assistant", "yes")]))
    store.close()

    def seconds(*arguments: str) -> float:
        start = time.perf_counter()
        assert chat(*arguments).status == 0
        return time.perf_counter() - start

    assert len(chat("--list").out.splitlines()) == 301 and "10000 messages" in chat("--search", "line 9998").out
    assert any(seconds("--list") < 0.2 for _ in range(10))
    assert any(seconds("--search", "line 9998") < 0.2 for _ in range(10))


def test_a_bare_prompt_loads_no_line_editor(talker):
    code = (
        "import sys, engine.cli.main as m;"
        f"m.run(['chat', {str(talker)!r}, '-p', 'x', '--max-tokens', '1', '--backend', 'reference']);"
        "sys.exit(str({'prompt_toolkit', 'rich', 'torch', 'markdown_it'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, input="", check=False)
    assert done.stderr.splitlines()[-1] == "set()", done


def test_the_makers_recommendation_is_the_default_and_what_is_said_goes_first(chat, talker, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(talker, folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.0, "top_k": 7}')
    done = chat(folder, "--backend", "cpu", given="/show temperature\n/show top_k\n/set top_k 3\n/show top_k\n")
    assert "temperature = 0.0" in done.out + done.err and "top_k = 7" in done.out + done.err
    assert "top_k = 3" in done.out + done.err
    answers = {chat(folder, "--backend", "cpu", "-p", "hello", "--max-tokens", 12).out for _ in range(3)}
    assert len(answers) == 1  # greedy
    monkeypatch.setenv("ENGINE_TEMPERATURE", "0.5")
    told = chat(folder, "--backend", "cpu", "--top-k", 9, given="/show temperature\n/show top_k\n")
    assert "temperature = 0.5" in told.out + told.err and "top_k = 9" in told.out + told.err


def test_what_cannot_be_sent_is_told_before_the_model_is_looked_for(chat, tmp_path):
    missing = chat("/no/such/model", "-p", "x", "-f", tmp_path / "none")
    assert missing.status == 2 and "none cannot be read" in missing.err and missing.err.count("\n") == 1
    for empty in ("", " "):
        assert "The message is empty" in chat("/no/such/model", "-p", empty, given="\n").err
    (tmp_path / "some").write_text("text")
    assert "/no/such/model" in chat("/no/such/model", "-p", "", "-f", tmp_path / "some").err


def test_paths_that_are_no_utf8(chat, talker, tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    shutil.copytree(talker, folder)
    (folder / os.fsdecode(b"\xfe.txt")).write_text("text")
    done = chat(folder, "-p", "x", "-f", folder / os.fsdecode(b"\xfe.txt"), "--max-tokens", 2, *REFERENCE)
    assert done.status == 0, done
    assert chat("-c", "-p", "y", "--max-tokens", 2, *REFERENCE).status == 0
    assert re.search(r"4 messages  .*\ufffd  ", chat("--list").out)
    saved = chat("-c", *REFERENCE, given=f"/save {tmp_path / 'a.json'}\n")
    kept = json.loads((tmp_path / "a.json").read_text())
    assert saved.status == 0 and kept["model"] == str(folder)
    assert kept["messages"][0]["content"] == "\ufffd.txt:\n```\ntext\n```\n\nx"


@pytest.mark.parametrize("wrong", [("-p", "a\udcff"), ("-p", "x", "--system", "a\udcff")])
def test_a_text_that_is_no_utf8_is_refused_before_anything_is_asked(chat, server, wrong):
    done = chat("--attach", server.url, *wrong)
    assert done.status == 2 and "is not UTF-8: byte 1 is 0xff." in done.err and not server.requests


def test_a_file_that_could_not_be_written_whole_is_not_there(tmp_path):
    """A limit of the operating system on the size of files stands for the disk."""
    code = (
        "import resource, sys; from pathlib import Path; from engine.chat.commands import write_new\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, -1)); file = Path(sys.argv[1])\n"
        "for size in (200_000, 9):\n"
        "    try: write_new(file, 'x' * size)\n"
        "    except Exception as error: print(error)\n"
        "    print(file.exists())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "a.md"], capture_output=True, text=True, check=False)
    assert done.stdout == f"{tmp_path}/a.md cannot be written: File too large.\nFalse\nTrue\n", done


def test_tokens_of_many_messages_are_listed_as_far_as_they_can_be_read(chat, talker, tmp_path):
    said = [Message(role, "a") for role in ("user", "assistant")] * 101
    with closing(Store(tmp_path / "many.db")) as store:
        store.save(Conversation(model=str(talker), messages=said))
    given = chat(talker, "-c", "--database", tmp_path / "many.db", "--backend", "reference", given="/tokens\n")
    listed = given.err.splitlines()
    assert "" not in listed and "           and 2 more" in listed
    assert sum(re.fullmatch(r" +\d+  [a-z]+: a", line) is not None for line in listed) == 200


def test_no_conversation_is_said(chat):
    assert chat("--search", "fox").err == "engine: No conversation has that.\n"
    assert chat("--list").err == "engine: There is no conversation yet.\n"


def test_help_keeps_to_the_width(chat, talker, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    told = chat(talker, *REFERENCE, given="/help\n").err
    assert max(map(len, told.splitlines())) <= 60
    assert "put a summary in the conversation's place" in " ".join(told.split())


def test_the_cache_is_for_one_conversation(chat, talker):
    told = chat(talker, "--max-context", 512, *REFERENCE, given="/info\n").err
    with LLM(talker, backend="reference", max_model_len=512, max_num_seqs=1) as llm:
        assert f"KV {llm.loaded.memory.kv / 1e6:.1f} MB" in told


def test_who_types_into_a_pipe_sees_a_prompt(server):
    server.scripts = [["Hello."]]
    keys, stdin = pty.openpty()
    command = [sys.executable, "-m", "engine.cli.main", "chat", "--attach", server.url, "--no-save"]
    os.write(keys, b"hi\\\nthere\n/exit\n")
    done = subprocess.run(command, stdin=stdin, capture_output=True, text=True, timeout=60, check=False)
    os.close(keys)
    os.close(stdin)
    assert (done.returncode, done.stdout) == (0, "Hello.\n")
    assert done.stderr.startswith(">   [") and done.stderr.endswith("> "), done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "/load \u00b2",
        f"/load {'9' * 5000}",
        "/read ~no-such-person/notes.txt",
        "/save ~no-such-person/x.md",
        "/read a\0b",
    ],
)
def test_a_command_that_cannot_be_done_ends_no_chat(chat, server, line):
    server.scripts = [["All well."]]
    done = chat("--attach", server.url, given=f"{line}\nhello\n")
    assert (done.status, done.out) == (2, "All well.\n") and "defect" not in done.err, done
