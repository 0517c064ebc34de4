"""Cross-encoders against transformers: the score of a query and a document, read together."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny_models
import tokenizers
from checkpoints import save_model, torch
from rankers import (
    DOCUMENTS,
    PAIRS,
    QUERY,
    RANKERS,
    assert_unranked,
    change_config,
    exported,
    logits_of,
    ranker_of,
    rewritten,
    save_ranker,
    sigmoid,
    write_json,
)
from safetensors.numpy import load_file, save_file
from tokenizers import processors
from wordpiece import write_wordpiece

from engine import LLM, SamplingParams
from engine.errors import AdmissionError, EngineError, ModelError, RequestError
from engine.formats import open_checkpoint


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", RANKERS)
def test_scores_are_transformers(tmp_path, name, backend):
    folder = save_ranker(name, tmp_path)
    want = logits_of(name, folder, QUERY, DOCUMENTS)
    assert np.ptp(want) > 0.02
    with LLM(folder, backend=backend, kv_cache_dtype="f32") as llm:
        np.testing.assert_allclose(llm.score(QUERY, DOCUMENTS), sigmoid(want), atol=2e-4)
        with pytest.raises(RequestError, match=r"has no head|is an encoder"):
            llm.generate([[5, 6]], SamplingParams(max_tokens=1))
    change_config(folder, sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"})
    with LLM(folder, backend=backend, kv_cache_dtype="f32") as llm:
        got = llm.score(QUERY, DOCUMENTS)
        np.testing.assert_allclose(got, want, atol=5e-4)
        assert got[0] == got[4] == llm.score(QUERY, DOCUMENTS[0])[0]  # in any company


GGUFS = ["bert", "bert of one type", "roberta", "xlm-roberta", "camembert", "modernbert", "qwen3", "llama"]


def test_pairs_of_wordpiece(tmp_path):
    folder = save_ranker("bert", tmp_path / "folder")
    for file in folder.glob("*token*"):
        file.unlink()
    write_wordpiece(folder, True)
    with LLM(folder, backend="cpu", kv_cache_dtype="f32") as llm:
        want, logits = llm.score(QUERY, DOCUMENTS), logits_of("bert", folder, QUERY, DOCUMENTS)
    np.testing.assert_allclose(want, sigmoid(logits), atol=2e-4)
    with LLM(exported(folder), backend="cpu", kv_cache_dtype="f32") as llm:
        np.testing.assert_allclose(llm.score(QUERY, DOCUMENTS), want, atol=1e-5)


def test_a_tokenizer_that_gives_no_types(tmp_path):
    folder = save_ranker("bert", tmp_path / "folder")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", settings | {"model_input_names": ["input_ids", "attention_mask"]})
    want = sigmoid(logits_of("bert", folder, QUERY, DOCUMENTS, types=False))
    assert np.abs(want - sigmoid(logits_of("bert", folder, QUERY, DOCUMENTS))).max() > 0.01
    for path in (folder, exported(folder)):
        with LLM(path, backend="cpu", kv_cache_dtype="f32") as llm:
            np.testing.assert_allclose(llm.score(QUERY, DOCUMENTS), want, atol=2e-4)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", GGUFS)
def test_gguf_files_score_as_their_folders(tmp_path, name, plain):
    """Of decoders' tokenizers GGUF files say nothing that would stand between two texts."""
    folder = save_ranker(name, tmp_path / "folder", between=not name.startswith(("qwen3", "llama")))
    if plain:
        change_config(folder, sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"})
    path = exported(folder)
    keys = open_checkpoint(path)
    sizes = len(keys.metadata["tokenizer.ggml.tokens"]), keys.metadata[f"{keys.architecture}.vocab_size"]
    assert sizes == (tiny_models.VOCAB, tiny_models.VOCAB)
    with LLM(folder, backend="cpu", kv_cache_dtype="f32") as llm:
        want = llm.score(QUERY, DOCUMENTS)
    with LLM(path, backend="cpu", kv_cache_dtype="f32") as llm:
        np.testing.assert_allclose(llm.score(QUERY, DOCUMENTS), want, atol=1e-5)
    assert np.ptp(want) > 0.004 and ((want < 0) | (want > 1)).any() <= plain


TEMPLATE = "<s>Judge. {query} {document}: {document}</s>"


def test_two_answers_by_a_template(tmp_path):
    """As llama.cpp writes Qwen3's rerankers: the rows of its head for yes and no. What stands in the texts for a text is text."""
    rng, folder = np.random.default_rng(), save_ranker("qwen3", tmp_path / "folder", between=False)
    rows = rng.standard_normal((2, 64), np.float32)
    keys = {"tokenizer.chat_template.rerank": TEMPLATE, "qwen3.classifier.output_labels": ["yes", "no"]}
    path = rewritten(exported(folder), tmp_path / "two.gguf", keys, {"cls.output.weight": rows}, ["cls.output.weight"])
    query, documents = "Is {document} it?", ["A small engine.", "x {query}"]
    with LLM(path, backend="cpu", kv_cache_dtype="f32") as llm:
        got = llm.score(query, documents)
        for score, document in zip(got, documents, strict=True):
            whole = f"<s>Judge. {query} {document}: {document}</s>"
            ids = llm.engine.tokenizer.encode(whole, parse_special=True)
            assert ids[0] == 1 and ids[-1] == 2
            with torch.no_grad():
                state = ranker_of("qwen3").model(torch.tensor([ids])).last_hidden_state[0, -1].numpy()
            yes, no = np.exp(rows.astype(np.float64) @ state)
            np.testing.assert_allclose(score, yes / (yes + no), atol=1e-4)
    unlabelled = rewritten(path, tmp_path / "unlabelled.gguf", {"qwen3.classifier.output_labels": ["no", "yes"]})
    assert_unranked(unlabelled, "a layer of 2 scores; a ranking takes one, or two that are labelled yes and no")


def test_heads_of_other_kinds_are_refused(tmp_path):
    folder = save_ranker("bert", tmp_path / "three", labels=3)
    assert_unranked(folder, "a layer of 3 scores")
    folder = save_ranker("bert", tmp_path / "bert")
    without = rewritten(exported(folder), tmp_path / "without.gguf", without=["cls.weight", "cls.bias"])
    assert_unranked(without, r"lacks the tensor cls\.weight, which its scores are made by")
    labels = {"bert.classifier.output_labels": [1, 2]}
    two = {"cls.output.weight": np.ones((2, 64), np.float32)}
    assert_unranked(
        rewritten(tmp_path / "model.gguf", tmp_path / "labels.gguf", labels, two, [*two]), "a layer of 2 scores"
    )
    several = {"bert.classifier.pooling_type": [1, 2]}
    assert_unranked(
        rewritten(tmp_path / "model.gguf", tmp_path / "several.gguf", several), "before its layer of scores"
    )
    for value in ("torch.nn.modules.activation.ReLU", ["x"], 3):
        change_config(folder, sentence_transformers={"activation_fn": value})
        assert_unranked(folder, "Identity and Sigmoid of torch are known")
    folder = save_ranker("modernbert", tmp_path / "modern")
    for key, value in (("classifier_pooling", "late"), ("classifier_activation", "relu")):
        change_config(folder, **{"classifier_pooling": "cls", key: value})
        assert_unranked(folder, value)
    assert_unranked(
        save_model(ranker_of("bert").bert, tmp_path / "no head"), "no layer that scores a query and a document"
    )


def test_damaged_heads_are_refused(tmp_path):
    for name, array in (
        ("classifier.weight", np.full((1, 64), np.nan, np.float32)),
        ("classifier.weight", np.ones((1, 60), np.float32)),
        ("classifier.weight", np.ones((1, 2, 32), np.float32)),
        ("classifier.weight", np.array(1, np.float32)),
        ("classifier.bias", np.ones(2, np.float32)),
        ("bert.pooler.dense.weight", np.ones((64, 32), np.float32)),
        ("bert.pooler.dense.bias", np.ones(0, np.float32)),
    ):
        folder = save_ranker("bert", tmp_path / "folder")
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {name: array}, folder / "model.safetensors")
        assert_unranked(folder, "finite numbers|layer behind its pooling|first layer behind the pooling")
    save_file(
        tensors | {"bert.embeddings.token_type_embeddings.weight": np.array(1, np.float32)},
        folder / "model.safetensors",
    )
    with pytest.raises(ModelError, match="needs rows of 64"):
        LLM(folder, backend="cpu")
    wide = {"bert.embeddings.word_embeddings.weight": np.ones((tiny_models.VOCAB + 1, 64), np.float32)}
    good = load_file(save_ranker("bert", tmp_path / "folder") / "model.safetensors")
    save_file(good | wide, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"this model needs {tiny_models.VOCAB} rows"):
        LLM(folder, backend="cpu")
    modern = save_ranker("modernbert", tmp_path / "modern")
    narrow = load_file(modern / "model.safetensors") | {"head.norm.weight": np.ones(60, np.float32)}
    save_file(narrow, modern / "model.safetensors")
    assert_unranked(modern, "layer behind its pooling")
    tensors.pop("bert.pooler.dense.weight")
    save_file(tensors, folder / "model.safetensors")
    assert_unranked(folder, r"lacks the tensor bert\.pooler\.dense\.weight")


