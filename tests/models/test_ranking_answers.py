"""Models that rank by their usual head's logits of answers, as sentence-transformers' module LogitScore has them."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
import tiny_models
from checkpoints import torch, transformers
from encoder_models import SIZES
from rankers import (
    DECODER,
    DOCUMENTS,
    QUERY,
    change_config,
    exported,
    sigmoid,
    write_json,
)

from engine import LLM, SamplingParams
from engine.errors import RequestError
from engine.formats import open_checkpoint

MESSAGES = """{%- set task = messages | selectattr("role", "eq", "system") | map(attribute="content") | first -%}
<s>Judge. {{ task or "Any." }}
{% for role in ("query", "document") -%}
{{ role }}: {{ messages | selectattr("role", "eq", role) | map(attribute="content") | first }}
{% endfor -%}
{%- if add_generation_prompt %}Answer: {% endif %}"""


@cache
def talker_of(tied, kind="Qwen3"):
    torch.manual_seed(8)
    changes = {"tie_word_embeddings": tied} | ({"logits_scaling": 0.25} if kind == "Granite" else {})
    config = getattr(transformers, f"{kind}Config")(**(SIZES | DECODER | changes), attn_implementation="eager")
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(1.5 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return model


def save_talker(
    folder, tied=True, answers=(7, 9), prompt=None, act=None, generation=None, template=MESSAGES, kind="Qwen3"
):
    """As sentence-transformers writes such models."""
    talker_of(tied, kind).save_pretrained(folder)
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


def logits_of_answers(folder, tied, answers, task, generation, kind="Qwen3"):
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
            logits = talker_of(tied, kind)(torch.tensor([ids])).logits[0, -1].numpy().astype(np.float64)
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
        (
            ("{{ messages[0].content }}", "no place for a document"),
            ("{{ messages[1].content }}", "no place for a query"),
            ("{{ 1 / 0 }}", "refuses"),
        )
    ):
        with (
            LLM(save_talker(tmp_path / str(n), template=template), backend="cpu") as llm,
            pytest.raises(RequestError, match=message),
        ):
            llm.score(QUERY, DOCUMENTS)
    quoting = save_talker(tmp_path / "quoting", template="{{ messages | tojson }}")
    write_json(quoting / "config_sentence_transformers.json", {"prompts": {"web": "x"}, "default_prompt_name": ["web"]})
    with LLM(quoting, backend="cpu") as llm:
        assert llm.score('"', "\n").shape == (1,)  # which are there, in another way
    folder = save_talker(tmp_path / "none")
    (folder / "chat_template.jinja").unlink()
    with LLM(folder, backend="cpu") as llm, pytest.raises(RequestError, match="its files have none"):
        llm.score(QUERY, DOCUMENTS)
    write_json(folder / "modules.json", [{"path": "../x", "type": "a.LogitScore"}])
    with LLM(folder, backend="cpu") as llm, pytest.raises(RequestError, match="no plain name of a folder"):
        llm.score(QUERY, DOCUMENTS)


def test_logits_that_are_scaled_and_logits_that_are_capped(tmp_path):
    folder = save_talker(tmp_path / "scaled", kind="Granite")
    want = sigmoid(logits_of_answers(folder, True, (7, 9), "Any.", False, "Granite"))
    assert np.ptp(want) > 0.02
    for path in (folder, exported(folder)):
        with LLM(path, backend="cpu", kv_cache_dtype="f32") as llm:
            np.testing.assert_allclose(llm.score(QUERY, DOCUMENTS), want, atol=5e-4)
    with (
        LLM(save_talker(tmp_path / "capped", kind="Gemma2"), backend="cpu") as llm,
        pytest.raises(RequestError, match="with a cap"),
    ):
        llm.score(QUERY, DOCUMENTS)


def test_which_file_names_the_function_and_what_is_not_said(tmp_path):
    """That beside the modules goes before config.json; a folder that says nothing of messages ranks answers by its template."""
    folder = save_talker(tmp_path, act=IDENTITY)
    change_config(folder, sentence_transformers={"activation_fn": "torch.nn.modules.activation.Sigmoid"})
    want = logits_of_answers(folder, True, (7, 9), "Any.", False)
    (folder / "sentence_bert_config.json").write_text("{}")
    with LLM(folder, backend="cpu", kv_cache_dtype="f32") as llm:
        np.testing.assert_allclose(llm.score(QUERY, DOCUMENTS), want, atol=5e-4)
