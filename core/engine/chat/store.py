"""Conversations in SQLite: each finished turn is one transaction, so a killed process loses none of them."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.answers import closes_reasoning, split_reasoning
from engine.errors import EngineError

from .conversation import Conversation, Message

_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS conversations (
    id INTEGER PRIMARY KEY AUTOINCREMENT, created REAL NOT NULL, updated REAL NOT NULL, version INTEGER NOT NULL,
    title TEXT NOT NULL, model TEXT NOT NULL, system TEXT, start INTEGER NOT NULL, summary TEXT, messages INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS by_update ON conversations (updated);
CREATE TABLE IF NOT EXISTS messages (
    conversation INTEGER NOT NULL REFERENCES conversations (id) ON DELETE CASCADE, position INTEGER NOT NULL,
    created REAL NOT NULL, role TEXT NOT NULL, content TEXT NOT NULL, extra TEXT NOT NULL,
    PRIMARY KEY (conversation, position)) WITHOUT ROWID;
"""
_BUSY_S = 5.0


class StoreError(EngineError):
    """Conversations cannot be kept or read."""


@dataclass(frozen=True)
class Listed:
    """A conversation in a list."""

    id: int
    updated: float
    name: str
    model: str
    messages: int


class Store:
    """The conversations of one database, opened when it is first used. Several processes may use it at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection: sqlite3.Connection | None = None
        self._saved: tuple[int, int, tuple[Message, ...]] = (0, 0, ())  # id, version and messages as they are kept

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    def open(self) -> None:
        """Raises StoreError where it cannot be; then the next use tries again."""
        with _told(self.path):
            self._db.execute("SELECT 1")

    @property
    def _db(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = _opened(self.path)
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def save(self, talk: Conversation) -> str | None:
        """Keep a conversation as it is, and give it an id if it has none. A sentence if it had been continued elsewhere
        meanwhile: then it is kept as a new one, and the other stays as it is. Raises StoreError."""
        with _told(self.path), self._transaction():
            known, version, before = self._saved if self._saved[0] == talk.id else (0, 0, ())
            row = self._db.execute("SELECT version FROM conversations WHERE id = ?", (known,)).fetchone()
            moved = talk.id is not None and (row is None or row[0] != version)
            old, number, now = talk.id, talk.id, time.time()
            if number is None or moved:
                before, version = (), 0
                values = (now, now, 0, "", "", 0, 0)
                columns = "created, updated, version, title, model, start, messages"
                number = self._db.execute(
                    f"INSERT INTO conversations ({columns}) VALUES (?,?,?,?,?,?,?)", values
                ).lastrowid
            assert number is not None
            same = next((i for i, (a, b) in enumerate(zip(before, talk.messages, strict=False)) if a != b), None)
            same = min(len(before), len(talk.messages)) if same is None else same
            self._db.execute("DELETE FROM messages WHERE conversation = ? AND position >= ?", (number, same))
            rows = [(number, same + i, now, m.role, m.content, m.extra()) for i, m in enumerate(talk.messages[same:])]
            self._db.executemany("INSERT INTO messages VALUES (?,?,?,?,?,?)", rows)
            self._db.execute(
                "UPDATE conversations SET updated=?, version=?, title=?, model=?, system=?, start=?, summary=?, messages=?"
                " WHERE id=?",
                (
                    now,
                    version + 1,
                    talk.name(),
                    _kept(talk.model),
                    talk.system,
                    talk.start,
                    talk.summary,
                    len(talk.messages),
                    number,
                ),
            )
        talk.id = number
        self._saved = (number, version + 1, tuple(talk.messages))
        return f"Conversation {old} was continued elsewhere; this one goes on as {number}." if moved else None

    def load(self, number: int | None = None) -> Conversation:
        """A conversation by its id, or the one last continued. Raises StoreError if there is none."""
        chosen = "id = ?" if number is not None else "? IS NULL ORDER BY updated DESC, id DESC LIMIT 1"
        columns = "id, model, system, start, summary, title, version"
        with _told(self.path), self._transaction("DEFERRED"):
            row = self._db.execute(f"SELECT {columns} FROM conversations WHERE {chosen}", (_sought(number),)).fetchone()
            if row is None:
                what = "no conversation yet" if number is None else f"no conversation {number}"
                raise StoreError(f"There is {what} in {self.path}; engine chat --list shows all.")
            found = self._db.execute(
                "SELECT role, content, extra FROM messages WHERE conversation = ? ORDER BY position", (row[0],)
            ).fetchall()
        try:
            messages = [Message.restored(*each) for each in found]
        except (ValueError, TypeError, AttributeError) as error:
            raise StoreError(
                f"Conversation {row[0]} in {self.path} is damaged, and cannot be read; engine chat --list shows the others."
            ) from error
        self._saved = (row[0], row[6], tuple(messages))
        return Conversation(os.fsdecode(row[1]), row[2], messages, row[3], row[4], row[5], row[0])

    def list(self, query: str = "", most: int = 50) -> list[Listed]:
        """Those last continued, latest first; with a query those in whose title or messages it is found."""
        pattern = "%" + "".join("\\" + c if c in "\\%_" else c for c in query) + "%"
        where = (
            "WHERE title LIKE ?1 ESCAPE '\\' OR EXISTS (SELECT 1 FROM messages WHERE conversation = id"
            " AND content LIKE ?1 ESCAPE '\\')"
            if query
            else ""
        )
        with _told(self.path):
            rows = self._db.execute(
                f"SELECT id, updated, title, model, messages FROM conversations {where} ORDER BY updated DESC, id DESC"
                " LIMIT ?2",
                (pattern, most),
            ).fetchall()
        return [Listed(number, when, name, os.fsdecode(model), count) for number, when, name, model, count in rows]

    def delete(self, number: int) -> None:
        """Forget a conversation for good. Raises StoreError if there is none of this id."""
        with _told(self.path), self._transaction():
            self._db.execute("DELETE FROM messages WHERE conversation = ?", (_sought(number),))
            if self._db.execute("DELETE FROM conversations WHERE id = ?", (_sought(number),)).rowcount == 0:
                raise StoreError(f"There is no conversation {number} in {self.path}; engine chat --list shows all.")

    @contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Iterator[None]:
        self._db.execute(f"BEGIN {kind}")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise


def _kept(model: str) -> str | bytes:
    """A model's name; a path that is no UTF-8 as bytes, since SQLite has no such texts."""
    try:
        model.encode()
    except UnicodeEncodeError:
        return os.fsencode(model)
    return model


