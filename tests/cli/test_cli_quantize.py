"""engine quantize, imatrix and perplexity: one line of result, notices and faults in one line each."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tiny_models

from engine.formats import open_checkpoint

TEXT = "Once upon a time there was a small engine that could. " * 20


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_text(TEXT)
    return path


def test_from_a_folder_to_a_model_that_speaks(engine, llama, tmp_path, text, cpu):
    imatrix, out = tmp_path / "imatrix.gguf", tmp_path / "model.gguf"
    done = engine("imatrix", llama, text, "-o", imatrix, "--context", 32, "--threads", 2)
    assert (done.status, done.err) == (0, "") and done.out.startswith(f"{imatrix}: 14 matrices over ")
    done = engine("quantize", llama, out, "--type", "q4_k_m", "--imatrix", imatrix)
    assert done.status == 0 and done.out.startswith(f"{out}: ") and done.out.count("\n") == 1
    assert all(line.startswith("engine: ") for line in done.err.splitlines())
    assert "rows of 64, no whole number of Q4_K blocks, became Q5_0" in done.err
    assert open_checkpoint(out).metadata["quantize.imatrix.dataset"] == str(text)
    one = engine("perplexity", out, text, "--context", 32, "--threads", 2, "--json").json
    both = engine("perplexity", out, text, "--context", 32, "--threads", 2, "--kl", llama, "--json").json
    assert {name: both[name] for name in one} == one and one["stride"] == 32
    assert 0 < both["kl"]["mean"] < 0.5 and both["kl"]["same_top"] > 0.4
    assert both["base"]["perplexity"] == engine("perplexity", llama, text, "--context", 32, "--json").json["perplexity"]


def test_what_perplexity_prints(engine, llama, text, cpu):
    lines = engine("perplexity", llama, text, "--context", 32, "--stride", 16, "--kl", llama).out.splitlines()
    assert len(lines) == 4 and lines[0].startswith("perplexity ") and lines[1].endswith("of the base")
    assert lines[2].startswith("KL divergence 0.000000 +/- 0.000000") and lines[3].endswith("100.00 %")
    alone = engine("perplexity", llama, text, "--context", 32, "--stride", 16).out.splitlines()
    assert alone == lines[:1]


@pytest.mark.parametrize(("kind", "method"), [("nf4", "bitsandbytes"), ("INT8", "compressed-tensors")])
def test_folders(engine, llama, tmp_path, kind, method):
    done = engine("quantize", llama, tmp_path / "out", "-t", kind)
    assert done.status == 0 and ("keep their form" in done.err) == (kind == "nf4")  # 96 inputs are no multiple of 64
    assert method in (tmp_path / "out" / "config.json").read_text()


def test_refuses_in_one_line(refusal, llama, tmp_path, text):
    out = tmp_path / "out.gguf"
    assert "Q4_K_M" in refusal("quantize", llama, out, "--type", "Q7")
    assert "--type" in refusal("quantize", llama, out)
    assert "no folder" in refusal("quantize", llama, tmp_path / "none" / "out.gguf", "-t", "Q8_0")
    for kind, idle in (
        ("NF4", ("--imatrix", text)),
        ("INT8", ("--threads", 2)),
        ("INT8", ("--double-quant",)),
        ("Q8_0", ("--double-quant",)),
        ("Q8_0", ("--shard-size", 5)),
    ):
        assert f"{idle[0]} is nothing for {kind}" in refusal("quantize", llama, out, "-t", kind, *idle)
    assert "not a valid GGUF" in refusal("quantize", llama, out, "-t", "Q8_0", "--imatrix", text)
    assert "cannot be read" in refusal("perplexity", llama, tmp_path / "none")
    assert "2 to 256" in refusal("perplexity", llama, text, "--context", 1000)
    assert "--stride is 40" in refusal("perplexity", llama, text, "--context", 32, "--stride", 40)
    for command in (("perplexity", llama, text), ("imatrix", llama, text, "-o", out)):
        assert "--max-context is 16" in refusal(*command, "--context", 32, "--max-context", 16)
    assert "--shard-size" in refusal("quantize", llama, out, "-t", "NF4", "--shard-size", "inf")
    out.write_bytes(b"mine")
    for command in (("quantize", llama, out, "-t", "Q8_0"), ("imatrix", llama, text, "-o", out)):
        assert "--force" in refusal(*command)
    assert out.read_bytes() == b"mine"
    other = tmp_path / "other"
    other.mkdir()
    tensors = tiny_models.llama_tensors(np.random.default_rng(), tiny_models.CONFIG)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] = tensors["lm_head.weight"][:300]
    tiny_models.write_llama(other, np.random.default_rng(), tensors, vocab_size=300)
    assert "different vocabularies" in refusal("perplexity", llama, text, "--kl", other, "--context", 32)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_of_what_is_ended(tmp_path, number):
    """As by Ctrl-C, by a service's stop and by a terminal that is closed."""
    wide = tiny_models.CONFIG | {"intermediate_size": 1 << 17}
    rng = np.random.default_rng()
    tiny_models.write_llama(tmp_path, rng, tiny_models.llama_tensors(rng, wide), intermediate_size=1 << 17)
    command = [sys.executable, "-m", "engine", "quantize", tmp_path, tmp_path / "out.gguf", "-t", "q3_k_m"]
    before = set(tmp_path.iterdir())
    running = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    while not any(path.suffix == ".part" for path in tmp_path.iterdir()):
        assert running.poll() is None, "it ended too early to be ended"
        time.sleep(0.005)
    running.send_signal(number)
    out, err = running.communicate(timeout=30)
    assert (running.returncode, out) == (128 + number, b"") and b"Traceback" not in err
    assert set(tmp_path.iterdir()) == before
