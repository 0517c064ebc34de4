"""``engine tune``: a device measures how it runs a model's kernels the fastest, and keeps that."""

from __future__ import annotations

import json
from math import isfinite
from typing import TYPE_CHECKING, Annotated

import typer

from engine.console.opening import open_llm
from engine.console.options import AsJson, EngineOptions, Model, parse_integers
from engine.console.progress import Wait
from engine.errors import UsageError

if TYPE_CHECKING:
    from engine import LLM
    from engine.backend.v1 import Tuned, Tuning

MOST_SEQUENCES = 256


def tune(
    model: Model,
    *,
    rows: Annotated[str, typer.Option(metavar="N,...", help="Tokens of the steps that are measured.")] = (
        "1,2,4,8,16,32,64,128,256,512,1024,2048"
    ),
    as_json: AsJson = False,
    engine: EngineOptions,
) -> None:
    """Measure on this device which ways of running a model's kernels are the fastest.

    Of a kernel that can be cut in several ways the device measures each, for the model's shapes and these numbers of tokens,
    and keeps the fastest for every later start, in a file that is named at the end. What it has figures of already, it does
    not measure again: remove the file to begin anew. Results stay what they are but for the order of a sum.

    \b
    Examples:
      engine tune model.gguf --backend cuda
      engine tune owner/repo --rows 1,16,512
    """
    steps = sorted(set(parse_integers(rows, "--rows", ",")))
    if not steps or steps[0] < 1:
        raise UsageError(f'--rows is "{rows}"; each step must have at least one token.')
    settings = engine.settings()
    settings |= {
        "max_num_batched_tokens": max(steps[-1], 2),
        "max_num_seqs": min(steps[-1], MOST_SEQUENCES),
        "kv_cache_tokens": 2 * steps[-1] + 32 * MOST_SEQUENCES,
    }
    with open_llm(model, settings) as llm, Wait("Tuning") as wait:
        tuning = _tuned(llm, steps, wait)
    if as_json:
        kernels = [
            {**vars(found), "usual_s": found.usual_s if isfinite(found.usual_s) else None} for found in tuning.found
        ]
        print(json.dumps({"path": tuning.path, "kernels": kernels}))
    else:
        _print(tuning)


def _tuned(llm: LLM, steps: list[int], wait: Wait) -> Tuning:
    from engine.backend.v1 import tuning_of

    device = llm.loaded.device
    tuning = tuning_of(device)
    if tuning is None:
        about = device.describe()
        raise UsageError(f"{about.name} (backend {about.backend}) has nothing to tune; --backend names another.")
    with tuning() as found:
        for n, tokens in enumerate(steps):
            wait.update("Tuning", n, len(steps))
            step(llm, tokens)
    return found


def step(llm: LLM, tokens: int) -> None:
    """One step of so many tokens, of as many sequences as there may be, whose rows the head has, too."""
    import numpy as np

    from engine import SamplingParams

    count = min(tokens, llm.loaded.config.max_num_seqs)
    lengths = [tokens // count + (n < tokens % count) for n in range(count)]
    if max(lengths) >= llm.loaded.max_model_len:
        raise UsageError(f"A step of {tokens} tokens does not fit the model's context of {llm.loaded.max_model_len}.")
    random = np.random.default_rng()
    prompts = [random.integers(0, llm.loaded.program.vocab, length).tolist() for length in lengths]
    llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))


def _gain(found: Tuned) -> float:
    """Without bound where the usual way is not possible on this card."""
    return found.usual_s / found.best_s if found.best_s else 1.0


def _print(tuning: Tuning) -> None:
    if not tuning.found:
        print(f"Nothing was measured: {tuning.path} has figures of all.")
        return
    for found in sorted(tuning.found, key=_gain, reverse=True):
        print(f"{found.what}: {found.best_s * 1e6:.1f} us, {_gain(found):.2f} x as fast as the usual")
    print(f"{len(tuning.found)} are kept in {tuning.path}.")
