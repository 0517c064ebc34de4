"""A model opened for a command, and one request whose text is written to stdout as it comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.processes import shown
from engine.cli.progress import Wait
from engine.errors import RequestError, UsageError

if TYPE_CHECKING:
    from engine import LLM, RequestOutput
    from engine.runtime.engine import Params
    from engine.runtime.load import Loaded


def note(sentence: str) -> None:
    """A line for the person, on stderr."""
    print(f"engine: {sentence}", file=sys.stderr, flush=True)


def find_model(model: str) -> Path:
    """The model's path; what is named and not here is downloaded. Raises HubError."""
    from engine.hub import located

    with Wait("Downloading") as wait:
        return located(model, wait.update, note)


def open_loaded(model: str, settings: dict[str, Any]) -> Loaded:
    """The model, loaded and not run, with keywords of ``EngineConfig``."""
    path = find_model(model)
    with Wait("Loading") as wait:
        from engine.runtime.config import EngineConfig
        from engine.runtime.load import load

        return load(EngineConfig(model=path, **settings), wait.update)


@contextmanager
def open_llm(model: str, settings: dict[str, Any]) -> Iterator[LLM]:
    """The model, loaded with keywords of ``LLM``, and shown by ``engine ps``; closed at the end."""
    path = find_model(model)
    with Wait("Loading") as wait:
        from engine import LLM

        llm = LLM(path, progress=wait.update, **settings)
    with llm, shown(llm.loaded):
        yield llm


def read_text_file(file: Path) -> str:
    """A file's text, as it is; UsageError if it cannot be read or is no UTF-8."""
    try:
        return decode_utf8(file.read_bytes(), str(file))
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}.") from error


def read_stdin() -> str:
    """All of stdin, as it is; UsageError if it cannot be read or is no UTF-8."""
    try:
        return decode_utf8(sys.stdin.buffer.read(), "The input")
    except OSError as error:
        raise UsageError(f"The input cannot be read: {error.strerror or error}.") from error


def decode_utf8(data: bytes, what: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} is not UTF-8: byte {error.start} is {data[error.start]:#04x}.") from error


class Streamed:
    """Runs requests one after the other. ``output`` is the running one's latest, also after Ctrl-C.

    With ``echo`` the text of the first continuation goes to stdout as it comes. The model's notices come with the first
    token of all, so that a request that is refused gives one line alone.
    """

    def __init__(self, llm: LLM, echo: bool) -> None:
        self.output: RequestOutput | None = None
        self._llm = llm
        self._echo = echo
        self._notices = list(llm.loaded.notices)

    def run(self, prompt: str | Sequence[int], params: Params, parse_special: bool = False) -> RequestOutput:
        """The request's last output. Raises RequestError when it ended by a fault."""
        self.output = None
        shown = 0
        with Wait("Reading the prompt") as wait, closing(self._outputs(prompt, params, parse_special, wait)) as outputs:
            for self.output in outputs:
                if self._echo and sys.stdout.isatty():
                    wait.close()
                wait.update("Generating", _count(self.output), (params.max_tokens or 0) * len(self.output.outputs))
                while self._notices:
                    note(self._notices.pop(0))
                if self._echo:
                    text = self.output.outputs[0].text
                    sys.stdout.write(text[shown:])
                    sys.stdout.flush()
                    shown = len(text)
        assert self.output is not None
        failed = next((c for c in self.output.outputs if c.finish_reason in ("error", "abort")), None)
        if failed is not None:
            if self._echo and shown:
                print()
            raise RequestError(str(failed.stop_reason))
        return self.output

    def _outputs(
        self, prompt: str | Sequence[int], params: Params, parse_special: bool, wait: Wait
    ) -> Generator[RequestOutput, None, None]:
        """Those of a request as they come; the last alone where it is chosen at the end."""
        from engine import SamplingParams

        if not isinstance(params, SamplingParams):
            yield from self._llm.beam_search([prompt], params)
        elif params.samples > params.n:
            yield from self._llm.generate([prompt], params)
        else:
            reading = partial(wait.update, "Reading the prompt")
            yield from self._llm.stream(prompt, params, parse_special, reading)


def _count(output: RequestOutput) -> int:
    return sum(len(c.token_ids) for c in output.outputs)


def rates(output: RequestOutput) -> dict[str, float | None]:
    """Seconds to the first token, and tokens a second before it (of the prompt) and after it; None where there is no
    such time."""
    metrics = output.metrics
    if metrics.first_token is None or metrics.last_token is None:
        return {"ttft_s": None, "prefill_tok_s": None, "decode_tok_s": None}
    ttft, decoding = metrics.first_token - metrics.arrival, metrics.last_token - metrics.first_token
    later = _count(output) - len(output.outputs)
    return {
        "ttft_s": ttft,
        "prefill_tok_s": len(output.prompt_token_ids) / ttft if ttft > 0 else None,
        "decode_tok_s": later / decoding if decoding > 0 and later > 0 else None,
    }


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def read(self) -> float:
        return time.monotonic() - self._start
