"""engine chat and engine generate where no model is given: the built-in demo."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import pytest

from engine import LLM, SamplingParams
from engine.demo import MODEL

COMMAND = [sys.executable, "-m", "engine.cli.main"]
NOTE = "engine: No model is given, so this is the small built-in demo; engine pull OWNER/REPO gets a real one.\n"
GREEDY = ("--temperature", "0", "--backend", "cpu")


def test_chat_without_a_model(engine):
    done = engine("chat", "-p", "what are you?", *GREEDY)
    assert done.status == 0 and "demo" in done.out and done.err.startswith(NOTE)
    named = engine("chat", MODEL, "-p", "what are you?", *GREEDY)
    assert named.out == done.out and NOTE not in named.err


def test_generate_without_a_model(engine):
    text = "Once upon a time there was a fox named"
    done = engine("generate", text, "--max-tokens", 12, *GREEDY)
    assert done.status == 0 and done.out.strip() and done.err.startswith(NOTE)
    assert engine("generate", MODEL, text, "--max-tokens", 12, *GREEDY).out == done.out
    ids = engine("generate", "--prompt-ids", "1 300", "--max-tokens", 2, *GREEDY)
    assert ids.status == 0 and ids.err.startswith(NOTE)


def test_generate_samples_as_the_makers_recommend(engine):
    """The demo's recommend a temperature of 0.3; an option goes before that, the default's own value too."""
    ask = ("generate", "Once upon a time", "--max-tokens", 40, "--seed", 7, "--backend", "cpu")
    plain = engine(*ask).out
    assert plain == engine(*ask, "--temperature", 0.3).out != engine(*ask, "--temperature", 1).out
    assert engine("generate", "Once", "--beams", 2, "--max-tokens", 4, "--backend", "cpu").status == 0
    with LLM(MODEL, backend="cpu") as llm:
        assert llm.default_sampling_params == SamplingParams(temperature=llm.loaded.checkpoint.sampling["temperature"])
        seeded = [replace(llm.default_sampling_params, seed=7, max_tokens=40)]
        assert llm.generate(["Once upon a time"], seeded)[0].outputs[0].text == plain[:-1]


@pytest.mark.parametrize("given", ["missing.gguf", str(MODEL)])
def test_a_model_without_a_text_is_refused(refusal, given):
    assert "--prompt-ids" in refusal("generate", given)


def test_a_long_text_is_no_file_name(engine):
    assert engine("generate", "word " * 300, "--max-tokens", 1, *GREEDY).status == 0


@pytest.mark.clock
def test_the_first_token_comes_soon_after_the_start():
    """Half a second on an idle machine; here the best of five, with room for what else the machine does."""
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        with subprocess.Popen(
            [*COMMAND, "chat", "-p", "hello", *GREEDY], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as running:
            running.stdout.read(1)
            best = min(best, time.perf_counter() - began)
            running.communicate()
    assert best < 1.5
