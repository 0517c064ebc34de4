"""Answers of a model that runs here."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.answers import (
    HarmonyReading,
    PartialCall,
    Tools,
    marks_are_special,
    open_mark,
    read_calls,
    speaks_harmony,
    split_reasoning,
    thoughts_are_special,
)
from engine.console.processes import shown as listed
from engine.errors import RequestError, UsageError
from engine.hub.names import short_name
from engine.runtime.turns import Turns

from .answer import Answer, Ask, Reading, Usage, Wire
from .conversation import ToolCall

if TYPE_CHECKING:
    from engine import LLM, RequestOutput


class Local:
    """A model in this process. Its prefix cache keeps the KV of the conversation from turn to turn."""

    def __init__(self, llm: LLM, path: Path) -> None:
        self._llm = llm
        self.path = path
        self._open = ExitStack()
        self._open.enter_context(llm)
        self._open.enter_context(listed(llm.loaded))
        self._turns = Turns(llm.engine.tokenizer)

    @property
    def name(self) -> str:
        return short_name(self.path)

    @property
    def reference(self) -> str:
        return str(self.path.absolute())

    @property
    def limit(self) -> int:
        return self._llm.loaded.max_model_len

    @property
    def sampling(self) -> Mapping[str, Any]:
        return self._llm.loaded.checkpoint.sampling

    def hears(self, variable: str) -> bool:
        template = self._llm.loaded.checkpoint.chat_template()
        return template is not None and template.reads(variable)

    def close(self) -> None:
        self._open.close()

    def count(self, ask: Ask) -> int:
        return len(self._prompt(ask)[1])

    def answer(self, ask: Ask, reading: Reading) -> Generator[Answer, None, None]:
        from engine import SamplingParams

        text, ids = self._prompt(ask)
        room = self.limit - len(ids)
        if room < 1:
            raise RequestError(
                f"The conversation takes {len(ids)} tokens and the context holds {self.limit}; begin a new one with"
                " /clear, or use a larger --max-context, where the model has more."
            )
        options = {name: value for name, value in ask.options.items() if value is not None}
        most = min(room, options.pop("max_tokens", room))
        tokenizer = self._llm.engine.tokenizer
        harmony = HarmonyReading(_known(ask)) if speaks_harmony(tokenizer) and ask.form is None else None
        thinks = ask.form is None and thoughts_are_special(tokenizer)
        marked = harmony is not None or thinks or (bool(ask.tools) and marks_are_special(tokenizer))
        params = SamplingParams(**options, max_tokens=most, structured_outputs=ask.form, skip_special_tokens=not marked)
        inside = open_mark(text) != ""
        output: RequestOutput | None = None
        try:
            with closing(self._llm.stream(list(ids), params, reading=reading)) as outputs:
                for output in outputs:
                    yield self._answer(output, ask, inside, most == room, harmony)
        finally:
            if output is not None:
                completion = output.outputs[0]
                self._turns.remember(text, completion.text, completion.token_ids)

    def _answer(
        self, output: RequestOutput, ask: Ask, inside: bool, whole: bool, harmony: HarmonyReading | None
    ) -> Answer:
        completion = output.outputs[0]
        if completion.finish_reason in ("error", "abort"):
            raise RequestError(str(completion.stop_reason))
        finished = completion.finish_reason is not None
        kept = completion.text
        if harmony is None:
            reasoning, rest, thinking = split_reasoning(kept, inside, finished)
            shown, calls = _calls(rest, ask, finished)
            if calls:  # the template writes them
                kept = kept.removesuffix(rest) + shown
        else:
            reasoning, kept, found = harmony.read(kept, finished)
            thinking = reasoning != "" and not kept and not found
            shown, calls = _whole(kept, kept, found, finished)
        usage = Usage(
            prompt_tokens=len(output.prompt_token_ids),
            cached_tokens=output.num_cached_tokens,
            answer_tokens=completion.num_tokens,
            **_times(output),
            limit_reached=completion.finish_reason == "length" and whole,
        )
        return Answer(kept, shown, reasoning, thinking and not finished, calls, completion.finish_reason, usage)

    def _prompt(self, ask: Ask) -> tuple[str, tuple[int, ...]]:
        """The prompt as text and as ids."""
        text = self._llm.render([_templated(m) for m in ask.messages], **self._template(ask))
        return text, self._turns.encode(text)

    def _template(self, ask: Ask) -> dict[str, Any]:
        """What the template reads of it; of the rest the person has been told."""
        variables = dict(ask.variables or {})
        if ask.tools:
            variables["tools"] = list(ask.tools)
        return {name: value for name, value in variables.items() if self.hears(name)}

    def exact(self, ask: Ask) -> list[str]:
        text, ids = self._prompt(ask)
        return [text, f"{len(ids)} token ids:", " ".join(map(str, ids))]

    def info(self) -> list[tuple[str, str]]:
        loaded = self._llm.loaded
        device = loaded.device.describe()
        memory = loaded.memory
        return [
            ("model", str(self.path)),
            ("family", f"{loaded.model.family} ({loaded.checkpoint.kind})"),
            ("backend", f"{device.backend}: {device.name}"),
            ("context", f"{self.limit} tokens, KV {loaded.config.kv_cache_dtype}"),
            ("memory", f"weights {memory.weights / 1e6:.1f} MB, KV {memory.kv / 1e6:.1f} MB"),
        ]

    def notices(self) -> Sequence[str]:
        """What its loading had to tell."""
        return self._llm.loaded.notices


def _templated(message: Wire) -> Wire:
    """As chat templates want it: arguments of tool calls as objects."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [call["function"] for call in calls]
    objects = [{**f, "arguments": json.loads(f["arguments"])} for f in functions]
    return {**message, "tool_calls": [{**call, "function": f} for call, f in zip(calls, objects, strict=True)]}


def _calls(text: str, ask: Ask, finished: bool) -> tuple[str, tuple[ToolCall, ...]]:
    """What is shown of a text, and the calls in it once it is whole; calls that are cut or are none stay text."""
    if not ask.tools:
        return text, ()
    shown, calls = read_calls(text, _known(ask), finished)
    return _whole(text, shown, calls, finished)


def _known(ask: Ask) -> Tools:
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in ask.tools or ()}


def _whole(text: str, shown: str, calls: Sequence[PartialCall], finished: bool) -> tuple[str, tuple[ToolCall, ...]]:
    if not finished:
        return shown, ()
    # Mistral's templates ask for ids of nine characters
    made = tuple(ToolCall(call.id or f"call{n:05}", call.name, call.arguments) for n, call in enumerate(calls))
    return (shown, made) if all(call.is_whole for call in made) else (text, ())


def _times(output: RequestOutput) -> dict[str, float | None]:
    metrics = output.metrics
    if metrics.first_token is None or metrics.last_token is None:
        return {}
    decoding = metrics.last_token - metrics.first_token
    later = output.outputs[0].num_tokens - 1
    speed = later / decoding if later > 0 and decoding > 0 else None
    return {"first_token_s": metrics.first_token - metrics.arrival, "tokens_a_second": speed}


def open_local(path: Path, settings: dict[str, Any]) -> Local:
    """Load a model with keywords of ``LLM``. Raises EngineError; UsageError if it has no chat template."""
    from engine.console.progress import Wait
    from engine.formats import open_checkpoint

    if open_checkpoint(path).chat_template() is None:
        raise UsageError(f"{path} has no chat template; use engine generate, or a model made for chat.")
    with Wait("Loading") as wait:
        from engine import LLM

        return Local(LLM(path, progress=wait.update, **settings), path)
