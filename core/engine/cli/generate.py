"""``engine generate``: complete a raw text, or token ids."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.cli.streamed import Streamed, rates
from engine.console.demo import OptionalModel, model_and_text, model_or_demo
from engine.console.notes import note
from engine.console.opening import open_llm
from engine.console.options import AsJson, EngineOptions, FormOptions, SamplingOptions, given_options, parse_integers
from engine.console.texts import read_stdin
from engine.errors import UsageError

if TYPE_CHECKING:
    from engine import BeamSearchParams, CompletionOutput, RequestOutput, SamplingParams


_MOST_AT_ONCE = 64  # completions: more wait for their turn, and need no more memory
_EARLY_STOPPING: dict[str, Any] = {"true": True, "false": False, "never": "never"}


def generate(
    context: typer.Context,
    model: OptionalModel = None,
    prompt: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="The text to complete; - reads it from stdin, as it is.")
    ] = None,
    *,
    prompt_ids: Annotated[
        str | None, typer.Option(metavar='"ID ..."', help="Token ids in place of a text; nothing is added to them.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    min_tokens: Annotated[int, typer.Option(help="Least tokens before an end of sequence.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end of sequence.")] = False,
    n: Annotated[int, typer.Option("--n", help="Completions of the prompt; above 1 needs --json.")] = 1,
    best_of: Annotated[int | None, typer.Option(help="Sample so many completions, and take the likeliest --n.")] = None,
    beams: Annotated[int | None, typer.Option(help="Search with so many beams, and take the best --n.")] = None,
    length_penalty: Annotated[
        float, typer.Option(help="Of --beams: above 0 prefers long completions, below 0 short ones.")
    ] = 1.0,
    early_stopping: Annotated[
        str, typer.Option(help="Of --beams: true ends with enough completions, never with the best certain, or false.")
    ] = "false",
    logprobs: Annotated[
        int | None,
        typer.Option(help="Report so many best tokens with their log-probabilities, before temperature; needs --json."),
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="The same for each token of the prompt; needs --json.")
    ] = None,
    sampling: SamplingOptions,
    form: FormOptions,
    as_json: AsJson = False,
    engine: EngineOptions,
) -> None:
    """Complete a raw text.

    The model's beginning of sequence is put before it, and no template applied. Tokens are sampled as the model's makers
    recommend, unless options say otherwise.

    The completion alone goes to stdout, as it comes, and a newline after it; all else goes to stderr.

    \b
    Examples:
      engine generate "Once upon a time"
      engine generate model.gguf "Once upon a time" --max-tokens 64 --temperature 0
      engine generate owner/repo:Q4_K_M "A person: " --schema person.json --json
      engine generate model.gguf - < prompt.txt
      engine generate model.gguf "The sea" --beams 4 --json --n 2
    """
    if prompt_ids is None:
        model, prompt = model_and_text(model, prompt)
    if (prompt is None) == (prompt_ids is None):
        raise UsageError("Give either a text or --prompt-ids, such as: engine generate MODEL 'Once upon a time'.")
    if not as_json and (n > 1 or logprobs is not None or prompt_logprobs is not None):
        raise UsageError("--n above 1, --logprobs and --prompt-logprobs need --json.")
    shared = {"max_tokens": max_tokens, "min_tokens": min_tokens, "ignore_eos": ignore_eos}
    params: SamplingParams | BeamSearchParams
    if beams is None:
        if length_penalty != 1 or early_stopping != "false":
            raise UsageError("--length-penalty and --early-stopping are for --beams; give it as well.")
        params = sampling.params(
            n=n,
            best_of=best_of,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structured_outputs=form.outputs(),
            **shared,
        )
    else:
        if (best_of, logprobs, prompt_logprobs, form) != (None, None, None, FormOptions()):
            raise UsageError("--beams goes without --best-of, --logprobs, --prompt-logprobs and a form; leave one out.")
        stopping = _EARLY_STOPPING.get(early_stopping.lower())
        if stopping is None:
            raise UsageError(f"--early-stopping is {early_stopping!r}; it must be true, false or never.")
        options = {"beam_width": beams, "num_return_sequences": n, "early_stopping": stopping}
        params = sampling.beam_params(length_penalty=length_penalty, **options, **shared)
    wanted: str | list[int]
    if prompt_ids is not None:
        wanted = parse_integers(prompt_ids, "--prompt-ids")
    else:
        wanted = read_stdin() if prompt == "-" else str(prompt)
    sequences = min(max(n, best_of or 1, beams or 1), _MOST_AT_ONCE)
    start = time.monotonic()
    with open_llm(model_or_demo(model), {**engine.settings(), "max_num_seqs": sequences}) as llm:
        load_s = time.monotonic() - start
        if beams is None:
            recommended: dict[str, Any] = {**llm.loaded.checkpoint.sampling}
            said = given_options(context, recommended)
            params = replace(params, **{name: value for name, value in recommended.items() if name not in said})
        output = Streamed(llm, echo=not as_json).run(wanted, params)
        timings = {"load_s": load_s, **rates(output)}
        if as_json:
            print(json.dumps(_result(output, timings), ensure_ascii=False))
        else:
            print(flush=True)
            note(_summary(output, timings))


def _result(output: RequestOutput, timings: dict[str, Any]) -> dict[str, Any]:
    choices = [_completion(completion) for completion in output.outputs]
    result: dict[str, Any] = {"text": None, "token_ids": None, "prompt_token_ids": list(output.prompt_token_ids)}
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = [None if token is None else dict(token) for token in output.prompt_logprobs]
    result |= {**choices[0], "timings": timings}
    return result if len(choices) == 1 else {**result, "choices": choices}


def _completion(completion: CompletionOutput) -> dict[str, Any]:
    result: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is not None:
        result["logprobs"] = [dict(token) for token in completion.logprobs]
    elif completion.cumulative_logprob is not None:
        result["cumulative_logprob"] = completion.cumulative_logprob
    return result


def _summary(output: RequestOutput, timings: dict[str, Any]) -> str:
    completion = output.outputs[0]
    asked, given = len(output.prompt_token_ids), len(completion.token_ids)
    parts = [f"loaded in {timings['load_s']:.2f} s", f"{asked} prompt token{'s' * (asked != 1)}"]
    if timings["ttft_s"] is not None:
        parts.append(f"first token after {timings['ttft_s']:.2f} s")
    parts.append(f"{given} token{'s' * (given != 1)}, ended by {completion.finish_reason}")
    if timings["decode_tok_s"] is not None:
        parts.append(f"{timings['decode_tok_s']:.1f} tok/s")
    return "; ".join(parts) + "."
