"""The terminal that a person types in: line editing, history, messages of several lines, choices."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from engine.console.notes import note, visible
from engine.console.texts import MAX_TEXT, check_size, check_utf8, read_text_file
from engine.errors import UsageError

QUOTES = '"""'
LEAVING = "Press Ctrl-C once more or Ctrl-D to leave; /help tells more."


def unfinished(text: str) -> bool:
    """Whether a message goes on in the next line: it began with three quotes that are not closed, or ends in a backslash."""
    if text.startswith(QUOTES):
        return len(text) < 2 * len(QUOTES) or not text.rstrip().endswith(QUOTES)
    return text.endswith("\\")


def message(text: str) -> str:
    """What was piped in, without the marks of several lines."""
    return unquoted(text) if text.startswith(QUOTES) else text.replace("\\\n", "\n")


def unquoted(text: str) -> str:
    """A text without the three quotes around it, if it has them."""
    return text.rstrip()[len(QUOTES) : -len(QUOTES)].strip("\n") if text.startswith(QUOTES) else text


def shortest(choices: Sequence[str]) -> dict[str, str]:
    """The fewest first letters that are one choice's alone."""
    found = {}
    for choice in choices:
        letters = next(n for n in range(1, len(choice) + 1) if sum(c.startswith(choice[:n]) for c in choices) == 1)
        found[choice[:letters]] = choice
    return found


class Terminal(Protocol):
    """Where messages come from."""

    def read(self) -> str:
        """The next message or command. Raises EOFError at the end, KeyboardInterrupt for Ctrl-C on an empty line."""

    def choose(self, question: str, choices: Sequence[str]) -> str:
        """One of the choices; the last if nobody can be asked."""

    def edit(self, text: str) -> str:
        """The text as the person leaves it in an editor."""

    def quiet(self) -> AbstractContextManager[None]:
        """Between prompts, what is typed is not drawn into what is written; the next prompt has it."""


class Piped:
    """Lines of stdin; nobody can be asked. A message that is too large is the last: what follows may have no end."""

    def __init__(self) -> None:
        self._ended = False

    def read(self) -> str:
        if self._ended:
            raise EOFError
        text = _line("> ")
        while True:
            self._ended = len(text) > MAX_TEXT
            check_size(len(text), "The message")
            if not unfinished(text):
                return message(check_utf8(text, "The message"))
            try:
                text += "\n" + _line("  ")
            except EOFError:
                raise UsageError(
                    f"The input ends within a message, which is not sent: {QUOTES} closes it, and a last line ends without a"
                    " backslash."
                ) from None

    def choose(self, question: str, choices: Sequence[str]) -> str:
        note(f"{question} Nobody can be asked here: {choices[-1]}.")
        return choices[-1]

    def edit(self, text: str) -> str:
        raise UsageError("There is no terminal for an editor; give the text: /edit TEXT.")

    def quiet(self) -> AbstractContextManager[None]:
        return nullcontext()


def _line(prompt: str) -> str:
    """The next line of stdin, with what is no UTF-8 in it kept for the message's end to tell. Who types it sees the prompt."""
    if sys.stdin.isatty():
        print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.buffer.readline(MAX_TEXT + 1)
    if not line:
        raise EOFError
    return line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", "surrogateescape")


