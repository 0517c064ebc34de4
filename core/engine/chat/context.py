"""What becomes of a conversation that fills the context: never a silent cut."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

from engine.console.notes import note
from engine.errors import EngineError

from .answer import Answer, Ask, TooLongError
from .conversation import SUMMARY_REQUEST, Message

if TYPE_CHECKING:
    from .session import Session

_ANSWER = 256  # tokens that an answer should have at least, or a quarter of a small context
_SUMMARY = 400


class ContextFullError(EngineError):
    """The conversation does not fit into the context, and nothing was left out."""


def reserve(session: Session) -> int:
    """Tokens kept free for an answer."""
    limit = session.source.limit or 0
    return max(1, min(session.settings.max_tokens or _ANSWER, _ANSWER, limit // 4))


def make_room(session: Session, warned: bool) -> bool:
    """Warn once when the context is nearly full, and ask what to do when it is. Whether it has been warned. Raises
    ContextFullError."""
    limit = session.source.limit
    used, exact = _tokens(session, session.ask())
    if limit is None or not used:
        return warned
    shown = str(used) if exact else f"about {used}"
    if used + reserve(session) <= limit:
        full = used >= float(session.settings.context_warning) * limit
        if full and not warned:
            note(
                f"The context is {100 * used // limit} % full ({shown} of {limit} tokens); /compact summarizes the"
                " conversation, /clear begins a new one."
            )
        return full
    if len(session.talk.turns()) < 2:
        if not exact:  # an estimate refuses nothing: the server knows
            return warned
        raise ContextFullError(
            f"The message takes {used} tokens with what comes before it, and the context holds {limit}; shorten it, or"
            " use a larger --max-context, where the model has more."
        )
    _free(session, shown, limit)
    return False


def _free(session: Session, used: str, limit: int) -> None:
    how = session.settings.context_full
    if how == "ask":
        question = f"The context is full: {used} of {limit} tokens, and an answer needs {reserve(session)}."
        how = session.choose(question, ("summarize", "drop", "stop"))
    if how == "stop":
        raise ContextFullError(
            f"The conversation takes {used} tokens and the context holds {limit}; nothing was sent. /compact summarizes it,"
            " /clear begins a new one, and --context-full chooses for all chats."
        )
    if how == "summarize":
        summarize(session, keep=1)
    drop_oldest(session)


def drop_oldest(session: Session) -> None:
    """Leave out the oldest turns until an answer fits; they stay in the conversation that is kept. Raises
    ContextFullError if the last message alone is too long, as far as tokens can be counted."""
    limit, dropped = session.source.limit or 0, 0
    while True:
        used, exact = _tokens(session, session.ask())
        turns = session.talk.turns()
        if used + reserve(session) <= limit or (len(turns) < 2 and not exact):
            break
        if len(turns) < 2:
            raise ContextFullError(f"The last message alone takes {used} tokens of the context of {limit}; shorten it.")
        dropped += turns[1] - session.talk.start
        session.talk.start = turns[1]
    if dropped:
        note(f"The model no longer sees the {dropped} oldest messages; the conversation that is kept has them.")


def _tokens(session: Session, ask: Ask) -> tuple[int, bool]:
    """Tokens of a prompt, and whether they are counted: else they are estimated from its characters by those of what was
    sent last, 0 where that is not known."""
    counted = session.source.count(ask)
    if counted is not None:
        return counted, True
    return ceil((session.tokens_a_character or 0) * ask.characters), False


def summarize(session: Session, keep: int) -> None:
    """Have the model summarize all but the last ``keep`` turns, and show it that in their place. Raises ContextFullError,
    and RequestError if Ctrl-C stops it; then nothing has changed."""
    talk, limit = session.talk, session.source.limit
    turns = talk.turns()
    end = len(talk.messages) if keep == 0 else turns[-keep] if len(turns) >= keep else talk.start
    if end <= talk.start:
        raise ContextFullError("There is nothing to summarize yet.")
    room = min(_SUMMARY, limit // 4) if limit else _SUMMARY
    boundaries = [t for t in turns if talk.start < t < end] + [end]
    upto, answer = _summary(session, boundaries, room)
    if session.stopped or not answer.shown.strip():
        session.stopped = False
        raise ContextFullError("No summary was made; the conversation is as it was.")
    talk.summary, talk.start = answer.shown.strip(), upto
    session.forget_usage()
    note(f"The model sees this summary in place of the {upto} oldest messages, which are kept: {talk.summary}")


def _summary(session: Session, boundaries: list[int], room: int) -> tuple[int, Answer]:
    """A summary up to the last of the boundaries where it fits, and that boundary."""
    upto, request = _summary_request(session, boundaries, room)
    note("Summarizing the conversation.")
    while True:
        try:
            return upto, session.stream(request, show=False)
        except TooLongError:
            del boundaries[max(1, len(boundaries) // 2) :]
            if not boundaries:
                raise
            upto, request = _summary_request(session, boundaries, room)


def _summary_request(session: Session, boundaries: list[int], room: int) -> tuple[int, Ask]:
    """The last of the boundaries up to which a summary may fit, taken off them with those behind it, and what asks for it."""
    talk, limit = session.talk, session.source.limit
    while True:
        upto = boundaries.pop()
        part = replace(talk, messages=talk.messages[:upto])
        request = session.ask([*part.sent(), Message("user", SUMMARY_REQUEST).wire()])
        request = replace(request, tools=(), form=None, options={**request.options, "max_tokens": room})
        used, exact = _tokens(session, request)
        if limit is None or used + room <= limit or not (boundaries or exact):
            return upto, request
        if not boundaries:
            raise ContextFullError("The oldest turn is too long to be summarized within the context.")
