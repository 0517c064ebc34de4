"""Tool calls in an answer while it comes, in the forms that the field's models are trained to write.

Nothing that was given is taken back: so a stream adds up to the answer that is given whole. What has been read of an answer is
not read again when there is more of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from .json_parts import BLANK, SPACE, CallObject, PartialCall

TAG = "<tool_call>"  # Hermes, Qwen; their closing tags say nothing new
_MARKS = ("[TOOL_CALLS]", "<|python_tag|>")  # Mistral, Llama 3


def read_calls(text: str, known: Set[str], finished: bool) -> tuple[str, tuple[PartialCall, ...]]:
    """The text that is certain to be content, and the calls of ``known`` tools that have begun. What cannot be told yet
    is in neither."""
    return CallReader(known).read(text, finished)


class CallReader:
    """Reads one answer, again and again while it comes."""

    def __init__(self, known: Set[str]) -> None:
        self._known = known
        self._tag, self._mark = _Sought((TAG,)), _Sought(_MARKS)
        self._listed: dict[int, _Listed] = {}
        self._tagged: _Tagged | None = None

    def read(self, text: str, finished: bool) -> tuple[str, tuple[PartialCall, ...]]:
        """As ``read_calls``; ``text`` is that of the time before, or more."""
        tagged = self._tag.find(text)
        for at, start in self._begun(text):
            if 0 <= tagged < at:
                break
            calls, may_come = self._list(text, start)
            if calls or (may_come and not finished):
                return text[:at].rstrip(), calls
        if tagged >= 0:
            self._tagged = self._tagged or _Tagged(tagged + len(TAG))
            if found := self._tagged.read(text, self._known):
                return text[:tagged].rstrip(), found
        if finished:
            return text, ()
        if tagged >= 0:
            return text[:tagged].rstrip(), ()
        marks = (TAG, *_MARKS)
        held = max(n for mark in marks for n in range(len(mark)) if text.endswith(mark[:n]))
        return text[: len(text) - held].rstrip(), ()  # space before a call is no content

    def _begun(self, text: str) -> Iterator[tuple[int, int]]:
        """Where content ends if calls in JSON begin there, and where their JSON does, at the text's end where it has not come:
        the whole text, or behind a mark."""
        first = len(text) - len(text.lstrip())
        at = self._mark.find(text)
        if text.startswith(("{", "["), first) and at != first:
            yield 0, first
        if at >= 0:
            start = BLANK.match(text, at + len(self._mark.found)).end()  # type: ignore[union-attr]
            if text[start : start + 1] in ("", "{", "["):
                yield at, start

    def _list(self, text: str, start: int) -> tuple[tuple[PartialCall, ...], bool]:
        if start == len(text):
            return (), True
        return self._listed.setdefault(start, _Listed(text, start)).read(text, self._known)


class _Sought:
    """The first of some marks."""

    def __init__(self, marks: tuple[str, ...], at: int = 0) -> None:
        self._marks, self._at, self._place = marks, at, -1
        self.found = ""

    def find(self, text: str) -> int:
        """Where it is, -1 where it has not come."""
        if self._place < 0:
            places = [(place, mark) for mark in self._marks if (place := text.find(mark, self._at)) >= 0]
            self._place, self.found = min(places, default=(-1, ""))
            self._at = max(self._at, len(text) - max(map(len, self._marks)) + 1)
        return self._place


class _Tagged:
    """Calls behind tags, the first of which ends at ``at``; what stands between them otherwise, and calls after the first that
    are none, are left out."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._next: _Sought | None = None
        """The tag after the last call."""
        self._object: CallObject | None = None
        self._calls: list[PartialCall] = []

    def read(self, text: str, known: Set[str]) -> tuple[PartialCall, ...]:
        while self._reach(text):
            at = self._at = BLANK.match(text, self._at).end()  # type: ignore[union-attr]
            if self._object is None and text.startswith("{", at):
                self._object = CallObject(at)
            call, end = self._object.read(text, known) if self._object else (None, None)
            if call is None and (not self._calls or (end is None and text[at : at + 1] in ("", "{"))):
                break  # it may still become one
            if call is not None and end is None:
                return (*self._calls, call)
            if call is not None:
                self._calls.append(call)
            self._object, self._next = None, _Sought((TAG,), at if end is None else end)
        return tuple(self._calls)

    def _reach(self, text: str) -> bool:
        """Goes on behind the next tag. False where it has not come."""
        if self._next is not None:
            place = self._next.find(text)
            if place < 0:
                return False
            self._at, self._next = place + len(TAG), None
        return True


class _Listed:
    """Calls in a list or one after the other."""

    def __init__(self, text: str, start: int) -> None:
        self._at = start + 1 if text[start] == "[" else start
        self._object: CallObject | None = None
        self._calls: list[PartialCall] = []

    def read(self, text: str, known: Set[str]) -> tuple[tuple[PartialCall, ...], bool]:
        """The calls, and whether what is no call yet may become one."""
        while True:
            if self._object is None:
                self._at = SPACE.match(text, self._at).end()  # type: ignore[union-attr]
                if not text.startswith("{", self._at):
                    return tuple(self._calls), self._at == len(text)
                self._object = CallObject(self._at)
            call, end = self._object.read(text, known)
            if call is None:
                return tuple(self._calls), end is None
            if end is None:
                return (*self._calls, call), True
            self._calls.append(call)
            self._at, self._object = end, None
