"""Outputs of a stream: what is copied only when it is asked for is as it was then."""

from __future__ import annotations

import pickle
from copy import copy
from dataclasses import asdict, replace

import pytest

from engine.runtime.outputs import CompletionOutput


def made(tokens: list[int], logprobs: list[dict[int, float]] | None) -> CompletionOutput:
    rest = {"index": 1, "text": "ab", "cumulative_logprob": None, "stop_reason": None}
    return CompletionOutput.growing(tokens, logprobs, None, **rest)


@pytest.mark.parametrize("kept", [True, False])
def test_an_output_stays_what_it_was(kept):
    tokens, logprobs = [3, 4], [{3: -1.0}, {4: -2.0}] if kept else None
    early, late = made(tokens, logprobs), made(tokens, logprobs)
    plain = CompletionOutput(1, "ab", (3, 4), None, ({3: -1.0}, {4: -2.0}) if kept else None)
    assert early == plain and repr(early) == repr(plain)
    tokens.append(5)
    if logprobs is not None:
        logprobs.append({5: -3.0})
    for found in (late, pickle.loads(pickle.dumps(made(tokens[:2], logprobs and logprobs[:2]))), copy(late)):
        assert (found, asdict(found)) == (plain, asdict(plain))
    assert replace(made(tokens, logprobs), token_ids=(), logprobs=None).token_ids == ()
    assert made(tokens, logprobs).token_ids == (3, 4, 5)
    with pytest.raises(AttributeError, match="no attribute 'tokens'"):
        late.tokens  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("kept", [True, False])
def test_what_is_new_of_an_output(kept):
    tokens, logprobs = [3, 4, 6], [{3: -1.0}, {4: -2.0}, {6: -4.0}] if kept else None
    output = made(tokens, logprobs)
    plain = replace(made(tokens, logprobs))
    tokens.append(5)
    if logprobs is not None:
        logprobs.append({5: -3.0})
    for found in (output, plain):
        assert found.num_tokens == 3
        for start in range(4):
            new, scored = found.since(start)
            assert list(new) == [3, 4, 6][start:]
            assert scored is None if logprobs is None else list(scored) == logprobs[start:3]
