"""Encoders written as GGUF files: the same vectors of the same texts, by the pooling that the folder names."""

from __future__ import annotations

import json

import numpy as np
import pytest
from checkpoints import save, save_model
from encoder_models import encoder_of
from safetensors.numpy import save_file
from wordpiece import write_wordpiece

from engine import LLM
from engine.errors import ModelError
from engine.formats import open_checkpoint
from engine.quantize.mix import TYPES
from engine.quantize.to_gguf import quantize_to_gguf

TEXTS = ["a", "Once upon a time, there was a little GIRL.", "naïve café, 3.14 🙂 and so on " * 6]


def write_modules(folder, pooling, *matrices):
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling}))
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling")]
    for number, matrix in enumerate(matrices, 2):
        kinds.append(("Dense", f"{number}_Dense"))
        (folder / f"{number}_Dense").mkdir()
        act = {"activation_function": "torch.nn.modules.linear.Identity"}
        (folder / f"{number}_Dense" / "config.json").write_text(json.dumps(act))
        save_file({"linear.weight": matrix}, folder / f"{number}_Dense" / "model.safetensors")
    kinds.append(("Normalize", "9_Normalize"))
    listed = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds]
    (folder / "modules.json").write_text(json.dumps(listed))


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize(
    "name", ["bert", "distilbert", "xlm-roberta", "nomic_bert", "modernbert", "modernbert silu", "eurobert"]
)
def test_vectors_are_the_folder_s(tmp_path, name, lowercase):
    folder = save_model(encoder_of(name), tmp_path / "folder")
    for file in folder.glob("*token*"):
        file.unlink()
    write_wordpiece(folder, lowercase)
    write_modules(folder, "cls")
    quantize_to_gguf(open_checkpoint(folder), tmp_path / "model.gguf", TYPES["F32"])
    settings = {"backend": "cpu", "kv_cache_dtype": "f32"}
    with LLM(folder, **settings) as one, LLM(tmp_path / "model.gguf", **settings) as other:
        ids = [one.engine.encode(text) for text in TEXTS]
        assert ids == [other.engine.encode(text) for text in TEXTS] and {ids[1][0], ids[1][-1]} == {2, 3}
        np.testing.assert_allclose(other.embed(TEXTS), one.embed(TEXTS, "cls"), atol=1e-5)
        assert np.abs(one.embed(TEXTS) - one.embed(TEXTS, "mean")).max() > 0.01
    keys = open_checkpoint(tmp_path / "model.gguf").metadata
    assert keys["tokenizer.ggml.token_type_count"] == (2 if name in ("bert", "nomic_bert") else 1)  # as llama.cpp asks
    assert (keys["tokenizer.ggml.cls_token_id"], keys["tokenizer.ggml.mask_token_id"]) == (2, 4)


def test_a_pooling_is_written_for_decoders_and_where_nobody_names_one(tmp_path):
    folder = save_model(encoder_of("bert"), tmp_path / "folder")
    quantize_to_gguf(open_checkpoint(folder), tmp_path / "mean.gguf", TYPES["F16"])
    assert open_checkpoint(tmp_path / "mean.gguf").embedding().pooling == "mean"
    folder = save("qwen3", tmp_path / "decoder")
    for pooling in (None, "mean"):
        if pooling is not None:
            write_modules(folder, pooling)
        quantize_to_gguf(open_checkpoint(folder), tmp_path / f"{pooling}.gguf", TYPES["F16"], force=True)
        assert open_checkpoint(tmp_path / f"{pooling}.gguf").embedding().pooling == pooling


def test_what_has_no_form_is_refused(tmp_path):
    folder = save_model(encoder_of("bert of another activation"), tmp_path / "folder")
    with pytest.raises(ModelError, match="sets act in a way"):
        quantize_to_gguf(open_checkpoint(folder), tmp_path / "model.gguf", TYPES["F16"])
    folder = save_model(encoder_of("nomic_bert"), tmp_path / "with a matrix")
    write_modules(folder, "mean", np.ones((4, 64), np.float32))
    with pytest.raises(ModelError, match="has a module Dense behind its pooling"):
        quantize_to_gguf(open_checkpoint(folder), tmp_path / "model.gguf", TYPES["F16"])


def test_matrices_that_gguf_has_no_form_for(tmp_path):
    folder = save_model(encoder_of("embedding gemma"), tmp_path / "folder")
    write_modules(folder, "mean", np.ones((8, 64), np.float32), np.ones((8, 8), np.float32))
    (folder / "3_Dense" / "config.json").write_text("{}")  # with a tanh
    with pytest.raises(ModelError, match="has a module Dense behind its pooling"):
        quantize_to_gguf(open_checkpoint(folder), tmp_path / "model.gguf", TYPES["F16"])


def test_embedding_gemma_with_what_its_vectors_go_through(tmp_path):
    rng, folder = np.random.default_rng(), save_model(encoder_of("embedding gemma"), tmp_path / "folder")
    matrices = rng.standard_normal((128, 64), np.float32), rng.standard_normal((40, 128), np.float32)
    write_modules(folder, "mean", *matrices)
    quantize_to_gguf(open_checkpoint(folder), tmp_path / "model.gguf", TYPES["F32"])
    given = [rng.integers(6, 300, n).tolist() for n in (3, 90)]
    settings = {"backend": "cpu", "kv_cache_dtype": "f32"}
    with LLM(folder, **settings) as one, LLM(tmp_path / "model.gguf", **settings) as other:
        assert one.embed(given).shape == (2, 40)
        sizes = {"dense_2_feat_in": 64, "dense_2_feat_out": 128, "dense_3_feat_in": 128, "dense_3_feat_out": 40}
        keys = other.engine.loaded.checkpoint.metadata
        assert {name: keys[f"gemma-embedding.{name}"] for name in sizes} == sizes
        np.testing.assert_allclose(other.embed(given), one.embed(given), atol=1e-5)
