"""What a message that begins with a slash does."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.console.notes import visible
from engine.console.texts import read_text_file
from engine.errors import UsageError

from .context import summarize
from .conversation import Conversation
from .settings import LIVE, change
from .store import exported

if TYPE_CHECKING:
    from .session import Session
    from .terminal import Terminal


class LeaveError(Exception):
    """The chat ends."""


@dataclass(frozen=True)
class Chat:
    """What commands act on. ``open_model`` gives another source of answers in place of the session's."""

    session: Session
    terminal: Terminal
    open_model: Callable[[str], None]

    def say(self, text: str) -> None:
        """A message of the person's, unless it is empty. Raises EngineError when it is refused."""
        if text.strip():
            self.session.say(text)


@dataclass(frozen=True)
class Command:
    name: str
    argument: str
    what: str
    run: Callable[[Chat, str], None]


def obey(chat: Chat, line: str) -> None:
    """Raises UsageError for what is no command, LeaveError at the end, and what a command raises."""
    name, _, rest = line[1:].strip().partition(" ")
    command = next((c for c in COMMANDS if c.name == name), None)
    if command is None:
        raise UsageError(
            f"There is no command /{name}; /help lists them. A message may begin with a space and a slash."
        )
    command.run(chat, rest.strip())


def words() -> list[str]:
    """The commands, for completion."""
    return [f"/{command.name}" for command in COMMANDS]


def tell(text: str) -> None:
    """Lines for the person, on stderr, so that stdout has the answers alone."""
    print(visible(text), file=sys.stderr, flush=True)


def _help(chat: Chat, rest: str) -> None:
    width = max(len(f"{c.name} {c.argument}") for c in COMMANDS)
    _tell_wrapped([f"  /{f'{c.name} {c.argument}':<{width}}  {c.what}" for c in COMMANDS], indent=width + 5)
    keys = (
        'Enter sends; Alt-Enter, Ctrl-J or a backslash begins a new line, and """ begins and ends a message of several;'
        " Ctrl-G opens an editor. Ctrl-C stops an answer, and once more leaves."
    )
    _tell_wrapped([keys], indent=0)


def _tell_wrapped(lines: Sequence[str], indent: int) -> None:
    width = max(shutil.get_terminal_size().columns, indent + 20)
    tell("\n".join(textwrap.fill(line, width, subsequent_indent=" " * indent) for line in lines))


def _set(chat: Chat, rest: str) -> None:
    name, _, value = rest.partition(" ")
    change(chat.session.settings, name, value.strip())
    if name == "system":
        chat.session.talk.system = chat.session.settings.system
        chat.session.forget_usage()
    _show(chat, name)


def _show(chat: Chat, rest: str) -> None:
    names = [rest] if rest else LIVE
    wrong = next((name for name in names if name not in LIVE), None)
    if wrong:
        raise UsageError(f"There is no setting {wrong!r} to show; there are {', '.join(LIVE)}.")
    session = chat.session
    shown = {name: json.dumps(session.setting(name)) for name in names}
    shown |= {name: "as the server has it" for name in names if session.left_to_source(name)}
    tell("\n".join(f"  {name} = {value}" for name, value in shown.items()))


def _system(chat: Chat, rest: str) -> None:
    talk = chat.session.talk
    if rest:
        talk.system = None if rest == "none" else rest
        chat.session.forget_usage()
    tell(f"The system message: {talk.system}" if talk.system else "There is no system message.")


def _model(chat: Chat, rest: str) -> None:
    if rest:
        chat.open_model(rest)
    tell(f"The model is {chat.session.source.name}.")


def _save(chat: Chat, rest: str) -> None:
    session = chat.session
    if rest.endswith((".md", ".json")):
        file = _file(rest)
        write_new(file, exported(session.talk, file.suffix[1:]))
        tell(f"Written to {file}.")
        return
    if session.store is None:
        raise UsageError("This chat keeps nothing (--no-save); /save FILE.md or /save FILE.json writes it to a file.")
    session.talk.title = rest or session.talk.title
    session.save()
    if not session.unsaved:
        tell(f"Conversation {session.talk.id}: {session.talk.name()}")


def _file(text: str) -> Path:
    """The file that a person means. Raises UsageError for what can be no file's name."""
    if "\0" in text:
        raise UsageError(f"{text} is no file's name, which holds no NUL.")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{text} begins with nobody's home; for a file of this name give ./{text}.") from error


