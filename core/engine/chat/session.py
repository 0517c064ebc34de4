"""A chat in progress: a conversation, who answers it, and where it is shown and kept."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

from engine.console.notes import note
from engine.errors import EngineError, RequestError, UsageError

from .answer import Answer, Ask, Source, TooLongError, Usage
from .context import ContextFullError, make_room
from .conversation import Conversation, Message
from .screen import Plain, Screen, status_line
from .settings import SAMPLING
from .store import Store, StoreError
from .tools import Tools, declined

Choose = Callable[[str, Sequence[str]], str]
"""Asks a person a question with some answers, of which it gives one; the last if nobody can be asked."""


@dataclass
class Session:
    """``choose`` asks the person; ``screen`` makes what an answer is written on; ``form`` is the one that answers must have;
    ``store`` None keeps nothing; ``usages`` are those of this session's answers."""

    source: Source
    settings: Any
    talk: Conversation
    store: Store | None
    choose: Choose
    screen: Callable[[str], Screen] = Plain
    form: Any = None
    tools: Tools = field(default_factory=Tools)
    usages: list[Usage] = field(default_factory=list)
    unsaved: bool = False
    attached: str = ""  # what /read has put before the next message
    stopped: bool = False
    once: bool = False  # it is left after one answer
    _latest: Answer = field(default_factory=Answer)
    tokens_a_character: float | None = None  # of what was last sent
    _used: int | None = None
    _warned: bool = False

    def __post_init__(self) -> None:
        self.unsaved = self.store is None or not self.store.is_open

    def setting(self, name: str) -> Any:
        """A setting's value: how to sample is the model's own recommendation where nobody has said otherwise; the system
        message is the conversation's."""
        if name == "system":
            return self.talk.system
        given = getattr(self.settings, name)
        return given if name in self.settings.model_fields_set else (self.source.sampling or {}).get(name, given)

    def left_to_source(self, name: str) -> bool:
        """Whether nobody has said how to sample here, and how the source does is not known."""
        said = name in self.settings.model_fields_set and getattr(self.settings, name) is not None
        return name in SAMPLING and self.source.sampling is None and not said

    def ask(self, messages: Sequence[Any] | None = None) -> Ask:
        """The conversation as it would be sent now."""
        s = self.settings
        options = {name: self.setting(name) for name in (*SAMPLING, "max_tokens") if not self.left_to_source(name)}
        variables = {} if s.reasoning is None else {"enable_thinking": s.reasoning}
        shown = self.talk.sent() if messages is None else messages
        return Ask(shown, options, self.form, self.tools.described(), variables)

    def warn_of_the_unheard(self) -> None:
        """Say what is asked for and cannot reach the model."""
        if self.tools.described() and not self.source.hears("tools"):
            note("The model's chat template has no place for tools, so it is told of none.")
        if self.settings.reasoning is not None and not self.source.hears("enable_thinking"):
            note("The model's chat template does not know whether to reason, so asking for it changes nothing.")

    def status(self, usage: Usage | None = None) -> str:
        """The status line; of an answer that is coming, where its ``usage`` is given."""
        last = usage or (self.usages[-1] if self.usages else Usage())
        used = self._used
        if usage is not None and usage.prompt_tokens is not None:
            used = usage.prompt_tokens + (usage.answer_tokens or 0)
        marks = ["unsaved"] if self.unsaved else []
        return status_line(self.source.name, used, self.source.limit, last, *marks)

    @property
    def used(self) -> int | None:
        """Tokens of context that the conversation took when it was last sent."""
        return self._used

    def forget_usage(self) -> None:
        """The conversation has changed, so that its tokens are not known until it is sent again."""
        self._used, self._warned = None, False

    def say(self, text: str) -> bool:
        """One turn: the person's message, the answer, and the tools that it asks for. Whether it was answered: a message
        that is refused, or stopped before anything came, is taken back. Raises EngineError if it is refused."""
        before = len(self.talk.messages)
        message = f"{self.attached}{text}"
        self.talk.messages.append(Message("user", message))
        self.stopped = False
        try:
            self._answer_rounds()
        finally:
            answered = any(m.role == "assistant" for m in self.talk.messages[before:])
            if not answered:
                del self.talk.messages[before:]
            else:
                self.attached = ""
                self.save()
        return answered

    def say_again(self, text: str) -> bool:
        """The last turn once more, with this message; as ``say``. The turn stays as it was unless it is answered without a
        fault. Raises EngineError, and UsageError if there is no turn."""
        talk = self.talk
        before = list(talk.messages), talk.start, talk.summary
        if talk.undo() is None:
            raise UsageError("There is no turn yet.")
        self.forget_usage()
        answered = False
        try:
            answered = self.say(text)
        finally:
            if not answered:
                talk.messages, talk.start, talk.summary = before
                self.forget_usage()
                self.save()
                note("The turn before stays as it was.")
        return answered

    def _answer_rounds(self) -> None:
        for _ in range(self.settings.tool_rounds):
            answer = Answer()
            try:
                answer = self._fitting()
            except EngineError:
                answer = self._latest  # what had come before it broke off is kept
                raise
            finally:
                if answer.text or answer.tool_calls:
                    made = Message("assistant", answer.text, _apart(answer), answer.tool_calls)
                    self.talk.messages.append(made)
            if self.stopped or not answer.tool_calls:
                return
            for call in answer.tool_calls:  # each needs a result, those after a stop as well
                result = declined(call, stopped=True) if self.stopped else self.tools.run(call, self.choose)
                self.talk.messages.append(Message("tool", result.text, tool_call_id=call.id))
                self.stopped = self.stopped or result.stopped
            if self.stopped:
                return
        note(f"The turn ends after {self.settings.tool_rounds} rounds of tool calls; /set tool_rounds allows more.")

    def _fitting(self) -> Answer:
        """The answer, once there is room for it: more is made where a server refuses what was thought to fit."""
        while True:
            self._make_room()
            ask, limit = self.ask(), self.source.limit
            try:
                return self.stream(ask)
            except TooLongError as error:
                if limit is None or len(self.talk.turns()) < 2:
                    raise
                note(str(error))
                self.tokens_a_character = max(self.tokens_a_character or 0, limit / ask.characters)

    def stream(self, ask: Ask, show: bool = True) -> Answer:
        """The whole answer, or what has come of it when Ctrl-C stopped it. Raises EngineError."""
        answer = self._latest = Answer()
        with interruptible() as wait:  # to the screen's end: a second Ctrl-C leaves no line of it half drawn
            screen = self.screen(self.settings.think) if show else None
            try:
                if screen is not None:
                    screen.update(answer, self.status())
                with closing(self.source.answer(ask, partial(self._show_reading, screen))) as answers:
                    for answer in wait(answers):
                        self._latest = answer
                        if screen is not None:
                            screen.update(answer, self.status(answer.usage))
            finally:
                self.stopped = wait.stopped
                self._take_usage(ask, answer.usage, show)
                if screen is not None:
                    screen.close(self._ending(answer))
        if self.stopped and show:
            note("Stopped." if self.once else "Stopped; Ctrl-C once more leaves.")
        elif answer.finish_reason == "length":
            note(f"The {'answer' if show else 'summary'} is cut: {self._limit_of(answer, ask)}.")
        return answer

    def _take_usage(self, ask: Ask, usage: Usage, show: bool) -> None:
        if usage.prompt_tokens is None:
            return
        self.tokens_a_character = usage.prompt_tokens / ask.characters
        if show:
            self._used = usage.prompt_tokens + (usage.answer_tokens or 0)
            self.usages.append(usage)

    def _limit_of(self, answer: Answer, ask: Ask) -> str:
        """What has cut an answer."""
        most = ask.options.get("max_tokens")
        if answer.usage.limit_reached:
            return f"the context of {self.source.limit} tokens is full"
        if most is None:
            return "the server has set a limit or its context is full"
        return f"--max-tokens is {most}" if most == self.settings.max_tokens else f"it may take {most} tokens"

    def _show_reading(self, screen: Screen | None, done: int, total: int) -> None:
        if screen is not None:
            share = f", {100 * done // total} %" if done else ""
            screen.update(Answer(), f"{self.source.name}, reading {total} tokens{share}")

    def _ending(self, answer: Answer) -> str:
        tokens = answer.usage.answer_tokens
        return self.status() if tokens is None else f"{tokens} tokens, {self.status()}"

    def _make_room(self) -> None:
        """Room for an answer in the context. Raises RequestError when the person would rather stop."""
        try:
            warned = make_room(self, self._warned)
        except ContextFullError as error:
            raise RequestError(str(error)) from error
        finally:
            self._latest = Answer()  # a summary is no part of what is answered
        self._warned = warned

    def save(self) -> None:
        """Keep the conversation. Where that fails it is said, and the chat goes on."""
        if self.store is None:
            return
        try:
            moved = self.store.save(self.talk)
        except StoreError as error:
            if not self.unsaved:
                note(f"{error} The chat goes on unsaved.")
            self.unsaved = True
            return
        if self.unsaved:
            note("Conversations can be saved again, and this one is.")
        self.unsaved = False
        if moved:
            note(moved)


def _apart(answer: Answer) -> str:
    """The reasoning where the answer's text does not hold it."""
    return "" if answer.reasoning and answer.reasoning in answer.text else answer.reasoning


class Interruptible:
    """Iterates, until the end or Ctrl-C."""

    def __init__(self) -> None:
        self.stopped = False
        self._waiting = False

    def __call__(self, answers: Iterator[Answer]) -> Iterator[Answer]:
        while not self.stopped:
            try:
                self._waiting = True
                answer = next(answers)
            except (KeyboardInterrupt, StopIteration):
                return
            finally:
                self._waiting = False
            yield answer

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        if self._waiting:  # for a long prompt, say; elsewhere it would leave a line half written
            self._waiting = False
            raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[Interruptible]:
    """Ctrl-C stops the iteration, and nothing else."""
    wait = Interruptible()
    before = signal.signal(signal.SIGINT, wait.on_signal)
    try:
        yield wait
    finally:
        signal.signal(signal.SIGINT, before)