def test_what_gguf_has_no_form_for_is_refused(tmp_path):
    for name in ("distilbert", "modernbert of means"):
        with pytest.raises(ModelError, match="which GGUF files have no form for"):
            exported(save_ranker(name, tmp_path / name))
    folder = save_ranker("bert", tmp_path / "folder")
    pipeline = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    pipeline.post_processor = PAIRS["joined"]
    pipeline.save(str(folder / "tokenizer.json"))
    with pytest.raises(EngineError, match="cuts text in a way that no tokenizer of GGUF files does"):
        exported(folder)


def test_tokens_of_a_second_text_are_nobody_s_to_give(tmp_path):
    """They are further ids, which only the second text of a pair has."""
    with LLM(save_ranker("bert", tmp_path), backend="cpu") as llm:
        with pytest.raises(RequestError, match=f"The token id {tiny_models.VOCAB} does not exist"):
            llm.embed([[5, tiny_models.VOCAB]])
        assert llm.engine.tokenizer.encode_pair("</s>x", "<s>")[0].count(2) == 1  # a text's own is plain text
        alone = llm.score("", "x")
        assert alone.shape == (1,) and alone != llm.score("x", "")
        for wrong in ([b"x"], [3], [None]):
            with pytest.raises(RequestError, match="A query and a document are texts"):
                llm.score("x", wrong)


