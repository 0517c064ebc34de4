"""Checks of whole programs: a backend's tokens and log-probabilities beside the reference's, alone and in any batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..backend.v1 import DeviceInfo
from ..runtime.llm import LLM
from ..runtime.outputs import RequestOutput
from ..runtime.pooling import KINDS
from ..runtime.prompt import Prompt
from ..sampling import SamplingParams
from .checkpoints import VOCAB

_NEW = 12
_TOLERANCES = {"f32": 2e-3, "f16": 2e-2, "bf16": 1e-1}


@dataclass(frozen=True)
class NearTie:
    """Where two backends chose differently because the best two tokens lie closer than their tolerance."""

    prompt: int
    position: int
    margin: float


@dataclass(frozen=True)
class Agreement:
    """The largest difference of a log-probability, and the near ties at which a comparison had to end."""

    worst: float
    ties: tuple[NearTie, ...]


def random_prompts(rng: np.random.Generator, lengths: Sequence[int] = (1, 7, 17, 50)) -> list[list[int]]:
    return [rng.integers(3, VOCAB, n).tolist() for n in lengths]


def tolerance_of(info: DeviceInfo) -> float:
    """How far a log-probability of a tiny model in f32 may be from the reference's: by what activations are stored in."""
    return _TOLERANCES[info.roles["act"]]


def answers(
    model: Path, backend: str, prompts: Sequence[Sequence[int]], new: int = _NEW, **settings: Any
) -> list[RequestOutput]:
    """Greedy continuations of ``new`` tokens with the log-probabilities of prompts and answers, all prompts at once.
    AssertionError where the device fails."""
    settings = {"kv_cache_dtype": "f32", "max_num_seqs": 8, "max_model_len": 96, "warm_up": False, **settings}
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    with LLM(model, backend=backend, **settings) as llm:
        found = llm.generate([list(p) for p in prompts], params)
    for n, output in enumerate(found):
        ended = output.outputs[0]
        assert ended.finish_reason != "error", f"prompt {n}: {ended.stop_reason}"
    return found


def compare_answers(got: Sequence[RequestOutput], want: Sequence[RequestOutput], tolerance: float) -> Agreement:
    """AssertionError for a log-probability that differs by more than ``tolerance``, or for another token where the
    reference's best two lie further apart than that."""
    worst, ties = 0.0, []
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        for position, (x, y) in enumerate(
            zip((a.prompt_logprobs or ())[1:], (b.prompt_logprobs or ())[1:], strict=True), 1
        ):
            token = b.prompt_token_ids[position]
            assert x is not None and y is not None
            worst = max(worst, _difference(f"prompt {n}, token {position}", x[token], y[token], tolerance))
        for position, (x, y) in enumerate(zip(a.outputs[0].logprobs or (), b.outputs[0].logprobs or (), strict=True)):
            token, chosen = b.outputs[0].token_ids[position], a.outputs[0].token_ids[position]
            if token != chosen:
                margin = y[token] - sorted(y.values())[-2]
                assert margin <= 2 * tolerance, (
                    f"prompt {n}, answer's token {position}: {chosen} for {token}, which the reference has {margin:.3g} ahead."
                )
                ties.append(NearTie(n, position, margin))
                break
            worst = max(worst, _difference(f"prompt {n}, answer's token {position}", x[token], y[token], tolerance))
    return Agreement(worst, tuple(ties))


def _difference(where: str, got: float, want: float, tolerance: float) -> float:
    difference = abs(got - want)
    assert difference <= tolerance, f"{where}: the log-probability is {got:.6f} and should be {want:.6f}."
    return difference


def check_batching(model: Path, backend: str, prompts: Sequence[Sequence[int]], **settings: Any) -> None:
    """Each prompt alone gives the bits that it gives among the others, in small steps and in large ones."""
    together = answers(model, backend, prompts, **settings)
    small = answers(model, backend, prompts, max_num_batched_tokens=5, **settings)
    for n, prompt in enumerate(prompts):
        alone = answers(model, backend, [prompt], **settings)[0]
        for other, how in ((alone, "alone"), (small[n], "in steps of 5 tokens")):
            _same(f"prompt {n} {how}", other, together[n])


def check_embeddings(model: Path, backend: str, prompts: Sequence[Sequence[int]], tolerance: float) -> None:
    """Embeddings of all prompts at once, of length 1, are the reference's within ``tolerance``; where rows claim not to depend
    on each other, each prompt's alone has the same bits."""
    settings: dict[str, Any] = {"kv_cache_dtype": "f32", "max_num_seqs": 8, "max_model_len": 96, "warm_up": False}
    given: list[Prompt] = [list(p) for p in prompts]
    with LLM(model, backend=backend, **settings) as llm, LLM(model, backend="reference", **settings) as reference:
        invariant = all(placed.provider.batch_invariant for placed in llm.loaded.placement.calls)
        for pooling in KINDS:
            got, want = llm.embed(given, pooling), reference.embed(given, pooling)
            worst = float(np.abs(got - want).max())
            assert worst <= tolerance, f"the embeddings' {pooling} is {worst:.3g} from the reference's."
            for n, prompt in enumerate(given if invariant else ()):
                assert (llm.embed([prompt], pooling)[0] == got[n]).all(), f"prompt {n}, {pooling}: other bits alone."


def _same(where: str, got: RequestOutput, want: RequestOutput) -> None:
    assert got.outputs[0].token_ids == want.outputs[0].token_ids, f"{where}: other tokens than in the batch."
    assert got.outputs[0].logprobs == want.outputs[0].logprobs, f"{where}: other log-probabilities than in the batch."
    assert got.prompt_logprobs == want.prompt_logprobs, (
        f"{where}: other log-probabilities of the prompt than in the batch."
    )


def claims_invariance(model: Path, backend: str) -> bool:
    """Whether every provider that this model would run on claims that rows do not depend on each other."""
    with LLM(model, backend=backend, max_model_len=96, warm_up=False) as llm:
        return all(placed.provider.batch_invariant for placed in llm.loaded.placement.calls)