def write_new(file: Path, text: str) -> None:
    """A file that was not there, and that is not there unless all was written. UsageError where it cannot be."""
    try:
        with file.open("x", encoding="utf-8", errors="backslashreplace") as out:  # a model's path may be no text
            try:
                out.write(text)
                out.flush()
            except OSError:
                file.unlink()
                raise
    except FileExistsError as error:
        raise UsageError(f"{file} is there already; name another file.") from error
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}.") from error


def _load(chat: Chat, rest: str) -> None:
    if chat.session.store is None:
        raise UsageError("This chat keeps nothing (--no-save), so there is nothing to load.")
    try:
        number = int(rest) if rest else None
    except ValueError as error:
        raise UsageError("/load takes a conversation's number; /list shows them.") from error
    talk = chat.session.store.load(number)
    talk.model = chat.session.source.reference
    chat.session.talk = talk
    chat.session.forget_usage()
    retell(talk)


_RETOLD = 2


def retell(talk: Conversation) -> None:
    """The last turns of a conversation that goes on."""
    tell(f"Conversation {talk.id}: {talk.name()} ({len(talk.messages)} messages)")
    starts = [i for i, message in enumerate(talk.messages) if message.role == "user"]
    for message in talk.messages[starts[-_RETOLD] if len(starts) >= _RETOLD else 0 :]:
        if message.role in ("user", "assistant") and message.content:
            tell(f"{'> ' if message.role == 'user' else ''}{message.content}")


_LISTED = 20


def _list(chat: Chat, rest: str) -> None:
    if chat.session.store is None:
        raise UsageError("This chat keeps nothing (--no-save), so there is nothing to list.")
    found = chat.session.store.list(rest, most=1 << 30)
    for each in found[:_LISTED]:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.updated))
        tell(f"  {each.id:>5}  {when}  {each.messages:>4} messages  {each.name}")
    if len(found) > _LISTED:
        tell(f"  and {len(found) - _LISTED} more; /list WORDS searches them, engine chat --list shows all.")
    if not found:
        tell("There is none." if rest else "There is no conversation yet.")


def _regen(chat: Chat, rest: str) -> None:
    chat.session.say_again(_last_message(chat))


def _last_message(chat: Chat) -> str:
    talk = chat.session.talk
    begin = talk.last_turn()
    if begin is None:
        raise UsageError("There is no message yet.")
    return talk.messages[begin].content


def _undo(chat: Chat, rest: str) -> None:
    said = chat.session.talk.undo()
    if said is None:
        raise UsageError("There is no turn yet.")
    chat.session.forget_usage()
    chat.session.save()
    tell(f"Taken back: {said}")


def _edit(chat: Chat, rest: str) -> None:
    before = _last_message(chat)
    text = rest or chat.terminal.edit(before)
    if not text.strip():
        raise UsageError("The message is empty; nothing is changed.")
    chat.session.say_again(text)


def _clear(chat: Chat, rest: str) -> None:
    old = chat.session.talk
    chat.session.talk = Conversation(model=old.model, system=old.system)
    chat.session.attached = ""
    chat.session.forget_usage()
    kept = f"; /load {old.id} goes back to the last one" if old.id is not None and not chat.session.unsaved else ""
    tell(f"A new conversation{kept}.")


def _compact(chat: Chat, rest: str) -> None:
    summarize(chat.session, keep=0)
    chat.session.save()


def _prompt(chat: Chat, rest: str) -> None:
    tell("\n".join(chat.session.source.exact(chat.session.ask())))


_COUNTED = 200


def _tokens(chat: Chat, rest: str) -> None:
    session, limit = chat.session, chat.session.source.limit
    messages = session.talk.sent()
    total = session.source.count(session.ask())
    if total is None:
        unknown = "What the conversation takes is not known before it is answered"
        known = unknown if session.used is None else f"The conversation took {session.used} when it was last sent"
        tell(f"{known}; the server does not count tokens.")
        return
    for message in messages[:_COUNTED]:
        alone = session.source.count(session.ask([message])) or 0
        tell(f"  {alone:>7}  {message['role']}: {' '.join(message['content'].split())[:60]}")
    if len(messages) > _COUNTED:
        tell(f"{'':>11}and {len(messages) - _COUNTED} more")
    tell(f"  {total:>7}  of {limit} in all")


