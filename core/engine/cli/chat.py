"""``engine chat``: a conversation in the terminal, in its plain form."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.demo import OptionalModel, model_or_demo
from engine.cli.options import EngineOptions, FormOptions, SamplingOptions
from engine.cli.running import Streamed, note, open_llm, rates
from engine.errors import AdmissionError, RequestError, TemplateError, TokenizerError, UsageError

if TYPE_CHECKING:
    from engine import LLM, SamplingParams

HELP = """Type a message and press Enter. Ctrl-C stops an answer.
  /reset  forget the conversation
  /help   show this
  /exit   leave; so does Ctrl-D
A message that begins with a slash needs a space before it."""
LEAVING = "Press Ctrl-C once more or Ctrl-D to leave; /help tells more."


def chat(
    model: OptionalModel = None,
    *,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="Answer this one message and leave.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of an answer; up to the context's end if not given.")
    ] = None,
    sampling: SamplingOptions,
    form: FormOptions,
    engine: EngineOptions,
) -> None:
    """Talk with a model through its chat template."""
    # what is wrong with them is told before the model loads
    params = sampling.params(max_tokens=max_tokens, structured_outputs=form.outputs())
    path = model_or_demo(model)
    _check_template(path)
    with open_llm(path, engine.settings()) as llm:
        talk = Conversation(llm, system, params)
        if prompt is not None:
            talk.answer(prompt)
        else:
            _converse(talk)


def _check_template(model: Path) -> None:
    from engine.formats import open_checkpoint

    if open_checkpoint(model).chat_template() is None:
        raise UsageError(f"{model} has no chat template; use engine generate, or a model made for chat.")


class Conversation:
    """The messages so far, and the model that answers them."""

    def __init__(self, llm: LLM, system: str | None, params: SamplingParams) -> None:
        self._llm = llm
        self._system = system
        self._params = params
        self._streamed = Streamed(llm, echo=True)
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message."""
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def answer(self, text: str) -> None:
        """Write the answer to stdout as it comes. When Ctrl-C stops it, what has come stays in the conversation; when
        it is refused, the message is taken back. Raises RequestError when the context is full."""
        self._messages.append({"role": "user", "content": text})
        kept = False
        try:
            self._run()
            kept = True
        except KeyboardInterrupt:
            kept = bool(self._streamed.output and self._streamed.output.outputs[0].text)
            print(flush=True)
            raise
        finally:
            if kept:
                self._finish()
            else:
                self._messages.pop()

    def _run(self) -> None:
        ids = self._llm.engine.encode(self._llm.render(self._messages), parse_special=True)
        limit = self._llm.loaded.max_model_len
        room = limit - len(ids)
        if room < 1:
            raise RequestError(
                f"The conversation takes {len(ids)} tokens and the context holds {limit}; start anew with /reset, or "
                "use a larger --max-context."
            )
        most = min(room, self._params.max_tokens or room)
        output = self._streamed.run(ids, replace(self._params, max_tokens=most))
        print(flush=True)
        if output.outputs[0].finish_reason == "length":
            full = f"the context of {limit} tokens is full" if most == room else f"--max-tokens is {most}"
            note(f"The answer is cut: {full}.")

    def _finish(self) -> None:
        """The answer so far becomes part of the conversation; its figures go to stderr."""
        output = self._streamed.output
        assert output is not None
        completion = output.outputs[0]
        self._messages.append({"role": "assistant", "content": completion.text})
        rate = rates(output)["decode_tok_s"]
        used = len(output.prompt_token_ids) + len(completion.token_ids)
        speed = "" if rate is None else f"{rate:.1f} tok/s, "
        limit = self._llm.loaded.max_model_len
        print(f"[{len(completion.token_ids)} tokens, {speed}context {used}/{limit}]", file=sys.stderr, flush=True)


def _converse(talk: Conversation) -> None:
    """Reads and answers messages until /exit, the end of the input, or two Ctrl-C at the prompt."""
    leaving = False
    while True:
        try:
            line = _read()
        except EOFError:
            return
        except KeyboardInterrupt:
            if leaving:
                raise
            leaving = True
            print(file=sys.stderr)
            note(LEAVING)
            continue
        leaving = False
        if line.startswith("/"):
            if not _obey(line.strip(), talk):
                return
        elif line.strip():
            _answer(talk, line)


def _read() -> str:
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if on_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401 - input() edits lines with it, and does without
    try:
        return input("> " if on_terminal else "")
    except UnicodeDecodeError as error:
        raise UsageError(f"The input is not {error.encoding}: {error.reason}.") from error


def _obey(command: str, talk: Conversation) -> bool:
    """Whether the conversation goes on."""
    if command == "/exit":
        return False
    if command == "/reset":
        talk.reset()
        note("The conversation is forgotten.")
    elif command == "/help":
        print(HELP, file=sys.stderr, flush=True)
    else:
        note(f"There is no command {command}; /help lists them.")
    return True


def _answer(talk: Conversation, line: str) -> None:
    try:
        talk.answer(line)
    except KeyboardInterrupt:
        return  # it has stopped the answer, and only that
    except (AdmissionError, RequestError, TemplateError, TokenizerError) as error:
        note(str(error))
