"""The ``engine`` command: its subcommands, and how its faults become a line on stderr and an exit status."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from engine import __version__
from engine.cli import streams
from engine.console.notes import note
from engine.console.options import expanded
from engine.errors import EngineError

FAULT, WRONG_USAGE, INTERRUPTED = 1, 2, 130

# what each command runs: its module under engine.cli, and the name in it
_COMMANDS = {
    "generate": "generate",
    "chat": "chat",
    "serve": "serve",
    "tokenize": "tokenize",
    "quantize": "quantize",
    "imatrix": "imatrix",
    "perplexity": "perplexity",
    "bench": "bench",
    "bench-serve": "bench_serve",
    "tune": "tune",
    "doctor": "doctor",
    "list": "models:list_models",
    "pull": "models:pull",
    "show": "models:show",
    "rm": "models:rm",
    "ps": "models:ps",
}
_GROUPS = {"plugin": "plugin"}


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"engine {__version__}")
        raise typer.Exit


def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run large language models on any device."""


def make_app(names: Sequence[str] = (*_COMMANDS, *_GROUPS)) -> typer.Typer:
    """The command line with these commands. One alone is a fraction of the work of all, which a start would wait for."""
    app = typer.Typer(
        name="engine",
        add_completion=True,
        rich_markup_mode=None,  # plain help: importing rich would double its time
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(root)
    for name in names:
        if name in _COMMANDS:
            app.command(name)(expanded(_find(_COMMANDS[name])))
        else:
            app.add_typer(_find(_GROUPS[name]), name=name)
    return app


def _find(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(f"engine.cli.{module}"), name or module)


def run(arguments: Sequence[str]) -> int:
    """The exit status: 0; 2 for wrong usage or bad input; 130 for Ctrl-C; 1 for a defect, a closed pipe or a full disk.

    A fault is one line on stderr; with ENGINE_DEBUG=1 its traceback comes before it.
    """
    known = [name for name in arguments[:1] if name in _COMMANDS or name in _GROUPS]
    try:
        app = make_app(known) if known else make_app()
        status = app(list(arguments) or ["--help"], prog_name="engine", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        streams.silence(sys.stdout)
        return FAULT
    except EngineError as error:
        return _fault(WRONG_USAGE, _told(error, known))
    except typer.TyperException as error:
        message = error.format_message()
        ended = message if message[-1:] in ".?!" else f"{message}."
        return _fault(WRONG_USAGE, f"{ended} See engine {' '.join((*known, '--help'))}.")
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # see engine.__main__
            return INTERRUPTED
        return _unforeseen(error, arguments)
    return int(status or 0)


def _told(error: EngineError, known: Sequence[str]) -> str:
    """The sentence, in which settings of a command are its options."""
    if not known or known[0] not in _COMMANDS:
        return str(error)
    from engine.cli.naming import by_options

    alone = typer.Typer()
    alone.command()(expanded(_find(_COMMANDS[known[0]])))
    return by_options(str(error), typer.main.get_command(alone))


def _unforeseen(error: Exception, arguments: Sequence[str]) -> int:
    """What no command turned into a sentence: the system's refusals, arguments that are no text, and defects."""
    if sentence := streams.refused(error):
        return _fault(FAULT, sentence)
    if isinstance(error, UnicodeError) and (shown := streams.not_utf8(arguments)):
        return _fault(WRONG_USAGE, f'The argument "{shown}" is not UTF-8, which only the name of a file may be.')
    reason = str(error) or "no reason given"
    return _fault(FAULT, f"{type(error).__name__}: {reason} (a defect; ENGINE_DEBUG=1 shows where)")


def _fault(status: int, sentence: str) -> int:
    try:
        if os.environ.get("ENGINE_DEBUG") == "1":
            traceback.print_exc()
        note(" ".join(sentence.split()))
    except OSError:  # the status says it alone
        streams.silence(sys.stderr)
    return status


def main() -> None:
    """The console script."""
    streams.prepare()
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
