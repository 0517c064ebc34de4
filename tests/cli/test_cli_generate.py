"""engine generate: its JSON, its streamed text, what it refuses."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import numpy as np
import pytest
import tiny_models

from engine.cli import generate as generating
from engine.console.opening import open_llm
from engine.formats import open_checkpoint

REFERENCE = ("--backend", "reference")
GREEDY = ("--temperature", "0")
STORY = ", there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, red ball."


@pytest.mark.shared
@pytest.mark.parametrize("file", ["stories260K-f32.gguf", "hf"])
def test_tells_the_published_story(process, backend, stories, file):
    settings = ("--max-tokens", 200, *GREEDY, "--backend", backend)
    plain = process("generate", stories / file, "Once upon a time", *settings)
    assert plain.status == 0 and plain.out.startswith(STORY) and plain.out.endswith("\n")
    told = process("generate", stories / file, "Once upon a time", *settings, "--json").json
    assert told["text"] + "\n" == plain.out
    assert told["prompt_token_ids"] == [1, 403, 407, 261, 378]
    assert len(told["token_ids"]) == 200 and told["finish_reason"] == "length"


def test_json_has_the_promised_shape(engine, llama):
    done = engine("generate", llama, "Once", "--max-tokens", 7, "--ignore-eos", "--logprobs", 3, "--json", *REFERENCE)
    assert (done.status, done.err) == (0, "")
    result = done.json
    assert list(result) == [
        "text",
        "token_ids",
        "prompt_token_ids",
        "finish_reason",
        "logprobs",
        "timings",
    ]
    tokenizer = open_checkpoint(llama).tokenizer()
    assert result["prompt_token_ids"] == tokenizer.encode("Once", add_special=True)
    assert len(result["token_ids"]) == 7 and result["finish_reason"] == "length"
    for token, logprobs in zip(result["token_ids"], result["logprobs"], strict=True):
        assert str(token) in logprobs and 3 <= len(logprobs) <= 4
        assert sum(np.exp(p) for p in logprobs.values()) <= 1 + 1e-5
    timings = result["timings"]
    assert list(timings) == ["load_s", "ttft_s", "prefill_tok_s", "decode_tok_s"]
    assert all(value > 0 for value in timings.values())
    assert timings["prefill_tok_s"] == pytest.approx(len(result["prompt_token_ids"]) / timings["ttft_s"])


def test_rates_that_do_not_exist_are_null(engine, llama):
    result = engine("generate", llama, "a", "--max-tokens", 1, "--json", *REFERENCE).json
    assert result["timings"]["decode_tok_s"] is None and "logprobs" not in result


def test_ids_and_stdin_stand_for_the_text(engine, llama, monkeypatch):
    settings = ("--max-tokens", 6, *GREEDY, "--json", *REFERENCE)
    first = engine("generate", llama, "Once\n", *settings).json
    ids = " ".join(map(str, first["prompt_token_ids"]))
    assert engine("generate", llama, "--prompt-ids", ids, *settings).json["text"] == first["text"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Once\n")))
    assert engine("generate", llama, "-", *settings).json["prompt_token_ids"] == first["prompt_token_ids"]


def test_several_completions_are_choices(engine, llama):
    settings = ("--max-tokens", 5, "--seed", 3, "--ignore-eos", "--json", *REFERENCE)
    several = engine("generate", llama, "Once", "--n", 3, *settings).json
    assert len(several["choices"]) == 3 and len({tuple(c["token_ids"]) for c in several["choices"]}) > 1
    assert {k: several[k] for k in several["choices"][0]} == several["choices"][0]
    assert several["token_ids"] == engine("generate", llama, "Once", *settings).json["token_ids"]


def test_options_reach_the_sampler(engine, llama):
    def text(*options: object) -> str:
        done = engine("generate", llama, "Once", "--max-tokens", 12, "--ignore-eos", "--json", *REFERENCE, *options)
        assert done.status == 0, done.err
        return done.json["text"]

    greedy = text(*GREEDY)
    assert text("--top-k", 1) == text("--top-p", 1e-6) == text("--min-p", 1) == greedy
    assert text("--seed", 5) == text("--seed", 5) != greedy
    assert text(*GREEDY, "--presence-penalty", 50) != greedy
    middle = greedy[2:4]
    assert text(*GREEDY, "--stop", middle) == greedy.split(middle)[0]
    engine_options = (
        "--block-size",
        4,
        "--max-batch-tokens",
        3,
        "--kv-dtype",
        "f32",
        "--max-context",
        100,
        "--threads",
        1,
    )
    assert len(text(*GREEDY, *engine_options)) > 0


def test_text_is_streamed_whole_and_the_rest_goes_to_stderr(engine, llama):
    settings = ("--max-tokens", 12, *GREEDY, "--ignore-eos", *REFERENCE)
    done = engine("generate", llama, "Once", *settings)
    assert done.out == engine("generate", llama, "Once", *settings, "--json").json["text"] + "\n"
    assert "12 tokens, ended by length" in done.err and "tok/s" in done.err
    assert "; 1 token, ended by length." in engine("generate", llama, "Once", *settings, "--max-tokens", 1).err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--prompt-ids"),
        (["text", "--prompt-ids", "1"], "--prompt-ids"),
        (["--prompt-ids", "1 x"], '"1 x"'),
        (["--prompt-ids", "-1"], '"-1"'),
        (["--prompt-ids", "1 320"], "320"),
        (["text", "--logprobs", "1"], "--json"),
        (["text", "--n", "2"], "--json"),
        (["text", "--temperature", "-1"], "temperature"),
        (["text", "--max-tokens", "0"], "--max-tokens is 0"),
        (["text", "--max-tokens", "300"], "context"),
        (["text", "--kv-dtype", "f12"], "f12"),
        (["text", "--block-size", "7"], "7"),
        (["text", "--backend", "nowhere"], "nowhere"),
        (["text", "--without", "nothing"], "nothing"),
        (["text \udce9"], "Unicode"),
    ],
)
def test_refuses_in_one_line(refusal, llama, arguments, said):
    assert said in refusal("generate", llama, *REFERENCE, *arguments)


def test_a_request_that_fails_is_told_with_status_2(refusal, tmp_path):
    tensors = tiny_models.llama_tensors(np.random.default_rng(0), tiny_models.CONFIG)
    tensors["model.norm.weight"][0] = np.nan
    tiny_models.write_llama(tmp_path, np.random.default_rng(0), tensors)
    assert "not finite" in refusal("generate", tmp_path, "text", "--max-tokens", 3, "--json", *REFERENCE)


def test_generate_imports_no_torch(llama):
    code = (
        "import sys; from engine.cli.main import run\n"
        f"assert run(['generate', {str(llama)!r}, 'a', '--max-tokens', '2', '--json']) == 0\n"
        "print([m for m in ('torch', 'transformers', 'jax', 'mlx', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    result, found = done.stdout.splitlines()
    assert len(json.loads(result)["token_ids"]) in (1, 2)
    assert found == "[]"


def test_a_form_is_kept(engine, llama, tmp_path):
    settings = ("--max-tokens", 60, "--seed", 1, "--json", *REFERENCE)
    schema, grammar = tmp_path / "schema.json", tmp_path / "text.gbnf"
    schema.write_text('{"type": "array", "items": {"enum": ["x", 1]}, "minItems": 2, "maxItems": 3}')
    grammar.write_text('root ::= "yes" | "no"\n')
    listed = json.loads(engine("generate", llama, "Once", "--schema", schema, *settings).json["text"])
    assert 2 <= len(listed) <= 3 and set(listed) <= {"x", 1}
    assert engine("generate", llama, "Once", "--grammar", grammar, *settings).json["text"] in ("yes", "no")
    told = engine("generate", llama, "Once", "--regex", "[ab]{3}", *settings).json
    assert set(told["text"]) <= {"a", "b"} and len(told["text"]) == 3 and told["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("options", "content", "said"),
    [
        (["--schema"], b'{"type": "text"}', "Invalid type"),
        (["--schema"], b"[", "engine: --schema {} is no JSON schema: Expecting value"),
        (["--grammar"], b"", "engine: --grammar {} must be a text that is not empty."),
        (["--schema"], b"\xff", "is not UTF-8"),
        (["--schema"], b" " * (1 << 20) + b"{}", "larger than 1 MiB"),
        (["--schema"], None, "cannot be read"),
        (["--grammar"], b"root", "neither Lark nor GBNF"),
        (["--regex", "a", "--grammar"], b'root ::= "a"', "Give one of"),
    ],
)
def test_refuses_a_form_in_one_line(refusal, llama, tmp_path, options, content, said):
    file = tmp_path / "form"
    if content is not None:
        file.write_bytes(content)
    assert said.format(file) in refusal("generate", llama, "text", *REFERENCE, *options, file)


def test_beams_are_the_best_and_come_best_first(engine, llama):
    settings = ("--max-tokens", 6, "--ignore-eos", "--prompt-ids", "1 40 50", *REFERENCE)
    one = engine("generate", llama, "--beams", 3, *settings)
    result = engine("generate", llama, "--beams", 3, "--n", 3, "--length-penalty", 0.5, "--json", *settings).json
    sums = [choice["cumulative_logprob"] for choice in result["choices"]]
    assert sums == sorted(sums, reverse=True) and len(sums) == 3
    assert one.status == 0 and one.out == result["text"] + "\n"
    for stopping in ("true", "never"):
        done = engine("generate", llama, "--beams", 3, "--early-stopping", stopping, "--json", *settings).json
        assert done["token_ids"] == result["token_ids"]


def test_best_of_and_prompt_logprobs(engine, llama):
    settings = ("--max-tokens", 5, "--seed", 3, "--prompt-ids", "1 40 50", "--json", *REFERENCE)
    every = engine("generate", llama, "--n", 4, "--logprobs", 0, *settings).json["choices"]
    best = engine("generate", llama, "--best-of", 4, "--prompt-logprobs", 1, *settings).json
    sums = [sum(next(iter(token.values())) for token in choice["logprobs"]) for choice in every]
    assert best["cumulative_logprob"] == pytest.approx(max(sums))
    assert best["token_ids"] == every[int(np.argmax(sums))]["token_ids"]
    assert best["prompt_logprobs"][0] is None and ["40" in best["prompt_logprobs"][1]] == [True]


def test_n_grams_and_typical_p(engine, llama):
    settings = ("--max-tokens", 30, "--ignore-eos", "--prompt-ids", "1 40 50", "--json", *REFERENCE)
    tokens = engine("generate", llama, "--no-repeat-ngram-size", 1, *GREEDY, *settings).json["token_ids"]
    assert len(set(tokens)) == 30
    likely = engine("generate", llama, "--typical-p", 0.1, "--seed", 1, *settings).json["token_ids"]
    assert likely != engine("generate", llama, "--seed", 1, *settings).json["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--beams", 2, "--temperature", 0.5), "--temperature is for sampling, and --beams samples nothing"),
        (("--beams", 2, "--typical-p", 0.5), "--typical-p is for sampling"),
        (("--beams", 2, "--best-of", 3), "--beams goes without --best-of"),
        (("--beams", 2, "--early-stopping", "soon"), "--early-stopping is 'soon'"),
        (("--length-penalty", 2), "--length-penalty and --early-stopping are for --beams"),
        (("--prompt-logprobs", 2), "--prompt-logprobs need --json"),
        (("--beams", 2, "--n", 3, "--json"), "--n is 3"),
    ],
)
def test_beams_go_with_some_options_only(refusal, llama, arguments, sentence):
    assert sentence in refusal("generate", llama, "Once", *arguments, *REFERENCE)


def test_collectives_that_there_are_not_are_refused_with_one_rank_too(refusal, llama):
    assert "There are no collectives 'glo'" in refusal("generate", llama, "a", "--collectives", "glo", *REFERENCE)


@pytest.mark.parametrize(("options", "sequences"), [((), 1), (("--n", 3, "--json"), 3), (("--beams", 2), 2)])
def test_the_cache_is_for_the_sequences_that_there_are(engine, llama, monkeypatch, options, sequences):
    asked = []
    monkeypatch.setattr(
        generating, "open_llm", lambda model, settings: asked.append(settings) or open_llm(model, settings)
    )
    assert engine("generate", llama, "text", "--max-tokens", 2, *options, *REFERENCE).status == 0
    assert asked[0]["max_num_seqs"] == sequences
