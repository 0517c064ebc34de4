"""``engine tokenize``: a text as token ids, or ids as text. No backend is opened; a vocabulary alone will do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from engine.console.opening import find_model
from engine.console.options import Model, parse_integers
from engine.console.texts import read_stdin, read_text_file
from engine.errors import UsageError


def tokenize(
    model: Model,
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="The text; - reads it from stdin.")] = None,
    *,
    file: Annotated[Path | None, typer.Option(metavar="FILE", help="Read the text from this file, as it is.")] = None,
    decode: Annotated[str | None, typer.Option(metavar='"ID ..."', help="Print the text of token ids instead.")] = None,
    special: Annotated[
        bool,
        typer.Option(
            "--special",
            help="Read control tokens in the text, and add what the model puts around it; with --decode show them.",
        ),
    ] = False,
) -> None:
    """Print the token ids of a text.

    They come on one line. MODEL may be a GGUF that holds a vocabulary only.

    \b
    Examples:
      engine tokenize model.gguf "Hello world"
      engine tokenize model.gguf --file notes.txt | wc -w
      engine tokenize model.gguf --decode "15496 995"
    """
    if [text, file, decode].count(None) != 2:
        raise UsageError("Give one of a text, --file FILE and --decode 'ID ...'.")
    from engine.formats import open_checkpoint

    tokenizer = open_checkpoint(find_model(model)).tokenizer()
    if decode is not None:
        ids = parse_integers(decode, "--decode")
        wrong = next((i for i in ids if i >= tokenizer.vocab_size), None)
        if wrong is not None:
            raise UsageError(f"There is no token {wrong}; the ids of {model} go from 0 to {tokenizer.vocab_size - 1}.")
        print(tokenizer.decode(ids, skip_special=not special))
        return
    found = tokenizer.encode(_text(text, file), add_special=special, parse_special=special)
    sys.stdout.write(" ".join(map(str, found)) + "\n")


def _text(text: str | None, file: Path | None) -> str:
    if file is None:
        return read_stdin() if text == "-" else str(text)
    return read_text_file(file)