class Typed:
    """A person at a terminal. ``status`` gives the line below the prompt, ``words`` the commands to complete."""

    def __init__(self, history: Path | None, status: Callable[[], str], words: Sequence[str], editing: str) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.enums import EditingMode
        from prompt_toolkit.styles import Style

        self._status = status
        self._cooked: list[Any] | None = None  # the terminal's modes outside the chat
        self._quiet: list[Any] | None = None  # those that it has while nothing is asked for
        self._ahead: list[str] = []  # what was typed where a choice was asked for
        self._style = Style.from_dict({"bottom-toolbar": "noreverse fg:ansibrightblack"})
        self._session: PromptSession[str] = PromptSession(
            history=_history(history),
            multiline=True,
            key_bindings=_keys(self._edit_buffer),
            prompt_continuation="  ",
            bottom_toolbar=self._toolbar,
            style=self._style,
            completer=WordCompleter(list(words), sentence=True),
            complete_while_typing=False,
            enable_suspend=True,  # or Ctrl-Z would be a letter of the message
            editing_mode=EditingMode.VI if editing == "vi" else EditingMode.EMACS,
        )

    def _toolbar(self) -> Any:
        width = max(2, self._session.output.get_size().columns - 1)
        status = visible(self._status())
        return [("class:bottom-toolbar", status if len(status) <= width else f"{status[: width - 1]}…")]

    def read(self) -> str:
        ahead, self._ahead = "\n".join(self._ahead), []
        while True:
            try:
                with self._asking():
                    typed = self._session.prompt("> ", default=ahead)
                return unquoted(check_utf8(typed, "The message"))
            except KeyboardInterrupt:
                if not self._session.default_buffer.text:
                    raise
                ahead = ""

    def choose(self, question: str, choices: Sequence[str]) -> str:
        from prompt_toolkit import prompt

        print(visible(question), file=sys.stderr, flush=True)
        wanted = ", ".join(f"[{short}]{choice[len(short) :]}" for short, choice in shortest(choices).items())
        while True:
            try:
                with self._asking():
                    typed = prompt(
                        f"{wanted}? ", bottom_toolbar=self._toolbar, style=self._style, enable_suspend=True
                    ).strip()
            except (EOFError, KeyboardInterrupt):
                return choices[-1]
            found = [choice for choice in choices if typed and choice.startswith(typed.lower())]
            if len(found) == 1:
                return found[0]
            if typed and not found:
                self._ahead.append(typed)
                note(f"The answer is one of {', '.join(choices)}; what was typed waits for the next prompt.")

    def _edit_buffer(self, buffer: Any) -> None:
        from prompt_toolkit.document import Document

        try:
            text = self.edit(buffer.text)
        except UsageError as error:
            note(str(error))
        else:
            buffer.document = Document(text, len(text))

    def edit(self, text: str) -> str:
        try:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "message.md"
                file.write_text(text, encoding="utf-8", errors="surrogateescape")
                self._run_editor(file)
                return read_text_file(file).rstrip("\n")
        except OSError as error:  # a full disk, say
            reason = error.strerror or error
            raise UsageError(
                f"The text cannot be written for an editor: {reason}; TMPDIR names another folder."
            ) from error

    def _run_editor(self, file: Path) -> None:
        command = os.environ.get("VISUAL") or os.environ.get("EDITOR") or shutil.which("nano") or "vi"
        try:
            with self._asking(), _modes(self._cooked):
                status = subprocess.call([*shlex.split(command), str(file)])
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error  # shlex's errors have none
            raise UsageError(f"The editor {command} cannot be run: {reason}; set EDITOR to another.") from error
        if status != 0:
            raise UsageError(f"The editor {command} ended with status {status}; nothing is changed.")

    @contextmanager
    def quiet(self) -> Iterator[None]:
        self._cooked = termios.tcgetattr(sys.stdin.fileno())
        quiet = [*self._cooked]
        quiet[0] &= ~termios.ICRNL  # Enter stays Enter, for the prompt that reads it later
        quiet[3] = quiet[3] & ~(termios.ECHO | termios.ICANON) | termios.NOFLSH  # Ctrl-C takes away nothing typed
        before = signal.signal(signal.SIGCONT, self._on_continue)
        try:
            with _modes(quiet):
                self._quiet = quiet
                yield
        finally:
            self._quiet = None
            signal.signal(signal.SIGCONT, before)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """While the prompt, or an editor, has modes of its own."""
        quiet, self._quiet = self._quiet, None
        try:
            yield
        finally:
            self._quiet = quiet

    def _on_continue(self, number: int, frame: FrameType | None) -> None:
        """After Ctrl-Z and fg the terminal has the shell's modes."""
        if self._quiet is not None and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp():
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, self._quiet)


@contextmanager
def _modes(modes: list[Any] | None) -> Iterator[None]:
    """The terminal in these modes; as it is with None."""
    if modes is None:
        yield
        return
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    termios.tcsetattr(number, termios.TCSADRAIN, modes)
    try:
        yield
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _keys(edit: Callable[[Any], None]) -> Any:
    """``edit`` changes a buffer in an editor."""
    from prompt_toolkit.application import run_in_terminal
    from prompt_toolkit.document import Document
    from prompt_toolkit.filters import completion_is_selected, emacs_mode, vi_navigation_mode
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter", filter=~completion_is_selected)
    def _(event: Any) -> None:
        buffer = event.current_buffer
        if unfinished(buffer.text) and not buffer.text.startswith(QUOTES):
            goes_on = buffer.text[:-1] + "\n"  # here, since a backslash that was pasted is part of the message
            buffer.document = Document(goes_on, len(goes_on))
        elif unfinished(buffer.text):
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event: Any) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add("c-g")
    @keys.add("c-x", "c-e", filter=emacs_mode)
    @keys.add("v", filter=vi_navigation_mode)
    def _(event: Any) -> None:
        run_in_terminal(partial(edit, event.current_buffer))

    return keys


def _history(path: Path | None) -> Any:
    """The lines of earlier chats; those of this one alone without a file, or where none can be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    if path is None:
        return InMemoryHistory()

    class Kept(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError):  # a full disk loses the line's history, and nothing else
                super().store_string(string)

    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    except OSError:
        return InMemoryHistory()
    return Kept(str(path))
