"""``engine chat``: a conversation in the terminal, with a model here or a server's."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.console.notes import note, visible
from engine.console.options import MODEL_HELP, EngineOptions, FormOptions, SamplingOptions, given_options
from engine.errors import UsageError

if TYPE_CHECKING:
    from engine.chat.store import Store

_OWN = ("system", "max_tokens", "attach", "think", "reasoning", "markdown", "context_full", "save", "database")


def chat(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help=f"{MODEL_HELP}; the built-in demo model if not given; with --attach a name that the server knows.",
        ),
    ] = None,
    *,
    prompt: Annotated[
        str | None,
        typer.Option("-p", "--prompt", metavar="TEXT", help="Answer this one message, and what stdin has, and leave."),
    ] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option(
            "-f", "--file", metavar="FILE", help="Put this file's text before the first message; may be repeated."
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None,
    resume: Annotated[bool, typer.Option("-c", "--continue", help="Go on with the last conversation.")] = False,
    number: Annotated[
        int | None, typer.Option("--id", metavar="NUMBER", help="Go on with the conversation of this number.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the conversations, and leave.")] = False,
    search: Annotated[
        str | None, typer.Option(metavar="WORDS", help="List the conversations in which this is found, and leave.")
    ] = None,
    export: Annotated[
        str | None, typer.Option(metavar="FORM", help="Write a conversation to stdout as md or json, and leave.")
    ] = None,
    delete: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="Forget the conversation of this number for good, and leave.")
    ] = None,
    attach: Annotated[
        str | None, typer.Option(metavar="URL", help="Chat with the OpenAI-compatible server at this URL.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of an answer; up to the context's end if not given.")
    ] = None,
    think: Annotated[str, typer.Option(help="How reasoning is displayed: show, dim, fold or hide.")] = "dim",
    reasoning: Annotated[
        bool | None,
        typer.Option("--reasoning/--no-reasoning", help="Whether the model should reason, if it can choose."),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown/--no-markdown", help="Render answers as Markdown on a terminal.")
    ] = True,
    context_full: Annotated[
        str, typer.Option(help="When the context is full: ask, summarize, drop (the oldest turns) or stop.")
    ] = "ask",
    save: Annotated[bool, typer.Option("--save/--no-save", help="Keep the conversation in the database.")] = True,
    database: Annotated[Path | None, typer.Option(metavar="FILE", help="Where conversations are kept.")] = None,
    sampling: SamplingOptions,
    form: FormOptions,
    engine: EngineOptions,
) -> None:
    """Talk with a model.

    A message that begins with a slash is a command: /help lists them. Ctrl-C stops an answer, and once more leaves.
    Conversations are kept, and -c goes on with the last one.

    Settings come from flags, else from the environment (ENGINE_TEMPERATURE=0.7), else from config.toml in the user's
    folder of settings.

    \b
    Examples:
      engine chat model.gguf
      engine chat model.gguf -c
      cat notes.txt | engine chat model.gguf -p "Summarize this."
      engine chat model.gguf -p "A person." --schema person.json
      engine chat --attach http://localhost:8000
      engine chat --search fox
      engine chat --export md --id 12 > fox.md
    """
    from engine.chat.commands import as_attachment
    from engine.chat.conversation import Conversation
    from engine.chat.loop import open_store, resumed, run
    from engine.chat.settings import ENGINE, SAMPLING, load_settings
    from engine.chat.store import Store
    from engine.console.texts import check_utf8

    settings = load_settings(given_options(context, (*_OWN, *SAMPLING, *ENGINE)))
    settings.model = model or settings.model
    wanted = [listing or search is not None, export is not None, delete is not None].count(True)
    if wanted > 1:
        raise UsageError(f"Give one of --list, --export and --delete, not {wanted}.")
    if wanted:
        _records(Store(settings.database), search or "", export, number, delete)
        return
    # what is wrong with them is told before the model loads
    outputs = form.outputs()
    attached = "".join(as_attachment(each) for each in file or ())
    message = None if prompt is None else f"{check_utf8(prompt, '--prompt')}{_stdin()}"
    if message is not None and not (message + attached).strip():
        raise UsageError("The message is empty; give --prompt a text, or pipe one in.")
    goes_on = resume or number is not None
    store = open_store(settings, needed=goes_on)
    talk = resumed(store, number) if goes_on else Conversation()
    talk.system = settings.system if settings.system is not None else talk.system
    named = settings.model or (None if settings.attach else talk.model or None)
    if not run(settings, talk, named, store, outputs, message, attached):
        raise typer.Exit(2)


def _stdin() -> str:
    """What is piped in, to follow the message."""
    from engine.console.texts import read_text

    if sys.stdin.isatty():
        return ""
    try:
        text = read_text(sys.stdin.buffer, "The input")
    except OSError:  # nothing can be read from it
        return ""
    return f"\n\n{text.rstrip()}" if text.strip() else ""


def _records(store: Store, search: str, export: str | None, number: int | None, delete: int | None) -> None:
    from engine.chat.store import exported

    if delete is not None:
        store.delete(delete)
    elif export is not None:
        if export not in ("md", "json"):
            raise UsageError(f"--export is {export!r}; it must be md or json.")
        sys.stdout.write(exported(store.load(number), export))
    else:
        found = store.list(search, most=1 << 30)
        if not found:
            note("No conversation has that." if search else "There is no conversation yet.")
        for each in found:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.updated))
            print(visible(f"{each.id:>5}  {when}  {each.messages:>4} messages  {each.model}  {each.name}"))
