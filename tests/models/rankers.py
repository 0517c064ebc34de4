"""Tiny random models that rank, made and judged by transformers, and their files."""

from __future__ import annotations

import json
from functools import cache
from types import MappingProxyType

import gguf
import numpy as np
import pytest
import tiny_models
import tokenizers
from checkpoints import torch, transformers
from encoder_models import SIZES
from tokenizers import processors

from engine import LLM
from engine.errors import RequestError
from engine.formats import open_checkpoint
from engine.quantize.mix import TYPES
from engine.quantize.to_gguf import quantize_to_gguf

QUERY = "Which engine is small?"
DOCUMENTS = ["A small engine.", "", "numbers like 0 1 2 3 4 5 " * 6, "x", "A small engine."]
MARKS = {"bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2, "pad_token_id": 0}
BIASES = {"norm_bias": True, "classifier_bias": True, "norm_eps": 0.1}
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


def logits_of(name, folder, query, documents, types=True):
    """f64 [documents], by transformers' tokenizer, too."""
    tokenizer, found = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")), []
    for document in documents:
        inputs = tokenizer([query], [document], return_tensors="pt", return_token_type_ids=True)
        if ranker_of(name).config.model_type != "bert" or not types:
            del inputs["token_type_ids"]
        with torch.no_grad():
            found.append(ranker_of(name)(**inputs).logits[0, 0].item())
    return np.array(found)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def write_json(path, value):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def exported(folder):
    path = folder.parent / "model.gguf"
    quantize_to_gguf(open_checkpoint(folder), path, TYPES["F32"])
    return path


def rewritten(source, path, keys=MappingProxyType({}), extra=MappingProxyType({}), without=()):
    """A GGUF file with more, or fewer, keys and tensors of f32."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name in (*keys, *without, "general.architecture"):
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


def assert_unranked(path, message):
    """It can be loaded, and embeds."""
    with LLM(path, backend="cpu") as llm:
        assert llm.embed([[5, 6]]).shape == (1, 64)
        with pytest.raises(RequestError, match=message):
            llm.score(QUERY, DOCUMENTS)
