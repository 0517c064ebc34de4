"""The chat from its first prompt to its end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.console.notes import note
from engine.errors import EngineError

from .answer import Source
from .commands import Chat, LeaveError, obey, retell, words
from .conversation import Conversation
from .session import Session
from .settings import ENGINE, history_file
from .store import Store, StoreError
from .terminal import LEAVING, Piped, Terminal, Typed
from .tools import Tools

if TYPE_CHECKING:
    from engine.sampling import StructuredOutputs


def open_source(settings: Any, model: str | None) -> Source:
    """Who answers, by the settings. Raises EngineError."""
    if settings.attach:
        from .remote import Remote

        return Remote(settings.attach, model, settings.api_key or os.environ.get("OPENAI_API_KEY"))
    from engine.console.demo import model_or_demo
    from engine.console.opening import find_model
    from engine.console.options import EngineOptions

    from .local import open_local

    options = EngineOptions(**{name: getattr(settings, name) for name in ENGINE})
    local = open_local(find_model(model_or_demo(model)), {**options.settings(), "max_num_seqs": 1})
    for notice in local.notices():
        note(notice)
    return local


def open_store(settings: Any, needed: bool) -> Store | None:
    """Where conversations are kept; None with --no-save. Where that cannot be used now a sentence says so, or StoreError is
    raised where it is ``needed``."""
    if not settings.save:
        return None
    store = Store(settings.database)
    try:
        store.open()
    except StoreError as error:
        if needed:
            raise
        note(f"{error} The chat goes on unsaved.")
    return store


def resumed(store: Store | None, number: int | None) -> Conversation:
    """A conversation that is kept; the last one without a number. Raises StoreError."""
    if store is None:
        raise StoreError("There is no conversation to go on with where none is kept (--no-save).")
    return store.load(number)


def run(
    settings: Any,
    talk: Conversation,
    model: str | None,
    store: Store | None,
    form: StructuredOutputs | None,
    prompt: str | None,
    attached: str,
) -> bool:
    """Open the model, answer ``prompt`` and leave, or converse. ``attached`` goes before the first message. False where
    something that was piped in has been refused. Raises EngineError."""
    typed = prompt is None and sys.stdin.isatty() and sys.stdout.isatty()

    def status() -> str:
        return session.status()

    terminal: Terminal = _typed(settings, status) if typed else Piped()
    with terminal.quiet():  # from here on, since a message may be typed while the model loads
        source = open_source(settings, model)
        talk.model = source.reference
        session = Session(source, settings, talk, store, terminal.choose, form=form, tools=Tools(settings.tools))
        session.attached = attached
        if sys.stdout.isatty() and not _dumb():
            from .markdown import Streaming

            session.screen = partial(Streaming, markdown=settings.markdown)
        try:
            session.warn_of_the_unheard()
            if prompt is None:
                return _converse(session, terminal, typed)
            _once(session, prompt)
            return True
        finally:
            session.source.close()
            if store is not None:
                store.close()


def _dumb() -> bool:
    return os.environ.get("TERM", "dumb") in ("dumb", "unknown")


def _once(session: Session, prompt: str) -> None:
    if sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty():
        session.choose = _typed(session.settings, session.status).choose
    session.once = True
    session.say(prompt)
    if session.stopped:
        raise KeyboardInterrupt


def _typed(settings: Any, status: Callable[[], str]) -> Typed:
    return Typed(history_file() if settings.save else None, status, words(), settings.editing)


def _converse(session: Session, terminal: Terminal, typed: bool) -> bool:
    """Reads and answers messages until /exit, the end of the input, or two Ctrl-C. False where something that was piped in
    has been refused."""
    chat = Chat(session, terminal, lambda name: _change_model(session, name))
    if typed:
        note(f"{session.source.name}; /help lists the commands.")
    if session.talk.messages:
        retell(session.talk)
    leaving = refused = False
    while True:
        try:
            line = terminal.read()
        except EOFError:
            return typed or not refused
        except KeyboardInterrupt:
            if leaving:
                raise
            leaving = True
            note(LEAVING)
            continue
        except EngineError as error:  # what was piped in is no message
            refused = True
            note(str(error))
            continue
        try:
            obey(chat, line) if line.startswith("/") else chat.say(line)
        except LeaveError:
            return typed or not refused
        except EngineError as error:
            refused = True
            note(str(error))
        except KeyboardInterrupt:  # of a command
            session.stopped = True
            note(LEAVING)
        leaving, session.stopped = session.stopped, False


def _change_model(session: Session, name: str) -> None:
    """Another model goes on; where it cannot be opened, the one before does. Two are never loaded at once."""
    from engine.console.opening import find_model
    from engine.formats import open_checkpoint

    settings = session.settings
    if not settings.attach:
        open_checkpoint(find_model(name))  # what cannot be read is refused while the one before is there
    before = session.source.reference
    session.source.close()
    try:
        session.source = open_source(settings, name)
        session.warn_of_the_unheard()
    except EngineError:
        session.source = open_source(settings, before)
        raise
    finally:
        session.talk.model = session.source.reference
        session.forget_usage()
