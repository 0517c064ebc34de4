"""Every processor and their order: on stories260K the tokens are those that transformers' processors leave."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine.ops.head import gumbel

VOCAB = 512
EOS = 2
ROUNDING = 2e-5


@pytest.fixture(scope="module")
def peer(stories_peer):
    """processed(ids, prompt length, params, shift) -> transformers' scores of the next token, f64 [V]: -inf is removed.
    ``shift`` is added to the logits."""
    torch, transformers, model = stories_peer

    def processors(prompt_length, params):
        config = transformers.GenerationConfig(
            do_sample=params.temperature > 0,
            temperature=params.temperature or None,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p or None,
            typical_p=params.typical_p,
            repetition_penalty=float(params.repetition_penalty),
            no_repeat_ngram_size=params.no_repeat_ngram_size,
            min_new_tokens=params.min_tokens or None,
            num_beams=1,
        )
        config._eos_token_tensor = torch.tensor([EOS])
        return model._get_logits_processor(config, input_ids_seq_length=prompt_length)

    def processed(ids, prompt_length, params, shift=0.0):
        given = torch.tensor([ids])
        with torch.no_grad():
            logits = model(given).logits[:, -1].double() + torch.from_numpy(np.broadcast_to(shift, VOCAB).copy())
            return processors(prompt_length, params)(given, logits)[0].numpy()

    return processed


@pytest.fixture(scope="module")
def teller(stories):
    opened = {}

    def get(backend):
        if backend not in opened:
            opened[backend] = LLM(stories / "hf", backend=backend, kv_cache_dtype="f32", threads=2)
        return opened[backend]

    yield get
    for llm in opened.values():
        llm.close()


ALONE = [
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3},
    {"no_repeat_ngram_size": 9},
    {"temperature": 1.6, "top_k": 7},
    {"temperature": 1.6, "top_p": 0.7},
    {"temperature": 1.6, "min_p": 0.1},
    {"temperature": 1.6, "typical_p": 0.4},
    {"temperature": 0.8, "typical_p": 0.9},
    {"temperature": 1.0, "typical_p": 0.05},
]


def random_params(rng):
    return {
        "temperature": rng.choice([0.0, 0.7, 1.0, 2.0]),
        "top_k": rng.choice([0, 0, 3, 40, 600]),
        "top_p": rng.choice([1.0, 0.95, 0.6]),
        "min_p": rng.choice([0.0, 0.02, 0.2]),
        "typical_p": rng.choice([1.0, 0.9, 0.5, 0.1]),
        "repetition_penalty": rng.choice([1.0, 1.2, 0.9]),
        "no_repeat_ngram_size": rng.choice([0, 1, 2, 3, 4]),
        "min_tokens": rng.choice([0, 3, 12]),
    }


def check(llm, processed, prompt, **chosen):
    """Each token is the best of transformers' scores with the engine's noise. Where a threshold or an order is a matter of
    rounding, it is that of logits which differ by no more."""
    rng = np.random.default_rng()
    params = SamplingParams(**{"temperature": 0.0, "seed": int(rng.integers(2**63)), "max_tokens": 16} | chosen)
    output = llm.generate([prompt], params)[0].outputs[0]
    key = np.array([params.seed & 0xFFFFFFFF, params.seed >> 32], np.uint32)
    ids = list(prompt)
    for token in output.token_ids:
        noise = gumbel(key, len(ids), np.uint32(0), VOCAB) if params.temperature else 0
        wanted = int(np.argmax(processed(ids, len(prompt), params) + noise))
        if token != wanted:
            shifts = rng.normal(0, ROUNDING, (30, VOCAB))
            assert any(token == np.argmax(processed(ids, len(prompt), params, s) + noise) for s in shifts), (
                chosen, ids, token, wanted,
            )  # fmt: skip
            return
        ids.append(token)


@pytest.mark.parametrize("chosen", ALONE, ids=str)
def test_each_processor(teller, peer, backend, chosen):
    prompt = teller(backend).get_tokenizer().encode("Once upon a time, upon a", add_special=True)
    check(teller(backend), peer, prompt, **chosen)


def test_any_combination(teller, peer, cpu):
    rng = random.Random(int(np.random.default_rng().integers(2**32)))
    for _ in range(25):
        prompt = [1] + [rng.randrange(3, 60) for _ in range(rng.choice([0, 4, 40]))]
        check(teller(cpu), peer, prompt, **random_params(rng))
