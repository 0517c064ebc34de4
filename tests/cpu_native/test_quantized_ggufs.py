"""Whole models in each quantized format on the CPU: the logits and tokens of the reference, but for 8-bit activations."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_models
from session_logits import load_for_logits, logits
from weight_cases import GGUF_QUANTIZED, dequantized, random_rows

from engine import LLM, SamplingParams
from engine.formats import FORMATS

pytestmark = pytest.mark.usefixtures("cpu")

HIDDEN, MLP, LAYERS = 256, 512, 2
CONFIG = tiny_models.CONFIG | {"hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": LAYERS}
MATRICES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (MLP, HIDDEN),
    "ffn_up": (MLP, HIDDEN),
    "ffn_down": (HIDDEN, MLP),
}
ERROR = 0.05  # of the logits, relative: what 8-bit activations make of these models; wrong weights give about 1


def random_matrix(rng: np.random.Generator, name: str, columns: int, depth: int) -> np.ndarray:
    """Rows with weights of about depth^-1/2: encoded where the format has an encoder, otherwise blocks of random bytes."""
    size = depth**-0.5
    encode = FORMATS[name].encode
    if encode is not None:
        return encode(rng.standard_normal((columns, depth), np.float32) * np.float32(size))
    if name == "NVFP4":  # whose scales are bytes
        rows = random_rows(rng, name, columns, depth).reshape(columns, -1, 36)
        rows[..., :4] = rng.integers(8, 20, rows[..., :4].shape)
        return rows.reshape(columns, -1)
    ones = dequantized(name, random_rows(rng, name, columns, depth, np.array([1, -1], np.float16)))
    scale = size / ones.std()
    return random_rows(rng, name, columns, depth, np.array([scale, -scale], np.float16))


def write(path: Path, rng: np.random.Generator, matrix: str, embedding: str) -> None:
    """A llama with its matrices in one format, and its embedding and head in another."""
    writer = gguf.GGUFWriter(path, "llama")
    tiny_models._add_keys(writer, CONFIG)
    tiny_models._add_vocab(writer, json.loads(tiny_models._tokenizer_text()))
    tensors = {f"{name}.weight": (embedding, (tiny_models.VOCAB, HIDDEN)) for name in ("token_embd", "output")}
    tensors |= {f"blk.{i}.{name}.weight": (matrix, shape) for i in range(LAYERS) for name, shape in MATRICES.items()}
    for name, (form, shape) in tensors.items():
        writer.add_tensor(name, random_matrix(rng, form, *shape), raw_dtype=gguf.GGMLQuantizationType[form])
        if form == "NVFP4":
            writer.add_tensor(name.replace("weight", "scale"), rng.uniform(0.5, 1.5, 1).astype(np.float32))
    norms = [f"blk.{i}.{name}_norm" for i in range(LAYERS) for name in ("attn", "ffn")]
    for name in (*norms, "output_norm"):
        writer.add_tensor(f"{name}.weight", 1 + rng.standard_normal(HIDDEN, np.float32) / 5)
    tiny_models.finish(writer)


@pytest.mark.parametrize(
    ("matrix", "embedding"),
    [(name, name) for name in (*GGUF_QUANTIZED, "NVFP4")] + [("Q5_K", "Q6_K"), ("Q5_0", "Q8_0")],
)
def test_a_model_is_the_references_but_for_8_bit_activations(tmp_path, matrix, embedding):
    rng = np.random.default_rng()
    path = tmp_path / "model.gguf"
    write(path, rng, matrix, embedding)
    prompt = rng.integers(3, tiny_models.VOCAB, 20).tolist()
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with LLM(path, backend="cpu", strict=True, kv_cache_dtype="f32", threads=2) as llm:
        tokens = list(llm.generate([prompt], greedy)[0].outputs[0].token_ids)
        assert not llm.loaded.placement.fallbacks()
    ids = prompt + tokens
    want = logits(load_for_logits(path, "reference"), ids, (len(ids),))
    for chunks in ((len(ids),), (20, *[1] * 24)):
        got = logits(load_for_logits(path, "cpu", strict=True), ids, chunks)
        error = np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))
        assert error < ERROR, error
    # Of its own logits, since a row's error may be several times that of all.
    assert tokens == got[len(prompt) - 1 : -1].argmax(axis=1).tolist()
