"""From a checkpoint to its family: which file builds it, with which names and which configuration.

A family's file has ``HF_NAMES`` (canonical tensor name -> Hugging Face's) and ``build``. Where it needs them it has
``HF_KEYS`` (common key -> its own in config.json), ``HF_DEFAULTS`` (what holds where config.json leaves it out, as in
transformers; by architecture where there are several), ``configure`` (completes the configuration), ``HF_PREFIX`` (which files
of a model without its head leave out of all names; "model." where it is not given), ``HF_TRANSPOSED`` (ends of canonical names
of matrices that lie transposed), ``flattened`` (the metadata of a file that has one thing a layer where others have one), and
beginnings of the names of tensors that are not run: ``unused`` of a part of the model, ``needless`` of what no part reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np

from ..backend.v1 import Array, WeightRef
from ..errors import ModelError
from ..formats import Checkpoint
from ..formats.pooling import Embedding
from ..kv import RECURRENT_WINDOW, CacheGroup
from ..program.build import Builder, Program
from ..program.weights import select
from .config import config_from_gguf, config_from_hf
from .decoder import DecoderConfig
from .family import Family
from .fields import integer
from .ranking import answers_head, head_tensors, ranking_head, ranks
from .weights import Weights

FAMILIES: Sequence[Family] = (
    Family("llama", ("llama",), ("llama", "internlm3", "iquestcoder"), interleaved=True),
    Family("mixtral", (), ("mixtral",), interleaved=True, windowed=True, eps=1e-5),
    Family(
        "qwen2",
        ("qwen2", "qwen2vl"),
        ("qwen2", "qwen2_vl_text", "qwen2_5_vl_text"),
        windowed=True,
        full_first=True,
    ),
    Family("qwen3", ("qwen3", "qwen3vl"), ("qwen3", "qwen3_vl_text"), windowed=True, full_first=True),
    Family("mistral", (), ("mistral", "ministral", "cwm"), interleaved=True, windowed=True),
    Family("ministral3", ("mistral3",), ("ministral3",), interleaved=True, windowed=True, eps=1e-5),
    Family("qwen3_moe", ("qwen3moe", "qwen3vlmoe"), ("qwen3_moe", "qwen3_vl_moe_text"), windowed=True),
    Family("olmo2", ("olmo2",), ("olmo2",), eps=1e-5),
    Family("qwen2_moe", ("qwen2moe",), ("qwen2_moe",), windowed=True, full_first=True),
    Family("gemma", ("gemma",), ("gemma",), acts=("gelu_tanh", "gelu")),
    Family("gemma2", ("gemma2",), ("gemma2",), acts=("gelu_tanh",), windowed=True, window=4096, full_every=2),
    Family("gemma3", ("gemma3", "gemma-embedding"), ("gemma3_text",), acts=("gelu_tanh",), windowed=True, full_every=6),
    Family("gemma4", ("gemma4",), ("gemma4_text",), acts=("gelu_tanh",), windowed=True, full_every=6),
    Family("lfm2", ("lfm2", "lfm2moe"), ("lfm2", "lfm2_moe"), eps=1e-5),
    Family("phi3", ("phi3",), ("phi3",), windowed=True, eps=1e-5),
    Family("gpt2", ("gpt2",), ("gpt2",), acts=("gelu_tanh", "gelu", "relu", "silu"), rotary=False, eps=1e-5),
    Family("opt", (), ("opt",), acts=("relu", "gelu", "gelu_tanh"), rotary=False, eps=1e-5),
    Family("gpt_neox", ("gptneox",), ("gpt_neox",), acts=("gelu", "gelu_tanh", "relu"), eps=1e-5),
    Family("starcoder2", ("starcoder2",), ("starcoder2",), acts=("gelu_tanh", "gelu"), windowed=True, eps=1e-5),
    Family("cohere", ("command-r",), ("cohere",), interleaved=True, eps=1e-5),
    Family(
        "deepseek",
        ("deepseek2",),
        ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "youtu"),
        interleaved=True,
    ),
    Family("mistral4", ("mistral4",), ("mistral4",), interleaved=True),
    Family("cohere2", ("cohere2",), ("cohere2",), interleaved=True, windowed=True, full_every=4, eps=1e-5),
    Family("falcon", ("falcon",), ("falcon",), acts=("gelu",), eps=1e-5),
    Family("gpt_oss", ("gpt-oss",), ("gpt_oss",), windowed=True, full_every=2, eps=1e-5),
    Family("smollm3", ("smollm3",), ("smollm3",), interleaved=True),
    Family("granite", ("granite",), ("granite",), interleaved=True),
    Family("granite_moe", ("granitemoe",), ("granitemoe", "granitemoeshared"), interleaved=True),
    Family("granite_hybrid", ("granitehybrid",), ("granitemoehybrid",), interleaved=True),
    Family("falcon_h1", ("falcon-h1",), ("falcon_h1",), eps=1e-5),
    Family("nemotron_h", ("nemotron_h", "nemotron_h_moe"), ("nemotron_h",), acts=("relu2",), eps=1e-5),
    Family("olmo3", (), ("olmo3",), windowed=True, full_every=4, eps=1e-5),
    Family("olmoe", ("olmoe",), ("olmoe",), eps=1e-5),
    Family("exaone4", ("exaone4",), ("exaone4",), windowed=True, full_every=4, eps=1e-5),
    Family("exaone", ("exaone",), ("exaone",), eps=1e-5),
    Family("exaone_moe", ("exaone-moe",), ("exaone_moe",), windowed=True, full_every=4, eps=1e-5),
    Family("glm", ("chatglm",), ("glm",), interleaved=True),
    Family("glm4", ("glm4",), ("glm4",), interleaved=True),
    Family("glm4_moe", ("glm4moe",), ("glm4_moe",), eps=1e-5),
    Family("solar_open", (), ("solar_open",), eps=1e-5),
    Family("nemotron", ("nemotron",), ("nemotron",), acts=("relu2",), eps=1e-5),
    Family("arcee", ("arcee",), ("arcee",), interleaved=True, acts=("relu2",), eps=1e-5),
    Family("afmoe", ("afmoe",), ("afmoe",), windowed=True, full_every=4, eps=1e-5),
    Family("dots1", ("dots1",), ("dots1",), windowed=True, full_first=True),
    Family("minimax_m2", ("minimax-m2",), ("minimax_m2",)),
    Family("ernie4_5", ("ernie4_5",), ("ernie4_5",), interleaved=True, eps=1e-5),
    Family("ernie4_5_moe", ("ernie4_5-moe",), ("ernie4_5_moe",), interleaved=True, eps=1e-5),
    Family("seed_oss", ("seed_oss",), ("seed_oss",)),
    Family("phi", ("phi2",), ("phi",), acts=("gelu_tanh", "gelu"), eps=1e-5),
    Family("stablelm", ("stablelm",), ("stablelm",), eps=1e-5),
    Family("olmo", ("olmo",), ("olmo",), interleaved=True, eps=1e-5),
    Family("flex_olmo", (), ("flex_olmo",)),
    Family("hunyuan", ("hunyuan-dense",), ("hunyuan_v1_dense",), eps=1e-5),
    Family("hunyuan_moe", ("hunyuan-moe",), ("hunyuan_v1_moe",), eps=1e-5),
    Family("hyperclovax", (), ("hyperclovax",)),
    Family("helium", (), ("helium",), eps=1e-8),
    Family("vaultgemma", (), ("vaultgemma",), acts=("gelu_tanh",), windowed=True, full_every=2),
    Family("mellum", (), ("mellum",), windowed=True),
    Family("jais2", (), ("jais2",), acts=("relu2",), eps=1e-5),
    Family("qwen3_next", ("qwen3next",), ("qwen3_next",)),
    Family("qwen3_5", ("qwen35", "qwen35moe"), ("qwen3_5_text", "qwen3_5_moe_text")),
    Family(
        "bert",
        ("bert",),
        ("bert", "roberta", "xlm-roberta", "camembert"),
        acts=("gelu", "gelu_tanh", "relu", "silu"),
        rotary=False,
        eps=1e-12,
    ),
    Family("distilbert", (), ("distilbert",), acts=("gelu", "relu"), rotary=False, eps=1e-12),
    Family("nomic_bert", ("nomic-bert",), ("nomic_bert",), eps=1e-12),
    Family(
        "modernbert", ("modern-bert",), ("modernbert",), acts=("gelu", "gelu_tanh", "silu"), windowed=True, eps=1e-5
    ),
    Family("eurobert", ("eurobert",), ("eurobert",), eps=1e-5),
)
RECURRENT_BLOCK = 512
"""Tokens after which the memory of linear attention is kept for those who begin alike: it is as large as some thousand tokens of
a KV cache."""


@dataclass(frozen=True)
class Model:
    """A checkpoint with its family: what the runtime needs to build a program."""

    family: str
    config: DecoderConfig
    checkpoint: Checkpoint
    _weights: Weights
    _build: Callable[[Builder, DecoderConfig, Weights], Program]

    @property
    def not_run(self) -> tuple[str, ...]:
        """Names of the tensors of a part that is left out: layers that predict further tokens."""
        return self._weights.not_run

    def groups(self, block_size: int, windows: bool = True) -> tuple[CacheGroup, ...]:
        """The cache groups of this architecture: the layers that see everything, those of each window, and those with a memory
        that does not grow. Without ``windows`` (an allocator keeps what lies behind them) all layers are one group, and
        ModelError says so of a model with such a memory."""
        recurrent, kind = self.config.recurrent, self.config.cache
        layers = [i for i in range(self.config.layers) if i not in recurrent or self.config.recurrent_attends]
        limits = {i: self.config.window(i) if windows else 0 for i in layers}
        found = []
        for limit in sorted(set(limits.values())):
            own = tuple(i for i in layers if limits[i] == limit)
            if limit:
                found.append(CacheGroup(f"window {limit}", "window", block_size, limit, own))
            else:
                found.append(CacheGroup(kind, kind, block_size, layers=own))
        if recurrent:
            if not windows:
                raise ModelError(
                    f"{self.checkpoint.path} has layers with a memory of their own, which lies in pages; use the KV allocator"
                    " paged (--kv-allocator paged)."
                )
            size = max(RECURRENT_BLOCK // block_size, 1) * block_size
            found.append(CacheGroup("recurrent", "recurrent", size, RECURRENT_WINDOW, recurrent))
        return tuple(found)

    @property
    def generates(self) -> bool:
        """Whether there is a head. Without one, as models for embeddings and rankings are often saved, only hidden states have a
        meaning, and so it is of an encoder."""
        headed = self.config.may_tie or not self._weights.without_head
        return self.config.causal and headed and not self.ranks

    @property
    def ranks(self) -> bool:
        """Whether there is a layer that scores a query and a document together."""
        return ranks(self.checkpoint)

    @cached_property
    def ranking(self) -> Embedding:
        """What the states of a query and a document become a score by; ModelError where the files have no such layer."""
        answers = self.checkpoint.ranking().answers
        if not answers:
            return ranking_head(self.checkpoint, self.config.causal, self.config.eps)
        if not self.generates or self.config.logit_softcap:
            raise ModelError(
                f"{self.checkpoint.path} ranks by logits, which a model without a head, or with a cap, has not."
            )
        scale, bias = np.float32(self.config.logit_scale), self.weight("output.bias")
        found = None if bias is None else select("answers", bias, np.array(answers)).dense() * scale
        return answers_head(self.checkpoint, self.answer_rows() * scale, found)

    def answer_rows(self) -> Array:
        """f32 [answers, hidden]: the head's rows of the tokens by whose logits the model ranks."""
        tokens = self.checkpoint.ranking().answers
        head = self.weight("output.weight") or self._weights("token_embd.weight")
        return np.concatenate([select("answers", head, slice(token, token + 1)).dense() for token in tokens])

    def weight(self, name: str) -> WeightRef | None:
        """The weight of a canonical name, or None if the checkpoint has none."""
        return self._weights.maybe(name)

    def check_all_used(self) -> None:
        """ModelError when the checkpoint holds a tensor that has not been asked for."""
        self._weights.check_all_used()

    def program(self, block_size: int, kv_dtype: str, windows: bool = True, contiguous: bool = False) -> Program:
        """The op calls of one step. ``contiguous``: each page table's entries will be consecutive."""
        builder = Builder(self.groups(block_size, windows), kv_dtype, self.config.vocab, contiguous)
        program = self._build(builder, self.config, self._weights)
        self._weights.check_all_used()
        return program


