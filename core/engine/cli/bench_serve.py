"""``engine bench-serve``: load on a server, in the manner of vLLM's bench serve."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.cli.options import AsJson
from engine.cli.progress import Wait
from engine.errors import UsageError

if TYPE_CHECKING:
    from engine.serve.bench.load import Ask
    from engine.serve.bench.run import How


def bench_serve(
    url: Annotated[str, typer.Argument(metavar="URL", help="A server that speaks OpenAI's protocol.")],
    *,
    model: Annotated[str | None, typer.Option(help="The model to ask; the server's first if not given.")] = None,
    rate: Annotated[str, typer.Option(metavar="R,...", help="Requests a second; inf sends all at once.")] = "inf",
    burstiness: Annotated[
        float, typer.Option(help="Shape of the times between requests: 1 is Poisson, less comes in bursts.")
    ] = 1.0,
    requests: Annotated[int, typer.Option(min=1, help="How many requests are sent at each rate.")] = 100,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Most requests at a time.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a random prompt.")] = 256,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer to it.")] = 128,
    spread: Annotated[float, typer.Option(min=0, max=1, help="By which part these lengths differ, evenly.")] = 0.0,
    vocab: Annotated[int, typer.Option(help="Random prompts have token ids from 100 to below this.")] = 1000,
    dataset: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Conversations in ShareGPT's form; their first turns are asked.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="MODEL", help="Of --dataset: whose tokens the answers are counted in.")
    ] = None,
    scale: Annotated[float, typer.Option(help="Of --dataset: answers are asked for this part of their length.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(help="Of --dataset: longer conversations are left out.")] = 2048,
    chat: Annotated[bool, typer.Option("--chat", help="Ask /v1/chat/completions; needs --dataset.")] = False,
    temperature: Annotated[float, typer.Option(help="As requests have it.")] = 0.0,
    eos: Annotated[
        bool,
        typer.Option("--eos/--ignore-eos", help="Whether an answer may end before its length; most servers know it."),
    ] = False,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:MS", help="Goals that a good request meets; ttft:2000 and tpot:50 if none are given."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths and times.")] = 0,
    key: Annotated[str | None, typer.Option(help="The server's key.", envvar="OPENAI_API_KEY")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a server under load.

    TTFT is the time to the first piece of text, TPOT a request's mean between tokens after it, ITL all times between
    pieces, E2EL the whole; of each the mean and percentiles 50, 90 and 99. Several rates are measured in turn.

    \b
    Examples:
      engine bench-serve http://127.0.0.1:8000 --requests 200 --rate 1,2,4,inf
      engine bench-serve http://127.0.0.1:8000 --dataset sharegpt.json --tokenizer model.gguf --scale 0.25 --json
    """
    from engine.serve.bench.client import Target
    from engine.serve.bench.report import goals
    from engine.serve.bench.run import How

    if chat and dataset is None:
        raise UsageError("--chat needs texts; give --dataset as well.")
    if dataset is not None and tokenizer is None:
        raise UsageError("--dataset needs --tokenizer, a model in whose tokens its answers are counted.")
    if not (burstiness > 0 and scale > 0):
        raise UsageError("--burstiness and --scale must be above 0.")
    rates, wanted = [_rate(text) for text in rate.split(",")], goals(goodput or ())
    name = model or _first_model(url, key)
    options: dict[str, Any] = {"temperature": temperature} | ({} if eos else {"ignore_eos": True})
    path = "/v1/chat/completions" if chat else "/v1/completions"
    how = How(target=Target(url, path, key), model=name, chat=chat, options=options, concurrency=concurrency)
    lengths = (prompt_tokens, output_tokens)
    results = []
    for each in rates:
        asks = _asks(seed, requests, lengths, spread, vocab, dataset, tokenizer, scale, max_tokens)
        results.append(_measure(how, asks, each, burstiness, seed, wanted))
    report = {"server": url, "model": name, "requests": requests, "burstiness": burstiness, "seed": seed}
    if as_json:
        print(json.dumps({**report, "results": results}, ensure_ascii=False))
    else:
        _print_tables(results)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value > 0:
        raise UsageError(f"--rate has {text!r}; rates must be above 0, or inf.")
    return value


def _first_model(url: str, key: str | None) -> str:
    from engine.chat.remote import Remote

    return Remote(url, api_key=key).name


def _asks(
    seed: int,
    count: int,
    lengths: tuple[int, int],
    spread: float,
    vocab: int,
    dataset: Path | None,
    tokenizer: Path | None,
    scale: float,
    most: int,
) -> list[Ask]:
    """The same for each rate."""
    import numpy as np

    from engine.formats import open_checkpoint
    from engine.serve.bench.load import conversation_asks, random_asks

    rng = np.random.default_rng([seed, 0])
    if dataset is None or tokenizer is None:
        return random_asks(rng, count, lengths, spread, vocab)
    return conversation_asks(rng, count, dataset, open_checkpoint(tokenizer).tokenizer(), scale, most)


def _measure(
    how: How, asks: list[Ask], rate: float, burstiness: float, seed: int, wanted: dict[str, float]
) -> dict[str, Any]:
    import asyncio

    import numpy as np

    from engine.serve.bench.load import arrivals
    from engine.serve.bench.report import summary
    from engine.serve.bench.run import run

    times = arrivals(np.random.default_rng([seed, 1]), len(asks), rate, burstiness)
    with Wait("Asking") as wait:
        answers, seconds = asyncio.run(run(how, asks, times, lambda done: wait.update("Asking", done, len(asks))))
    if not any(answer.completed for answer in answers):
        raise UsageError(f"Every request failed; the first: {answers[0].status} {answers[0].error or 'no text came'}.")
    return {"rate": "inf" if math.isinf(rate) else rate, **summary(answers, seconds, wanted)}


def _print_tables(results: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    rates = Table(
        "rate", "completed", "failed", "requests/s", "output tok/s", "total tok/s", "good requests/s", "at a time"
    )
    times = Table("rate", "ms", "mean", "p50", "p90", "p99")
    for result in results:
        figures = [f"{result[n]:.2f}" for n in ("request_throughput", "output_throughput", "total_token_throughput")]
        counts = [str(result["completed"]), str(result["failed"])]
        rates.add_row(
            str(result["rate"]), *counts, *figures, f"{result['goodput']:.2f}", str(result["peak_concurrency"])
        )
        for name in ("ttft", "tpot", "itl", "e2el"):
            found = result[f"{name}_ms"] or {}
            times.add_row(str(result["rate"]), name.upper(), *(f"{value:.1f}" for value in found.values()))
    for table in (rates, times):
        for column in table.columns:
            column.justify = "right"
        Console(file=sys.stdout, highlight=False).print(table)
    for result in results:
        for failure, count in result["failures"].items():
            print(f"rate {result['rate']}: {count} x {failure}")
