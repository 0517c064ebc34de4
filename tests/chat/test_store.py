"""Conversations in SQLite: kept whole, by several processes at once, and what a bad disk costs."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from engine.chat.conversation import Conversation, Message, ToolCall
from engine.chat.store import Store, StoreError


def _text(rng: np.random.Generator) -> str:
    alphabet = list("ab \n\"'%_\\é東🙂\x00")
    return "".join(rng.choice(alphabet, rng.integers(0, 40)))


def _message(rng: np.random.Generator) -> Message:
    calls = tuple(ToolCall(_text(rng), _text(rng), _text(rng)) for _ in range(rng.integers(0, 3)))
    role = str(rng.choice(["user", "assistant", "tool"]))
    return Message(role, _text(rng), _text(rng), calls, _text(rng) if rng.integers(2) else None)


def test_whatever_is_done_to_a_conversation_is_kept(tmp_path):
    rng = np.random.default_rng()
    store = Store(tmp_path / "c.db")
    talk = Conversation("m", "s", [])
    for _ in range(60):
        kind = rng.integers(4)
        if kind == 0 and talk.messages:
            del talk.messages[int(rng.integers(len(talk.messages))) :]
        elif kind == 1 and talk.messages:
            at = int(rng.integers(len(talk.messages)))
            talk.messages[at] = replace(talk.messages[at], content=_text(rng))
        else:
            talk.messages += [_message(rng) for _ in range(rng.integers(1, 4))]
        talk.summary, talk.start = _text(rng), int(rng.integers(5))
        talk.title = f"t{rng.integers(9)}"
        assert store.save(talk) is None
        assert Store(tmp_path / "c.db").load(talk.id) == talk
    assert len(store.list()) == 1


def test_another_process_that_begins_the_database_is_waited_for(tmp_path):
    first = sqlite3.connect(tmp_path / "c.db", isolation_level=None, check_same_thread=False)
    first.execute("BEGIN IMMEDIATE")
    ends = threading.Timer(0.3, first.rollback)
    ends.start()
    assert Store(tmp_path / "c.db").list() == []
    ends.join()
    first.close()


def test_many_processes_begin_and_use_one_database_at_once(tmp_path):
    code = (
        "import sys; from pathlib import Path; from engine.chat.store import Store\n"
        "from engine.chat.conversation import Conversation, Message\n"
        "store, talk = Store(Path(sys.argv[1])), Conversation()\n"
        "for n in range(20):\n"
        "    talk.messages.append(Message('user', f'{sys.argv[2]} {n}')); assert store.save(talk) is None\n"
    )
    path = tmp_path / "new" / "c.db"
    running = [subprocess.Popen([sys.executable, "-c", code, path, str(n)]) for n in range(5)]
    assert [process.wait(60) for process in running] == [0] * 5
    store = Store(path)
    kept = [store.load(each.id).messages for each in store.list()]
    assert sorted(messages[0].content for messages in kept) == [f"{n} 0" for n in range(5)]
    assert all([m.content.split()[1] for m in messages] == [str(n) for n in range(20)] for messages in kept)


def test_a_conversation_continued_twice_becomes_two(tmp_path):
    first, second = Store(tmp_path / "c.db"), Store(tmp_path / "c.db")
    talk = Conversation(messages=[Message("user", "a")])
    first.save(talk)
    other = second.load()
    talk.messages.append(Message("assistant", "b"))
    other.messages.append(Message("assistant", "c"))
    assert first.save(talk) is None
    assert "was continued elsewhere; this one goes on as 2" in str(second.save(other))
    kept = [[m.content for m in first.load(n).messages] for n in (1, 2)]
    assert kept == [["a", "b"], ["a", "c"]]
    first.delete(1)
    talk.messages.append(Message("user", "d"))
    first.load(2)
    assert first.save(talk) is not None and len(first.list()) == 2


def test_search_takes_no_patterns(tmp_path):
    store = Store(tmp_path / "c.db")
    for text in ("100% of a_b", "100 of axb", "back\\slash"):
        store.save(Conversation(messages=[Message("user", "x"), Message("assistant", text)]))
    assert [len(store.list(query)) for query in ("100%", "a_b", "\\", "100", "BACK", "")] == [1, 1, 1, 2, 1, 3]


def test_a_full_disk_is_told_and_what_was_kept_stays(tmp_path):
    """A limit of the operating system on the size of files stands for the disk."""
    code = (
        "import resource, sys; from pathlib import Path; from engine.chat.store import Store, StoreError\n"
        "from engine.chat.conversation import Conversation, Message\n"
        "store, talk = Store(Path(sys.argv[1])), Conversation(messages=[Message('user', 'kept')])\n"
        "store.save(talk)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, -1))\n"
        "talk.messages.append(Message('assistant', 'x' * 200_000))\n"
        "try: store.save(talk)\n"
        "except StoreError as error: print(error)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))\n"
        "talk.messages[1:] = [Message('assistant', 'short')]; store.save(talk)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "c.db"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "cannot be used for conversations" in done.stdout, done
    assert [m.content for m in Store(tmp_path / "c.db").load().messages] == ["kept", "short"]


def test_what_is_no_database_is_told(tmp_path):
    (tmp_path / "c.db").write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match="cannot be used for conversations: file is not a database"):
        Store(tmp_path / "c.db").open()
    with pytest.raises(StoreError, match="cannot be used"):
        Store(tmp_path / "c.db" / "d.db").list()


@pytest.mark.parametrize("extra", ['{"reas', "[1]", '{"tool_calls": [[1]]}'])
def test_a_conversation_that_is_damaged_is_told(tmp_path, extra):
    store = Store(tmp_path / "c.db")
    for text in ("first", "second"):
        store.save(Conversation(messages=[Message("user", text)]))
    with sqlite3.connect(tmp_path / "c.db") as db:
        db.execute("UPDATE messages SET extra = ? WHERE conversation = 2", (extra,))
    db.close()
    with pytest.raises(StoreError, match=r"Conversation 2 in .* is damaged"):
        store.load()
    assert store.load(1).messages[0].content == "first"


def test_a_database_is_tried_again_until_it_can_be_used(tmp_path):
    (tmp_path / "folder").write_text("no folder yet")
    store = Store(tmp_path / "folder" / "c.db")
    for attempt in (store.open, store.list, lambda: store.save(Conversation())):
        with pytest.raises(StoreError, match="cannot be used"):
            attempt()
    (tmp_path / "folder").unlink()
    store.save(Conversation(messages=[Message("user", "kept")]))
    assert store.list()[0].name == "kept" and store.is_open


def test_what_was_kept_can_be_read_where_nothing_can_be_written(tmp_path):
    """A folder in the place of a file that SQLite makes beside a database stands for a medium that is read alone."""
    store = Store(tmp_path / "c.db")
    store.save(Conversation(messages=[Message("user", "kept")]))
    store.close()
    (tmp_path / "c.db-shm").mkdir()
    again = Store(tmp_path / "c.db")
    talk = again.load()
    assert talk.messages[0].content == "kept" and again.list()[0].name == "kept"
    with pytest.raises(StoreError, match="readonly"):
        again.save(talk)


@pytest.mark.parametrize("number", [-1, 0, 2, 1 << 63, 10**40])
def test_a_number_that_is_no_conversation_s_is_told(tmp_path, number):
    store = Store(tmp_path / "c.db")
    store.save(Conversation("m", "s", [Message("user", "hello")]))
    for refused in (store.load, store.delete):
        with pytest.raises(StoreError, match=f"There is no conversation {number} in"):
            refused(number)
    assert len(store.list()) == 1
