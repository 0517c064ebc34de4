"""``engine bench-serve``: load on a server, in the manner of vLLM's bench serve."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.cli.tables import print_table
from engine.console.options import AsJson
from engine.console.progress import Wait
from engine.errors import UsageError

if TYPE_CHECKING:
    from engine.serve.bench.load import Ask
    from engine.serve.bench.run import How


def bench_serve(
    url: Annotated[str, typer.Argument(metavar="URL", help="A server that speaks OpenAI's protocol.")],
    *,
    model: Annotated[str | None, typer.Option(help="The model to ask; the server's first if not given.")] = None,
    request_rate: Annotated[
        str, typer.Option(metavar="R,...", help="Requests a second; inf sends all at once.")
    ] = "inf",
    burstiness: Annotated[
        float, typer.Option(help="Shape of the times between requests: 1 is Poisson, less comes in bursts.")
    ] = 1.0,
    num_prompts: Annotated[int, typer.Option(min=1, max=10**6, help="How many requests are sent at each rate.")] = 100,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Most requests at a time.")] = None,
    random_input_len: Annotated[int, typer.Option(min=1, max=1 << 24, help="Tokens of a random prompt.")] = 256,
    random_output_len: Annotated[int, typer.Option(min=1, max=1 << 24, help="Tokens of an answer to it.")] = 128,
    random_range_ratio: Annotated[
        float, typer.Option(min=0, max=1, help="By which part these lengths differ, evenly.")
    ] = 0.0,
    vocab: Annotated[
        int, typer.Option(max=1 << 31, help="Random prompts have token ids from 100 to below this.")
    ] = 1000,
    dataset_path: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Conversations in ShareGPT's form; their first turns are asked.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Of --dataset-path: whose tokens the answers are counted in.")
    ] = None,
    scale: Annotated[
        float, typer.Option(help="Of --dataset-path: answers are asked for this part of their length.")
    ] = 1.0,
    max_tokens: Annotated[int, typer.Option(help="Of --dataset-path: longer conversations are left out.")] = 2048,
    chat: Annotated[bool, typer.Option("--chat", help="Ask /v1/chat/completions; needs --dataset-path.")] = False,
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
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw rates and times over the request rate; .png or .svg, with the extra bench."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a server under load.

    TTFT is the time to the first piece of text, TPOT a request's mean between tokens after it, ITL all times between
    pieces, E2EL the whole; of each the mean and percentiles 50, 90 and 99. Several rates are measured in turn, with requests
    of the same lengths and fresh random tokens, or the same texts. Options that vLLM's bench serve has, too, have its names.

    \b
    Examples:
      engine bench-serve http://127.0.0.1:8000 --num-prompts 200 --request-rate 1,2,4,inf --plot rates.svg
      engine bench-serve http://127.0.0.1:8000 --dataset-path sharegpt.json --tokenizer model.gguf --scale 0.25 --json
    """
    import numpy as np

    from engine.serve.bench.client import Target
    from engine.serve.bench.load import renewed
    from engine.serve.bench.plot import check, draw
    from engine.serve.bench.report import goals
    from engine.serve.bench.run import How

    if chat and dataset_path is None:
        raise UsageError("--chat needs texts; give --dataset-path as well.")
    if dataset_path is not None and tokenizer is None:
        raise UsageError("--dataset-path needs --tokenizer, a model in whose tokens its answers are counted.")
    if not (burstiness > 0 and scale > 0):
        raise UsageError("--burstiness and --scale must be above 0.")
    if plot is not None:
        check(plot)
    rates, wanted = [_rate(text) for text in request_rate.split(",")], goals(goodput or ())
    name = model or _first_model(url, key)
    options: dict[str, Any] = {"temperature": temperature} | ({} if eos else {"ignore_eos": True})
    path = "/v1/chat/completions" if chat else "/v1/completions"
    how = How(target=Target(url, path, key), model=name, chat=chat, options=options, concurrency=max_concurrency)
    lengths = (random_input_len, random_output_len)
    asks = _asks(seed, num_prompts, lengths, random_range_ratio, vocab, dataset_path, tokenizer, scale, max_tokens)
    results = []
    for turn, each in enumerate(rates):
        again = renewed(np.random.default_rng([seed, 2, turn]), asks, vocab)
        results.append(_measure(how, again, each, burstiness, seed, wanted))
    report = {"server": url, "model": name, "num_prompts": num_prompts, "burstiness": burstiness, "seed": seed}
    report["results"] = results
    if plot is not None:
        draw(report, plot)
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        _print_tables(results)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value > 0:
        raise UsageError(f"--request-rate has {text!r}; rates must be above 0, or inf.")
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
    tokenizer: str | None,
    scale: float,
    most: int,
) -> list[Ask]:
    import numpy as np

    from engine.console.opening import find_model
    from engine.formats import open_checkpoint
    from engine.serve.bench.load import conversation_asks, random_asks

    rng = np.random.default_rng([seed, 0])
    if dataset is None or tokenizer is None:
        return random_asks(rng, count, lengths, spread, vocab)
    return conversation_asks(rng, count, dataset, open_checkpoint(find_model(tokenizer)).tokenizer(), scale, most)


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
        first = answers[0]
        fault = first.error.rstrip(".") or "no text came"
        raise UsageError(f"Every request failed; the first: {f'{first.status}, ' if first.status else ''}{fault}.")
    return {"rate": "inf" if math.isinf(rate) else rate, **summary(answers, seconds, wanted)}


def _print_tables(results: list[dict[str, Any]]) -> None:
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
        print_table(table)
    for result in results:
        for failure, count in result["failures"].items():
            print(f"rate {result['rate']}: {count} x {failure}")
