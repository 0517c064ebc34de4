"""``engine imatrix``: an importance matrix for ``engine quantize``, out of a text that is like what the model is for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine.cli.perplexity import Context, TextPath, choose_window
from engine.console.opening import find_model
from engine.console.options import EngineOptions, Model
from engine.console.progress import Wait
from engine.console.texts import read_text_file


def imatrix(
    model: Model,
    file: TextPath,
    *,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="The file to write, in GGUF form.")],
    context: Context = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    engine: EngineOptions,
) -> None:
    """Measure which columns of each weight matter on a text.

    Writes, for each matrix, the sum of squares of each input over the text, and of how many tokens: the form that llama.cpp
    reads and writes, under the tensors' names in GGUF files, whatever MODEL is.

    \b
    Examples:
      engine imatrix model-f16.gguf calibration.txt -o imatrix.gguf
      engine quantize model-f16.gguf model-q4_k_m.gguf --type Q4_K_M --imatrix imatrix.gguf
    """
    text = read_text_file(file)
    from engine.quantize.collect import collect
    from engine.quantize.imatrix import write_imatrix
    from engine.quantize.output import check_target

    path = find_model(model)
    check_target(output, path, 0, force)
    window = choose_window(path, context, engine)
    settings = {**engine.settings(), "max_model_len": window}
    with Wait("Loading") as wait:
        found = collect(path, text, str(file), window, output, wait.update, **settings)
    write_imatrix(found)
    print(f"{output}: {len(found.entries)} matrices over {found.chunks} windows of {found.chunk_size} tokens")