def test_two_texts_that_are_too_long_together(tmp_path):
    with LLM(save_ranker("bert", tmp_path), backend="cpu") as llm:
        with pytest.raises(AdmissionError, match=r"Prompt 2 of 2: The input has \d+ tokens, and the context holds 256"):
            llm.score("5" * 130, ["x", "7" * 130])
        assert llm.score("5" * 130, ["7" * 120]).shape == (1,)


def test_a_tokenizer_that_changes_pairs(tmp_path):
    folder = save_ranker("bert", tmp_path)
    pipeline = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    pipeline.post_processor = processors.TemplateProcessing(
        "<s> $A", "$B $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    pipeline.save(str(folder / "tokenizer.json"))
    with LLM(folder, backend="cpu") as llm:
        assert llm.engine.encode("x")[0] == 1
        with pytest.raises(EngineError, match="changes the tokens of two texts"):
            llm.score("x", "y")


def test_two_ranks(tmp_path):
    folder = save_ranker("bert", tmp_path)
    with LLM(folder, backend="cpu", kv_cache_dtype="f32", tensor_parallel_size=2) as llm:
        np.testing.assert_allclose(
            llm.score(QUERY, DOCUMENTS), sigmoid(logits_of("bert", folder, QUERY, DOCUMENTS)), atol=2e-4
        )


def test_a_prompt_before_the_query(tmp_path):
    """Of a model that has no template it is the query's beginning."""
    folder = save_ranker("roberta", tmp_path / "folder")
    with LLM(folder, backend="cpu") as llm:
        want = llm.score("Find: " + QUERY, DOCUMENTS)
    write_json(folder / "modules.json", [{"path": "", "type": "sentence_transformers.base.models.Transformer"}])
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"a": "Find: "}, "default_prompt_name": "a"})
    with LLM(folder, backend="cpu") as llm:
        assert (llm.score(QUERY, DOCUMENTS) == want).all() and (want != llm.score("", DOCUMENTS)).any()
    with pytest.raises(ModelError, match="a prompt for queries, which GGUF files have no form for"):
        exported(folder)


def test_what_a_gguf_of_modernbert_leaves_unsaid(tmp_path):
    """As llama.cpp has it, its scores are of the mean of all states; its converter leaves out an axis of one."""
    folder = save_ranker("modernbert", tmp_path / "folder")
    key = "modern-bert.classifier.pooling_type"
    flat = {"cls.output.weight": open_checkpoint(exported(folder)).tensors["cls.output.weight"].dense()[0]}
    unsaid = rewritten(tmp_path / "model.gguf", tmp_path / "unsaid.gguf", {}, flat, [key, *flat])
    change_config(folder, classifier_pooling="mean")
    with (
        LLM(folder, backend="cpu", kv_cache_dtype="f32") as one,
        LLM(unsaid, backend="cpu", kv_cache_dtype="f32") as other,
    ):
        np.testing.assert_allclose(other.score(QUERY, DOCUMENTS), one.score(QUERY, DOCUMENTS), atol=1e-5)
