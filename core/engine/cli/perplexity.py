"""``engine perplexity``: how well a model predicts a text, and how far its predictions are from another's."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.console.notes import note
from engine.console.opening import find_model
from engine.console.options import AsJson, EngineOptions, Model
from engine.console.progress import Wait
from engine.console.texts import read_text_file
from engine.errors import UsageError

if TYPE_CHECKING:
    from engine.runtime.load import Loaded

TextPath = Annotated[Path, typer.Argument(metavar="FILE", help="The text, as UTF-8.")]
Context = Annotated[
    int | None,
    typer.Option("--context", help="Tokens of a window; 512, or the model's context if that is less, if not given."),
]


def perplexity(
    model: Model,
    file: TextPath,
    *,
    context: Context = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens from one window's beginning to the next; those of a window if not given."),
    ] = None,
    kl: Annotated[
        str | None,
        typer.Option("--kl", metavar="BASE", help="Compare the predictions with those of this model."),
    ] = None,
    as_json: AsJson = False,
    engine: EngineOptions,
) -> None:
    """Measure how well a model predicts a text.

    The text is one stream of tokens, cut into windows that do not overlap, unless --stride is less than --context. Every token
    is predicted once, by the first window that holds it, from those before it there; the first token of a window that
    overlaps none is not predicted. Perplexity is exp(mean negative log-likelihood). With --kl: the Kullback-Leibler
    divergence of MODEL from BASE, in nats a token.

    \b
    Examples:
      engine perplexity model.gguf wiki.test.txt --context 2048 --stride 1024
      engine perplexity model-q4_k_m.gguf wiki.test.txt --kl model-f16.gguf
    """
    text = read_text_file(file)
    path, base = find_model(model), None if kl is None else find_model(kl)
    window = choose_window(path, context, engine)
    step = stride or window
    if step > window:
        raise UsageError(f"--stride is {step}; it must be at most the window's {window} tokens, or some are left out.")
    settings = {**engine.settings(kv_dtype="f32"), "max_model_len": window}
    if base is None:
        report = _measure(path, text, window, step, settings)
    else:
        report = _compare(path, base, text, window, step, settings)
    report |= {"context": window, "stride": step}
    if as_json:
        print(json.dumps(report))
    else:
        _print(report)


def choose_window(model: Path, context: int | None, engine: EngineOptions) -> int:
    """Tokens of a window, which fit what the model may have at a time."""
    from engine.evaluate.windows import choose_context

    window = choose_context(model, context)
    if engine.max_context is not None and engine.max_context < window:
        raise UsageError(f"--max-context is {engine.max_context}, but a window has {window} tokens.")
    return window


def _measure(model: Path, text: str, context: int, stride: int, settings: dict[str, Any]) -> dict[str, Any]:
    from engine.evaluate.perplexity import perplexity as measured
    from engine.evaluate.windows import read_tokens

    with Wait("Loading") as wait:
        loaded = _load(model, context, wait, settings)
        return asdict(measured(loaded, read_tokens(loaded, text), context, stride, wait.update))


def _compare(model: Path, base: Path, text: str, context: int, stride: int, settings: dict[str, Any]) -> dict[str, Any]:
    from engine.evaluate.perplexity import compare
    from engine.evaluate.windows import read_tokens

    with Wait("Loading") as wait:
        first, second = (_load(path, context, wait, settings) for path in (base, model))
        of_base, of_model, divergence = compare(first, second, read_tokens(second, text), context, stride, wait.update)
    return {**asdict(of_model), "base": asdict(of_base), "kl": asdict(divergence)}


def _load(model: Path, context: int, wait: Wait, settings: dict[str, Any]) -> Loaded:
    from engine.evaluate.windows import load_for_logits

    loaded = load_for_logits(model, context, wait.update, **settings)
    for notice in loaded.notices:
        note(notice)
    return loaded


def _print(report: dict[str, Any]) -> None:
    print(f"perplexity {_figure(report)} over {report['tokens']} tokens")
    if "kl" in report:
        base, kl = report["base"], report["kl"]
        print(f"perplexity {_figure(base)} of the base")
        print(f"KL divergence {kl['mean']:.6f} +/- {kl['error']:.6f}, p99 {kl['p99']:.6f}, largest {kl['largest']:.6f}")
        print(f"the same likeliest token in {100 * kl['same_top']:.2f} %")


def _figure(found: dict[str, Any]) -> str:
    return f"{found['perplexity']:.4f} +/- {found['error']:.4f}"
