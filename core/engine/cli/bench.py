"""``engine bench``: prefill and decode rates through ``LLM.generate``, in the manner of llama-bench and
llama-batched-bench (tools of llama.cpp)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.cli.machine import describe_machine
from engine.cli.tables import print_table
from engine.console.notes import note
from engine.console.opening import find_model, open_llm
from engine.console.options import AsJson, EngineOptions, Model, parse_integers
from engine.console.progress import Wait
from engine.errors import UsageError

if TYPE_CHECKING:
    from engine import LLM
    from engine.cli.measure import Case, Result


def bench(
    model: Model,
    *,
    prompt: Annotated[int, typer.Option(min=0, help="Prompt tokens a sequence; 0 measures no prefill.")] = 512,
    decode: Annotated[int, typer.Option(min=0, help="Tokens to decode a sequence; 0 measures no decoding.")] = 64,
    batch: Annotated[str, typer.Option(metavar="N,...", help="Sequences at a time.")] = "1,4,8,16,32",
    depth: Annotated[str, typer.Option(metavar="N,...", help="Tokens already in the cache a sequence.")] = "0,4096",
    case: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BATCH,DEPTH,PROMPT,DECODE",
            help="Measure this case, in place of all combinations; may be repeated.",
        ),
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Timed runs of a case, after an untimed one.")] = 3,
    as_json: AsJson = False,
    engine: EngineOptions,
) -> None:
    """Measure prefill and decode speed.

    Rates are tokens a second of all sequences together, with the real scheduler, cache and sampler, on random tokens,
    past any end of sequence. Prefill is timed from submission to the last sequence's first token; decoding, with the
    prompt in the cache, from the first tokens to the last. Both together give the requests a second of as many identical
    requests as the batch has, all at once. The cache's memory is taken before, as in a server that has run for a while.

    Without options that is ten cases, up to 32 sequences of 4,096 tokens: many minutes on a processor.

    \b
    Examples:
      engine bench model.gguf --batch 1,8 --depth 0
      engine bench model.gguf --case 1,0,512,64 --json
    """
    from engine.cli.measure import Case

    if case:
        cases = [_case(text) for text in case]
    else:
        batches, depths = parse_integers(batch, "--batch", ","), parse_integers(depth, "--depth", ",")
        if 0 in batches or not (prompt or decode):
            raise UsageError("Every --batch must be at least 1, and one of --prompt and --decode above 0.")
        cases = [Case(b, d, prompt, decode) for d in depths for b in batches]
    sequences = max(64, *(c.batch for c in cases))  # 64 is what serving has, too
    tokens = max(c.tokens(max(engine.block_size, 1)) for c in cases)
    own = {"max_num_seqs": sequences, "kv_cache_tokens": tokens, "populate_cache": "first"}
    settings = {**engine.settings(), **own}
    path = find_model(model)
    if engine.max_context is None:
        settings["max_model_len"] = _longest(path, cases)
    with open_llm(str(path), settings) as llm:
        results = _measure(llm, cases, repetitions)
        report = _report(llm, results, repetitions)
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        _print_table(report)


def _longest(path: Path, cases: list[Case]) -> int:
    """Tokens of the longest sequence, within the model's own context."""
    from engine.formats import open_checkpoint
    from engine.models import load_model

    most = load_model(open_checkpoint(path)).config.max_context
    return min(most, max(case.context for case in cases))


def _case(text: str) -> Case:
    from engine.cli.measure import Case

    numbers = parse_integers(text, "--case", ",")
    if len(numbers) != 4 or numbers[0] == 0 or not any(numbers[2:]):
        raise UsageError(
            f'--case is "{text}"; it must be BATCH,DEPTH,PROMPT,DECODE such as "1,0,512,64", the batch at least 1 and one of'
            " prompt and decode above 0."
        )
    return Case(*numbers)


def _measure(llm: LLM, cases: list[Case], repetitions: int) -> list[Result]:
    from engine.cli.measure import Bench

    for notice in llm.loaded.notices:
        note(notice)
    running, results = Bench(llm), []
    refusals = [running.refusal(case) for case in cases]
    if all(refusals):
        raise UsageError(str(refusals[0]))
    with Wait("Measuring") as wait:
        for done, (case, refusal) in enumerate(zip(cases, refusals, strict=True)):
            wait.update(f"Batch {case.batch} at depth {case.depth}", done, len(cases))
            results.append(running.measure(case, repetitions, refusal))
    for refusal in filter(None, refusals):
        note(refusal)
    return results


def _report(llm: LLM, results: list[Result], repetitions: int) -> dict[str, Any]:
    info, config = llm.loaded.device.describe(), llm.loaded.config
    return {
        "machine": describe_machine(info),
        "model": config.model.name,
        "backend": info.backend,
        "threads": config.threads,
        "kv_dtype": config.kv_cache_dtype,
        "repetitions": repetitions,
        "cases": [result.as_json() for result in results],
    }


def _print_table(report: dict[str, Any]) -> None:
    from rich.table import Table

    machine = report["machine"]
    table = Table("batch", "depth", "prompt", "decode", "prefill tok/s", "decode tok/s", "requests/s")
    for column in table.columns:
        column.justify = "right"
    for case in report["cases"]:
        sizes = (str(case[name]) for name in ("batch", "depth", "prompt", "decode"))
        requests = "-" if case["requests_s"] is None else f"{case['requests_s']:.2f}"
        table.add_row(*sizes, _rate(case["prefill_tok_s"]), _rate(case["decode_tok_s"]), requests)
    print(
        f"{report['model']} on {report['backend']}, KV {report['kv_dtype']}; {machine['cpu']}, {machine['cores']} CPUs"
    )
    print_table(table)


def _rate(rate: dict[str, float] | None) -> str:
    return "-" if rate is None else f"{rate['median']:.1f} ({rate['min']:.0f}-{rate['max']:.0f})"
