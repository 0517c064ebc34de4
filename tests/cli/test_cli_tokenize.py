"""engine tokenize: exact ids of exact bytes, and nothing else on the line."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tiny_models

from engine.formats import open_checkpoint

TEXT = "\ufeff  naïve\r\ncafé\t東京 🙂 <s>\r\n\n"


def test_a_file_is_read_as_it_is(process, llama, tmp_path):
    (tmp_path / "text").write_bytes(TEXT.encode())
    tokenizer = open_checkpoint(llama).tokenizer()
    done = process("tokenize", llama, "--file", tmp_path / "text")
    assert (done.status, done.err) == (0, "")
    assert done.out == " ".join(map(str, tokenizer.encode(TEXT))) + "\n"
    assert process("tokenize", llama, "-", given=TEXT.encode()).out == done.out
    assert process("tokenize", llama, TEXT).out == done.out
    special = process("tokenize", llama, TEXT, "--special").out.split()
    assert special.count("1") == 2 and special[0] == "1"  # the one put before, and the one in the text
    assert process("tokenize", llama, "--decode", done.out).out == TEXT + "\n"


def test_decode_shows_control_tokens_when_asked(engine, llama):
    ids = engine("tokenize", llama, "Once", "--special").out
    assert engine("tokenize", llama, "--decode", ids).out == "Once\n"
    assert engine("tokenize", llama, "--decode", ids, "--special").out == "<s>Once\n"


def test_an_empty_text_has_no_ids(engine, llama):
    assert engine("tokenize", llama, "").out == "\n"


def test_a_vocabulary_alone_will_do(engine, llama, tmp_path):
    whole = tiny_models.to_gguf(llama, tmp_path / "whole.gguf")
    assert engine("tokenize", whole, TEXT).out == engine("tokenize", llama, TEXT).out


@pytest.mark.shared
@pytest.mark.parametrize("name", ["llama-spm", "qwen2"])
def test_real_vocabularies(engine, stories, name):
    vocabulary = stories.parents[1] / "vocab"
    inputs = (vocabulary / f"{name}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    wanted = (vocabulary / f"{name}.out").read_text().split("\n")
    for text, ids in list(zip(inputs, wanted, strict=False))[-4:-1]:
        assert engine("tokenize", vocabulary / f"{name}.gguf", text).out.split() == ids.split()


def test_no_backend_is_loaded(llama):
    code = (
        "import sys; from engine.cli.main import run\n"
        f"run(['tokenize', {str(llama)!r}, 'a'])\n"
        "unwanted = ('engine_', 'engine.backend.registry', 'engine.runtime')\n"
        "print(sorted(m for m in sys.modules if m.startswith(unwanted)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--file"),
        (["text", "--decode", "1"], "--file"),
        (["--decode", "1 two"], '"1 two"'),
        (["--decode", "99999"], "99999"),
        (["--file", "/does/not/exist"], "cannot be read"),
    ],
)
def test_refuses_in_one_line(refusal, llama, arguments, said):
    assert said in refusal("tokenize", llama, *arguments)


def test_refuses_what_is_no_text(refusal, llama, tmp_path):
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    assert "byte 2 is 0xff" in refusal("tokenize", llama, "--file", tmp_path / "bytes")