def load_model(checkpoint: Checkpoint, max_model_len: int | None = None) -> Model:
    """The model of a checkpoint; ModelError names the families there are when this one is missing.

    ``max_model_len``, the longest sequence to come, settles rope scalings that depend on it; by default it is the
    context that the checkpoint names.
    """
    family = _family(checkpoint)
    _check_unclipped(checkpoint)
    module: Any = import_module(f".{family.name}", __package__)
    if checkpoint.kind == "hf" and hasattr(module, "HF_DEFAULTS"):
        defaults = module.HF_DEFAULTS.get(checkpoint.architecture, module.HF_DEFAULTS)
        checkpoint = replace(checkpoint, metadata={**defaults, **checkpoint.metadata})
    if hasattr(module, "flattened"):
        checkpoint = replace(checkpoint, metadata=module.flattened(checkpoint))
    if checkpoint.kind == "gguf":
        config = config_from_gguf(checkpoint, family, max_model_len)
    else:
        config = config_from_hf(checkpoint, family, getattr(module, "HF_KEYS", {}), max_model_len)
    if hasattr(module, "configure"):
        config = module.configure(config, checkpoint)
    if config.causal:
        config = _both_ways(config, checkpoint)
    prefix, transposed = getattr(module, "HF_PREFIX", "model."), getattr(module, "HF_TRANSPOSED", ())
    unused, needless = (
        getattr(module, hook)(config, checkpoint) if hasattr(module, hook) else () for hook in ("unused", "needless")
    )
    needless += head_tensors(checkpoint)
    weights = Weights(checkpoint, module.HF_NAMES, config.experts, prefix, transposed, unused, needless)
    return Model(family.name, config, checkpoint, weights, module.build)


