"""Requests of a command, one after the other: a text that is written as it comes, and how long it took."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from engine.console.notes import note, visible
from engine.console.progress import Wait
from engine.errors import RequestError

if TYPE_CHECKING:
    from engine import LLM, RequestOutput
    from engine.runtime.engine import Params


class Streamed:
    """Runs requests one after the other. ``output`` is the running one's latest, also after Ctrl-C.

    With ``echo`` the text of the first continuation goes to stdout as it comes. The model's notices come with the first
    token of all, so that a request that is refused gives one line alone.
    """

    def __init__(self, llm: LLM, echo: bool) -> None:
        self.output: RequestOutput | None = None
        self._llm = llm
        self._echo = echo
        self._shown = 0
        self._notices = list(llm.loaded.notices)

    def run(self, prompt: str | Sequence[int], params: Params) -> RequestOutput:
        """The request's last output. Raises RequestError when it ended by a fault."""
        self.output, self._shown = None, 0
        try:
            self._stream(prompt, params)
        except KeyboardInterrupt:
            self._end_line()
            raise
        assert self.output is not None
        failed = next((c for c in self.output.outputs if c.finish_reason in ("error", "abort")), None)
        if failed is not None:
            self._end_line()
            raise RequestError(str(failed.stop_reason))
        return self.output

    def _end_line(self) -> None:
        """Of a text that broke off."""
        if self._shown:
            print(flush=True)

    def _stream(self, prompt: str | Sequence[int], params: Params) -> None:
        with Wait("Reading the prompt") as wait, closing(self._outputs(prompt, params, wait)) as outputs:
            for self.output in outputs:
                if self._echo and sys.stdout.isatty():
                    wait.close()
                wait.update("Generating", _count(self.output), (params.max_tokens or 0) * len(self.output.outputs))
                while self._notices:
                    note(self._notices.pop(0))
                if self._echo:
                    text = self.output.outputs[0].text
                    new, self._shown = text[self._shown :], len(text)
                    sys.stdout.write(visible(new) if sys.stdout.isatty() else new)
                    sys.stdout.flush()

    def _outputs(self, prompt: str | Sequence[int], params: Params, wait: Wait) -> Generator[RequestOutput, None, None]:
        """Those of a request as they come; the last alone where it is chosen at the end."""
        from engine import SamplingParams

        if not isinstance(params, SamplingParams):
            yield from self._llm.beam_search([prompt], params)
        elif params.samples > params.n:
            yield from self._llm.generate([prompt], params)
        else:
            reading = partial(wait.update, "Reading the prompt")
            yield from self._llm.stream(prompt, params, reading)


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