def _sought(number: int | None) -> int | None:
    """As SQLite takes it, whose ids are from 1 to 2**63 - 1."""
    return number if number is None or 0 < number < 1 << 63 else 0


def _opened(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = not path.exists()
    db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
    try:
        if new:
            path.chmod(0o600)  # what people say to a model is theirs
        found = db.execute("PRAGMA user_version").fetchone()[0]
        if found > _VERSION:
            raise StoreError(f"{path} is of a newer release of engine; use that, or another --database.")
        if found < _VERSION:
            _write_ahead(db)
            db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")
        db.execute("PRAGMA synchronous = FULL")
    except BaseException as error:
        db.close()
        # Where no file can be made beside it, as on a medium that cannot be written, it can still be read.
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_CANTOPEN and path.is_file() and not new:
            return sqlite3.connect(f"{path.resolve().as_uri()}?immutable=1", uri=True, isolation_level=None)
        raise
    return db


def _write_ahead(db: sqlite3.Connection) -> None:
    """Sets the journal's mode, for whose locks SQLite does not wait."""
    end = time.monotonic() + _BUSY_S
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
        time.sleep(0.01)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise StoreError(f"{path} cannot be used for conversations: {reason}.") from error


def exported(talk: Conversation, form: str) -> str:
    """A conversation as ``md`` or ``json``."""
    if form == "json":
        whole = {"id": talk.id, "title": talk.name(), "model": talk.model, "system": talk.system}
        messages = [message.wire() for message in talk.messages]
        return json.dumps(whole | {"messages": messages}, ensure_ascii=False, indent=2) + "\n"
    lines = [f"# {talk.name()}", "", f"Model: {talk.model}"]
    if talk.system:
        lines += ["", "## System", "", talk.system]
    for message in talk.messages:
        lines += ["", f"## {message.role.capitalize()}", ""]
        thought, shown, _ = split_reasoning(message.content, closes_reasoning(message.content), finished=True)
        if thought or message.reasoning:
            quoted = (thought or message.reasoning).splitlines()
            lines += [*(f"> {line}".rstrip() for line in quoted), ""]
        lines += [shown] if shown else []
        lines += [f"`{call.name} {call.arguments}`" for call in message.tool_calls]
    return "\n".join(lines) + "\n"
