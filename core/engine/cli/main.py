"""The ``engine`` command: its subcommands, and how its faults become a line on stderr and an exit status."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from engine import __version__
from engine.cli.bench import bench
from engine.cli.bench_serve import bench_serve
from engine.cli.chat import chat
from engine.cli.doctor import doctor
from engine.cli.generate import generate
from engine.cli.imatrix import imatrix
from engine.cli.models import list_models, ps, pull, rm, show
from engine.cli.options import expanded
from engine.cli.perplexity import perplexity
from engine.cli.plugin import plugin
from engine.cli.quantize import quantize
from engine.cli.serve import serve
from engine.cli.tokenize import tokenize
from engine.errors import EngineError

FAULT, WRONG_USAGE, INTERRUPTED = 1, 2, 130

app = typer.Typer(
    name="engine",
    add_completion=True,
    rich_markup_mode=None,  # plain help: importing rich would double its time
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (generate, chat, serve, tokenize, quantize, imatrix, perplexity, bench, bench_serve, doctor):
    app.command(command.__name__.replace("_", "-"))(expanded(command))
app.command("list")(list_models)
for command_of_models in (pull, show, rm, ps):
    app.command(command_of_models.__name__)(command_of_models)
app.add_typer(plugin, name="plugin")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"engine {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run large language models on any device."""


def run(arguments: Sequence[str]) -> int:
    """The exit status: 0; 2 for wrong usage or bad input; 130 for Ctrl-C; 1 for a defect or a closed pipe.

    A fault is one line on stderr; with ENGINE_DEBUG=1 its traceback comes before it.
    """
    try:
        status = app(list(arguments) or ["--help"], prog_name="engine", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to flush to at exit
        return FAULT
    except EngineError as error:
        return _fault(WRONG_USAGE, str(error))
    except typer.TyperException as error:
        return _fault(WRONG_USAGE, f"{error.format_message().rstrip('.')}. See engine {_named(arguments)}--help.")
    except Exception as error:
        reason = str(error) or "no reason given"
        return _fault(FAULT, f"{type(error).__name__}: {reason} (a defect; ENGINE_DEBUG=1 shows where)")
    return int(status or 0)


def _named(arguments: Sequence[str]) -> str:
    known = [c.name for c in app.registered_commands] + [g.name for g in app.registered_groups]
    names = [name for name in known if name in arguments[:1]]
    return f"{names[0]} " if names else ""


def _fault(status: int, sentence: str) -> int:
    if os.environ.get("ENGINE_DEBUG") == "1":
        traceback.print_exc()
    print(f"engine: {' '.join(sentence.split())}", file=sys.stderr)
    return status


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
