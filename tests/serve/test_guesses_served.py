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
        assert http.post("/api/generate", json={"model": "tiny", "keep_alive": 0}).json()["done_reason"] == "unload"
        unloaded = http.get("/metrics").text
        http.post("/v1/completions", json=asked)
        again = http.get("/metrics").text
    counts = [
        [
            float(re.search(rf'^vllm:spec_decode_num_{kind}_tokens_total{{model_name="tiny"}} (.+)$', text, re.M)[1])
            for kind in ("draft", "accepted")
        ]
        for text in (figures, without, unloaded, again)
    ]
    assert counts[0][0] >= counts[0][1] > 0 and counts[1] == [0, 0]
    assert counts[2] == counts[0] and counts[3] == [2 * count for count in counts[0]], "what was before goes on"
