"""Guessed tokens under a server: the same answers, and counts of what was guessed."""

from __future__ import annotations

import re


def test_answers_stay_and_guesses_are_counted(running, start):
    asked = {
        "prompt": [5, 6, 7, 8] * 8,
        "max_tokens": 60,
        "temperature": 1.0,
        "seed": 4,
        "n": 2,
        "logprobs": 2,
        "logit_bias": {"50": 90.0, "51": 90.0},
    }
    guessing = start(speculate=5)
    with running.http as plain, guessing.http as http:
        want, got = (client.post("/v1/completions", json=asked).json() for client in (plain, http))
        assert got["choices"] == want["choices"] and got["usage"] == want["usage"]
        figures, without = http.get("/metrics").text, plain.get("/metrics").text
    counts = [
        float(re.search(rf'^vllm:spec_decode_num_{kind}_tokens_total{{model_name="tiny"}} (.+)$', text, re.M)[1])
        for text in (figures, without)
        for kind in ("draft", "accepted")
    ]
    assert counts[0] >= counts[1] > 0 and counts[2:] == [0, 0]
