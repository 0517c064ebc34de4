"""Cross-encoders against transformers: the score of a query and a document, read together."""

from __future__ import annotations

import json
from functools import cache
from types import MappingProxyType

import gguf
import numpy as np
import pytest
import tiny_models
import tokenizers
from checkpoints import save_model, torch, transformers
from encoder_models import SIZES
from safetensors.numpy import load_file, save_file
from tokenizers import processors
from wordpiece import write_wordpiece

from engine import LLM, SamplingParams
from engine.errors import AdmissionError, EngineError, ModelError, RequestError
from engine.formats import open_checkpoint
from engine.quantize.mix import TYPES
from engine.quantize.to_gguf import quantize_to_gguf

QUERY = "Which engine is small?"
DOCUMENTS = ["A small engine.", "", "numbers like 0 1 2 3 4 5 " * 6, "x", "A small engine."]
MARKS = {"bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2, "pad_token_id": 0}
BIASES = {"norm_bias": True, "classifier_bias": True}
DECODER = {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}

# name -> (transformers' class, what differs from SIZES, how the tokenizer puts two texts together)
RANKERS = {
    "bert": ("Bert", {}, "bert"),
    "bert of one type": ("Bert", {"type_vocab_size": 1}, "plain"),
    "roberta": ("Roberta", {"type_vocab_size": 1}, "roberta"),
    "xlm-roberta": ("XLMRoberta", {"pad_token_id": 5, "type_vocab_size": 1}, "roberta"),
    "camembert": ("Camembert", {"pad_token_id": 0, "type_vocab_size": 1}, "roberta"),
    "distilbert": ("DistilBert", {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96}, "plain"),
    "modernbert": ("ModernBert", MARKS | {"local_attention": 22}, "plain"),
    "modernbert of means": ("ModernBert", MARKS | {"classifier_pooling": "mean"} | BIASES, "plain"),
    "qwen3": ("Qwen3", DECODER | {"tie_word_embeddings": False}, "joined"),
    "llama": ("Llama", DECODER | {"tie_word_embeddings": True}, "joined"),
    "llama turned": ("Llama", DECODER | {"is_causal": False}, "joined"),
}  # fmt: skip
PAIRS = {
    "bert": processors.TemplateProcessing(
        "<s> $A </s>", "<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    ),
    "plain": processors.TemplateProcessing(
        "<s> $A </s>", "<s> $A </s> $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    ),
    "roberta": processors.RobertaProcessing(("</s>", 2), ("<s>", 1), trim_offsets=False),
    "side by side": processors.TemplateProcessing("<s> $A", "<s> $A $B:1", special_tokens=[("<s>", 1)]),
    "joined": processors.TemplateProcessing("<s> $A", "<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]),
}


@cache
def ranker_of(name, labels=1):
    """transformers' model in f32 with every parameter random."""
    kind, changes, _ = RANKERS[name]
    torch.manual_seed(sum(name.encode()))
    config = getattr(transformers, f"{kind}Config")(
        **(SIZES | changes | {"num_labels": labels}), attn_implementation="eager"
    )
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval().float()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            scale = 0.3 if "norm" in parameter_name.lower() else 0.5 if parameter_name.endswith("bias") else None
            noise = torch.randn_like(parameter)
            parameter.copy_(parameter + scale * noise if scale else 1.5 * noise / parameter.shape[-1] ** 0.5)
    return model


def save_ranker(name, folder, labels=1, between=True):
    ranker_of(name, labels).save_pretrained(folder)
    tiny_models.write_tokenizer(folder)
    pipeline = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    pipeline.post_processor = PAIRS[RANKERS[name][2] if between else "side by side"]
    pipeline.save(str(folder / "tokenizer.json"))
    return folder


def logits_of(name, folder, query, documents):
    """f64 [documents], by transformers' tokenizer, too."""
    tokenizer, found = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")), []
    for document in documents:
        inputs = tokenizer([query], [document], return_tensors="pt", return_token_type_ids=True)
        if ranker_of(name).config.model_type != "bert":
            del inputs["token_type_ids"]
        with torch.no_grad():
            found.append(ranker_of(name)(**inputs).logits[0, 0].item())
    return np.array(found)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


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


def exported(folder):
    path = folder.parent / "model.gguf"
    quantize_to_gguf(open_checkpoint(folder), path, TYPES["F32"])
    return path


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


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", GGUFS)
def test_gguf_files_score_as_their_folders(tmp_path, name, plain):
    """Of decoders' tokenizers GGUF files say nothing that would stand between two texts."""
    folder = save_ranker(name, tmp_path / "folder", between=not name.startswith(("qwen3", "llama")))
    if plain:
        change_config(folder, sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"})
    path = exported(folder)
    with LLM(folder, backend="cpu", kv_cache_dtype="f32") as llm:
        want = llm.score(QUERY, DOCUMENTS)
    with LLM(path, backend="cpu", kv_cache_dtype="f32") as llm:
        np.testing.assert_allclose(llm.score(QUERY, DOCUMENTS), want, atol=1e-5)
    assert np.ptp(want) > 0.004 and ((want < 0) | (want > 1)).any() <= plain


def rewritten(source, path, keys=MappingProxyType({}), extra=MappingProxyType({}), without=()):
    """A GGUF file with more, or fewer, keys and tensors of f32."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name in keys or name == "general.architecture":
            continue
        if entry.types[0] is gguf.GGUFValueType.ARRAY:
            writer.add_array(name, entry.contents())
        else:
            writer.add_key_value(name, entry.contents(), entry.types[0])
    for name, value in keys.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    for tensor in reader.tensors:
        if tensor.name not in without:
            writer.add_tensor(tensor.name, tensor.data)
    for name, array in extra.items():
        writer.add_tensor(name, array)
    tiny_models.finish(writer)
    return path


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


def assert_unranked(path, message):
    """It can be loaded, and embeds."""
    with LLM(path, backend="cpu") as llm:
        assert llm.embed([[5, 6]]).shape == (1, 64)
        with pytest.raises(RequestError, match=message):
            llm.score(QUERY, DOCUMENTS)


def test_heads_of_other_kinds_are_refused(tmp_path):
    folder = save_ranker("bert", tmp_path / "three", labels=3)
    assert_unranked(folder, "a layer of 3 scores")
    folder = save_ranker("bert", tmp_path / "bert")
    without = rewritten(exported(folder), tmp_path / "without.gguf", without=["cls.weight", "cls.bias"])
    assert_unranked(without, r"lacks the tensor cls\.weight, which its scores are made by")
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
        ("classifier.bias", np.ones(2, np.float32)),
        ("bert.pooler.dense.weight", np.ones((64, 32), np.float32)),
        ("bert.pooler.dense.bias", np.ones(0, np.float32)),
    ):
        folder = save_ranker("bert", tmp_path / "folder")
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {name: array}, folder / "model.safetensors")
        assert_unranked(folder, "finite numbers|layer behind its pooling|first layer behind the pooling")
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


# -- models that rank by their usual head's logits -----------------------------------------------------------------------

MESSAGES = """{%- set task = messages | selectattr("role", "eq", "system") | map(attribute="content") | first -%}
<s>Judge. {{ task or "Any." }}
{% for role in ("query", "document") -%}
{{ role }}: {{ messages | selectattr("role", "eq", role) | map(attribute="content") | first }}
{% endfor -%}
{%- if add_generation_prompt %}Answer: {% endif %}"""


@cache
def talker_of(tied):
    torch.manual_seed(8)
    config = transformers.Qwen3Config(**(SIZES | DECODER | {"tie_word_embeddings": tied}), attn_implementation="eager")
    model = transformers.Qwen3ForCausalLM(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(1.5 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return model


def write_json(path, value):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def save_talker(folder, tied=True, answers=(7, 9), prompt=None, act=None, generation=None, template=MESSAGES):
    """As sentence-transformers writes such models."""
    talker_of(tied).save_pretrained(folder)
    tiny_models.write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(template)
    kinds = {"": "base.modules.transformer.Transformer", "1_LogitScore": "cross_encoder.modules.logit_score.LogitScore"}
    write_json(
        folder / "modules.json",
        [{"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in kinds.items()],
    )
    write_json(
        folder / "1_LogitScore" / "config.json", dict(zip(("true_token_id", "false_token_id"), answers, strict=True))
    )
    settings = {"model_type": "CrossEncoder", "prompts": {"web": prompt}, "default_prompt_name": prompt and "web"}
    write_json(folder / "config_sentence_transformers.json", settings | ({"activation_fn": act} if act else {}))
    variables = {"chat_template": {"add_generation_prompt": generation, "max_length": 5}}
    modalities = {"text": {}, "message": {"format": "flat"}}
    write_json(
        folder / "sentence_bert_config.json",
        {"modality_config": modalities} | ({"processing_kwargs": variables} if generation is not None else {}),
    )
    return folder


def logits_of_answers(folder, tied, answers, task, generation):
    found = []
    for document in DOCUMENTS:
        text = f"<s>Judge. {task}\nquery: {QUERY}\ndocument: {document}\n" + "Answer: " * generation
        ids = [
            1,
            *transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))(text[3:]).input_ids[
                1:
            ],
        ]
        with torch.no_grad():
            logits = talker_of(tied)(torch.tensor([ids])).logits[0, -1].numpy().astype(np.float64)
        found.append(logits[answers[0]] - (0 if answers[1] is None else logits[answers[1]]))
    return np.array(found)


IDENTITY = "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("tied", "answers", "prompt", "act", "generation"),
    [
        (True, (7, 9), None, None, None),
        (False, (7, 9), "Find it.", None, True),
        (True, (12, None), "Find it.", IDENTITY, False),
        (False, (12, None), None, None, True),
        (False, (7, 9), None, IDENTITY, None),
    ],
)
def test_the_logits_of_answers(tmp_path, tied, answers, prompt, act, generation):
    """As sentence-transformers' module LogitScore has them, and GGUF files made of such folders."""
    folder = save_talker(tmp_path / "folder", tied, answers, prompt, act, generation)
    want = logits_of_answers(folder, tied, answers, prompt or "Any.", bool(generation))
    assert np.ptp(want) > 0.02
    want = want if act else sigmoid(want)
    with LLM(folder, backend="cpu", kv_cache_dtype="f32") as llm:
        np.testing.assert_allclose(llm.score(QUERY, DOCUMENTS), want, atol=5e-4)
        assert len(llm.generate([[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2
        assert (llm.embed([[5, 6]]) == llm.embed([[5, 6]], "last", True)).all()
    path = exported(folder)
    keys, rows = open_checkpoint(path).metadata, open_checkpoint(path).tensors["cls.output.weight"].shape[0]
    assert (keys.get("qwen3.classifier.output_labels"), rows) == (
        (["yes", "no"], 2) if answers[1] and not act else (None, 1)
    )
    with LLM(path, backend="cpu", kv_cache_dtype="f32") as llm:
        np.testing.assert_allclose(llm.score(QUERY, DOCUMENTS), want, atol=5e-4)


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ("1_LogitScore/config.json", {"true_token_id": "7"}, "must name a token in true_token_id"),
        ("1_LogitScore/config.json", {"false_token_id": -1}, "must name a token in true_token_id"),
        ("1_LogitScore/config.json", {"true_token_id": 10**6}, "needs 1000001 rows"),
        ("1_LogitScore/config.json", {"true_token_id": True}, "must name a token in true_token_id"),
        (
            "config_sentence_transformers.json",
            {"prompts": {"web": 3}, "default_prompt_name": "web"},
            "which is no text",
        ),
        (
            "config_sentence_transformers.json",
            {"activation_fn": "torch.nn.Tanh"},
            "Identity and Sigmoid of torch are known",
        ),
    ],
)
def test_damaged_settings_of_answers(tmp_path, path, change, message):
    folder = save_talker(tmp_path)
    write_json(folder / path, json.loads((folder / path).read_text()) | change)
    with LLM(folder, backend="cpu") as llm, pytest.raises(RequestError, match=message):
        llm.score(QUERY, DOCUMENTS)


def test_templates_that_have_no_place_for_a_pair(tmp_path):
    for n, (template, message) in enumerate(
        (("{{ messages[0].content }}", "no place for a document"), ("{{ 1 / 0 }}", "refuses"))
    ):
        with (
            LLM(save_talker(tmp_path / str(n), template=template), backend="cpu") as llm,
            pytest.raises(RequestError, match=message),
        ):
            llm.score(QUERY, DOCUMENTS)
    folder = save_talker(tmp_path / "none")
    (folder / "chat_template.jinja").unlink()
    with LLM(folder, backend="cpu") as llm, pytest.raises(RequestError, match="its files have none"):
        llm.score(QUERY, DOCUMENTS)
    write_json(folder / "modules.json", [{"path": "../x", "type": "a.LogitScore"}])
    with LLM(folder, backend="cpu") as llm, pytest.raises(RequestError, match="no plain name of a folder"):
        llm.score(QUERY, DOCUMENTS)


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
