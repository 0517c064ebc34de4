"""BERT (arXiv 1810.04805), RoBERTa and XLM-RoBERTa: encoders, whose layer norms follow each residual sum. Positions are learned,
and RoBERTa's kind counts them from behind the id of its padding token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..backend.v1 import Array, Value, WeightRef
from ..errors import ModelError
from ..formats import Checkpoint
from ..program.build import Builder, Program
from ..program.weights import ConstantWeight
from .decoder import DecoderConfig, attention_block, norm, plain_mlp_block
from .fields import flag, integer, text
from .ranking import ranks
from .weights import Weights, needs_rows

HF_KEYS = {"rms_norm_eps": "layer_norm_eps"}
_SIZES = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
}
HF_DEFAULTS = {
    "bert": _SIZES | {"vocab_size": 30522},
    "roberta": _SIZES | {"vocab_size": 50265, "pad_token_id": 1},
    "xlm-roberta": _SIZES | {"vocab_size": 30522, "pad_token_id": 1},
    "camembert": _SIZES | {"vocab_size": 30522, "pad_token_id": 1},
}
HF_PREFIX = "bert."


def _named(own: str) -> tuple[str, ...]:
    return f"bert.{own}", f"roberta.{own}"


def _norms(name: str, own: str) -> dict[str, tuple[str, ...]]:
    """The first files call the two gamma and beta."""
    kinds = {"weight": "gamma", "bias": "beta"}
    return {f"{name}.{kind}": _named(f"{own}.{kind}") + _named(f"{own}.{old}") for kind, old in kinds.items()}


_TYPES = _named("embeddings.token_type_embeddings.weight")
HF_NAMES = {
    "token_embd.weight": _named("embeddings.word_embeddings.weight"),
    "position_embd.weight": _named("embeddings.position_embeddings.weight"),
    "token_types.weight": _TYPES,
    **_norms("token_embd_norm", "embeddings.LayerNorm"),
    **_norms("blk.{i}.attn_output_norm", "encoder.layer.{i}.attention.output.LayerNorm"),
    **_norms("blk.{i}.layer_output_norm", "encoder.layer.{i}.output.LayerNorm"),
    **{
        f"blk.{{i}}.{name}.{kind}": _named(f"encoder.layer.{{i}}.{own}.{kind}")
        for name, own in (
            ("attn_q", "attention.self.query"),
            ("attn_k", "attention.self.key"),
            ("attn_v", "attention.self.value"),
            ("attn_output", "attention.output.dense"),
            ("ffn_up", "intermediate.dense"),
            ("ffn_down", "output.dense"),
        )
        for kind in ("weight", "bias")
    },
}


def needless(c: DecoderConfig, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Heads that guess at masked tokens and at sentences, and what they read of the first token."""
    return "pooler.", "bert.pooler.", "roberta.pooler.", "cls.predictions.", "cls.seq_relationship.", "lm_head."


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    data = checkpoint.metadata
    if flag(data, "is_decoder", False):
        raise ModelError("The configuration's is_decoder is true; this architecture is known as an encoder alone.")
    kind = text(data, "position_embedding_type", "absolute")
    if kind != "absolute":
        raise ModelError(f"The configuration's position_embedding_type is {kind!r}; absolute is what is known.")
    reach = c.max_context - first_position(checkpoint)
    if reach < 1:
        raise ModelError(f"A table of {c.max_context} positions has none for a text's tokens.")
    return two_texts(replace(c, causal=False, max_context=reach), checkpoint)


def two_texts(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    """Of a model that ranks, where a second text's tokens are of a type of their own: these are further tokens of a vocabulary
    of twice the size. FormatError for damaged files."""
    name = next((n for n in ("token_types.weight", *_TYPES) if n in checkpoint.tensors), None)
    several = name is not None and ranks(checkpoint) and checkpoint.tensors[name].shape[:1] > (1,)
    return replace(c, vocab=2 * c.vocab, second_text=c.vocab) if several and checkpoint.ranking().types else c


def first_position(checkpoint: Checkpoint) -> int:
    """The row of the position table for the first token; GGUF files begin with it."""
    if checkpoint.kind == "gguf" or checkpoint.architecture in ("bert", "distilbert"):
        return 0
    return integer(checkpoint.metadata, "pad_token_id", low=0) + 1


def build(b: Builder, c: DecoderConfig, w: Weights) -> Program:
    first, table = first_position(w.checkpoint), w("position_embd.weight")
    needs_rows(table, first + c.max_context)
    _needs_columns(table, c.hidden)
    return post_norm_layers(b, c, w, attention_block, plain_mlp_block, table.dense()[first:])


def _needs_columns(table: WeightRef, needed: int) -> None:
    """ModelError where the rows of a table are not as wide."""
    if len(table.shape) != 2 or table.shape[1] != needed:
        raise ModelError(
            f"{table.name} has the shape {list(table.shape)}, but this model needs rows of {needed}; the checkpoint is"
            " inconsistent."
        )


def post_norm_layers(
    b: Builder,
    c: DecoderConfig,
    w: Weights,
    attention: Callable[[Builder, DecoderConfig, Weights, int, Value], Value],
    feed_forward: Callable[[Builder, DecoderConfig, Weights, int, Value], Value],
    positions: Array | None = None,
) -> Program:
    """The encoder whose layers norm the sum with ``attention``, and then with ``feed_forward``. Each token is of the first
    type, whose row is added to those of ``positions`` [context, hidden], if there are any; but a second text's is of the second
    (``DecoderConfig.second_text``)."""
    table: WeightRef = w("token_embd.weight")
    types = w.maybe("token_types.weight")
    if types is not None:
        _needs_columns(types, c.hidden)
        positions = types.dense()[0] + (np.zeros((c.max_context, 1), np.float32) if positions is None else positions)
    if types is not None and c.second_text:
        table = _of_two_texts(c, table, types)
    x = b.embed(table)
    if positions is not None:
        x = b.add(x, b.embed_positions(ConstantWeight("position_embd.weight", positions)))
    x = norm(b, c, w, "token_embd_norm", x)
    for i in b.layers(c.layers):
        x = norm(b, c, w, f"blk.{i}.attn_output_norm", b.add(x, attention(b, c, w, i, x)))
        x = norm(b, c, w, f"blk.{i}.layer_output_norm", b.add(x, feed_forward(b, c, w, i, x)))
    return b.finish(x, table)


def _of_two_texts(c: DecoderConfig, table: WeightRef, types: WeightRef) -> WeightRef:
    """[2 * vocab, hidden]: the rows of the tokens, and again with what tells the second type from the first."""
    needs_rows(table, c.second_text)
    first, second = types.dense()[:2]
    rows = table.dense()[: c.second_text]
    return ConstantWeight(table.name, np.concatenate([rows, rows + (second - first)]))