def _read(chat: Chat, rest: str) -> None:
    if not rest:
        raise UsageError("/read takes a file's name.")
    chat.session.attached += as_attachment(_file(rest))
    tell(f"{rest} goes before the next message.")


def as_attachment(file: Path) -> str:
    """A file's text as a part of a message. Raises UsageError if it is no text."""
    text = read_text_file(file)
    fence = "```"
    while fence in text:
        fence += "`"
    name = os.fsencode(file.name).decode("utf-8", "replace")
    return f"{name}:\n{fence}\n{text.rstrip()}\n{fence}\n\n"


def _image(chat: Chat, rest: str) -> None:
    raise UsageError("Models see text alone in this release; describe the image, or /read a text.")


def _think(chat: Chat, rest: str) -> None:
    settings = chat.session.settings
    if rest in ("on", "off"):
        settings.reasoning = rest == "on"
        chat.session.warn_of_the_unheard()
    elif rest:
        change(settings, "think", rest)
    asked = {None: "as the model's template has it", True: "asked for", False: "not asked for"}[settings.reasoning]
    tell(f"Reasoning is {asked}; displayed: {settings.think} (of show, dim, fold, hide; on and off ask for it).")


def _stats(chat: Chat, rest: str) -> None:
    usages = chat.session.usages
    if not usages:
        raise UsageError("There is no answer yet.")
    tell("  prompt  cached  answer  first token    tok/s")
    for u in usages[-20:]:
        cells = [u.prompt_tokens, u.cached_tokens, u.answer_tokens]
        first = "-" if u.first_token_s is None else f"{u.first_token_s:.2f} s"
        speed = "-" if u.tokens_a_second is None else f"{u.tokens_a_second:.1f}"
        tell("".join(f"{'-' if c is None else c:>8}" for c in cells) + f"{first:>13}{speed:>9}")


def _info(chat: Chat, rest: str) -> None:
    session = chat.session
    lines = session.source.info()
    if session.store is None:
        lines.append(("saved", "no (--no-save)"))
    else:
        lines.append(("saved", f"{'not now' if session.unsaved else 'yes'}: {session.store.path}"))
    lines.append(("talk", f"{session.talk.id or 'new'}, {len(session.talk.messages)} messages"))
    tools = ", ".join(tool["function"]["name"] for tool in session.tools.described())
    lines.append(("tools", tools or "none"))
    tell("\n".join(f"  {name:<10}{value}" for name, value in lines))


def _exit(chat: Chat, rest: str) -> None:
    raise LeaveError


COMMANDS = (
    Command("help", "", "show this", _help),
    Command("set", "NAME VALUE", "change a setting for this chat", _set),
    Command("show", "[NAME]", "show the settings", _show),
    Command("system", "[TEXT]", "show or change the system message; none takes it away", _system),
    Command("model", "[MODEL]", "show the model, or go on with another", _model),
    Command("save", "[TITLE or FILE]", "name the conversation, or write it to FILE.md or FILE.json", _save),
    Command("load", "[NUMBER]", "go on with a conversation; the last one if no number is given", _load),
    Command("list", "[WORDS]", "list conversations, or search them", _list),
    Command("regen", "", "answer the last message anew", _regen),
    Command("undo", "", "take the last turn back", _undo),
    Command("edit", "[TEXT]", "change the last message in an editor, or to TEXT, and answer that", _edit),
    Command("clear", "", "begin a new conversation", _clear),
    Command("compact", "", "put a summary in the conversation's place", _compact),
    Command("prompt", "", "show the exact text and token ids that are sent", _prompt),
    Command("tokens", "", "show the tokens that each message takes", _tokens),
    Command("read", "FILE", "put a file's text before the next message", _read),
    Command("image", "FILE", "says that no model sees images yet", _image),
    Command("think", "[HOW]", "display reasoning: show, dim, fold, hide; ask for it: on, off", _think),
    Command("stats", "", "show tokens and times of the answers", _stats),
    Command("info", "", "show model, device, context and where the chat is kept", _info),
    Command("exit", "", "leave; so does Ctrl-D", _exit),
)


def table() -> str:
    """The commands as a Markdown table."""
    rows = [f"| `/{' '.join(filter(None, (c.name, c.argument)))}` | {c.what} |" for c in COMMANDS]
    return "\n".join(["| command | what it does |", "|---|---|", *rows])