def _both_ways(config: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    """The configuration of a decoder whose files turn it to attend in both directions, as some models for embeddings are.
    ModelError where one layer or another cannot."""
    data, key = checkpoint.metadata, f"{checkpoint.architecture}.attention.causal"
    told = data.get("is_causal" if checkpoint.kind == "hf" else key)
    turned = isinstance(told, int) and not told
    if data.get("use_bidirectional_attention") is True:  # Gemma 4's "vision" is of images
        raise ModelError(
            f"The checkpoint {checkpoint.path} attends in both directions (use_bidirectional_attention is"
            f" {data['use_bidirectional_attention']}), in a way that this architecture does not know; is_causal: false says so"
            " of all of its layers."
        )
    if turned and (config.recurrent or config.windows or config.cache == "latent"):
        raise ModelError(
            f"The checkpoint {checkpoint.path} attends in both directions, which layers with a window, a latent cache or a"
            " memory of their own do not; use a causal decoder, or an encoder."
        )
    return replace(config, causal=not turned)


def _check_unclipped(checkpoint: Checkpoint) -> None:
    """ModelError for models that clip q, k and v, as OLMo 1 7B does."""
    for key in ("clip_qkv", f"{checkpoint.architecture}.attention.clamp_kqv"):
        if checkpoint.metadata.get(key):
            raise ModelError(
                f"The configuration's {key} is {checkpoint.metadata[key]!r}; it must be absent, since q, k and v are not clipped"
                " here."
            )


def _family(checkpoint: Checkpoint) -> Family:
    name = checkpoint.architecture
    if name in _SHARED_NAMES and checkpoint.kind == "gguf":
        return _named(_SHARED_NAMES[name](checkpoint.metadata))
    known = [
        (each, family) for family in FAMILIES for each in (family.gguf if checkpoint.kind == "gguf" else family.hf)
    ]
    for each, family in known:
        if name == each:
            return family
    names = ", ".join(each for each, _ in known)
    raise ModelError(f"The architecture {name!r} of {checkpoint.path} is not supported; supported are: {names}.")


def _llama_of_gguf(metadata: Mapping[str, Any]) -> str:
    """GGUF files of Mixtral and Mistral call themselves llama, and name a number of experts or a window."""
    if integer(metadata, "llama.expert_count", 0, low=0):
        return "mixtral"
    return "mistral" if _window(metadata, "llama") else "llama"


def _olmo_of_gguf(metadata: Mapping[str, Any]) -> str:
    """GGUF files of OLMo 3 call themselves olmo2, and name a window."""
    return "olmo3" if _window(metadata, "olmo2") else "olmo2"


def _window(metadata: Mapping[str, Any], arch: str) -> int:
    return integer(metadata, f"{arch}.attention.sliding_window", 0, low=0, high=1 << 30)


_SHARED_NAMES = {"llama": _llama_of_gguf, "olmo2": _olmo_of_gguf}
"""Names in GGUF files that several families have."""


def _named(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)
