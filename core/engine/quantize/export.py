"""A checkpoint as the contents of a GGUF file: keys and tensors by the published names, whatever its own format is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import Any

import numpy as np

from engine.backend.v1 import Array, WeightRef
from engine.errors import ModelError
from engine.formats import FORMATS, Checkpoint, Tensor
from engine.formats.gguf import Metadata
from engine.formats.gguf_writer import encode_value
from engine.formats.recommended import GGUF_KEYS
from engine.models import FAMILIES, Model, load_model
from engine.models.experts import ExpertsConfig
from engine.models.family import Family
from engine.models.gated_delta import DeltaConfig
from engine.models.gemma4 import Gemma4Config
from engine.models.rope import Rope, base_frequencies, rope_scaling, yarn_scale
from engine.program.weights import ConstantWeight, input_spec, select, single
from engine.quantize.export_delta import delta_keys, delta_parts
from engine.quantize.export_encoder import bert_parts, dense_tensors, encoder_keys, pooling_keys, vocabulary_keys
from engine.quantize.export_falcon_h1 import falcon_parts, without_factors
from engine.quantize.export_gemma4 import STILL, gemma4_keys
from engine.quantize.export_lfm2 import lfm2_keys, lfm2_parts
from engine.quantize.export_mamba2 import mamba_keys, mamba_of, mamba_parts
from engine.quantize.export_ranking import ranking_keys, ranking_tensors
from engine.quantize.export_tokenizer import tokenizer_keys

_REPLACED = ("general.file_type", "general.quantization_version", "split.no", "split.count", "split.tensors.count")
# family -> its name in GGUF files; other families lay tensors out in ways of their own there
_ARCHITECTURES = {family.name: family.gguf[0] for family in FAMILIES if family.gguf} | {
    "mixtral": "llama",
    "mistral": "llama",
    "olmo3": "olmo2",
    "distilbert": "bert",
}
_EXPORTABLE = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "olmo2", "gemma", "gemma2", "gemma3", "phi3",
    "gpt2", "gpt_neox", "starcoder2", "cohere", "cohere2", "falcon", "gpt_oss", "smollm3", "granite", "granite_moe", "olmo3",
    "olmoe", "exaone4", "glm", "glm4", "glm4_moe", "arcee", "dots1", "minimax_m2", "exaone", "exaone_moe", "nemotron",
    "ernie4_5", "ernie4_5_moe", "seed_oss", "ministral3", "qwen3_next", "qwen3_5", "gemma4", "lfm2", "granite_hybrid",
    "nemotron_h", "falcon_h1", "phi", "stablelm", "olmo", "hunyuan", "hunyuan_moe",
    "afmoe", "bert", "distilbert", "nomic_bert", "modernbert",
    "eurobert",
)  # fmt: skip
_LAYER_NORMS = (
    "gpt2", "gptneox", "falcon", "starcoder2", "command-r", "cohere2", "nemotron", "phi2", "stablelm", "olmo", "bert",
    "nomic-bert", "modern-bert",
)  # fmt: skip
_EXPERT_WIDTHS = {
    "moe_intermediate_size": "expert",
    "shared_expert_intermediate_size": "expert_shared",
    "shared_intermediate_size": "expert_shared",
}
_BY_PROGRAM = (
    "gpt_oss", "granite", "granite_moe", "ernie4_5_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "glm4_moe", "dots1",
    "minimax_m2", "exaone_moe", "hunyuan_moe", "afmoe",
)  # fmt: skip
"""Families some of whose Hugging Face files have in one tensor what is several in GGUF files, or in another shape, and whose
programs take these out of it."""
_PARTS: Mapping[str, Callable[[Model, WeightRef], Iterable[WeightRef]]] = {
    "qwen3_next": delta_parts,
    "qwen3_5": delta_parts,
    "granite_hybrid": mamba_parts,
    "nemotron_h": mamba_parts,
    "falcon_h1": falcon_parts,
    "lfm2": lfm2_parts,
    "bert": bert_parts,
}
"""What a GGUF file has for a weight of a Hugging Face file, of families whose programs take it further apart than that."""
_GROUPED = ("gpt_neox", "falcon")
"""Families whose Hugging Face files keep q, k and v of a KV head together, where GGUF files have all q, all k, all v."""


@dataclass(frozen=True)
class Contents:
    """``metadata``: key -> encoded value; ``tensors`` by their names in GGUF files, in order; the rest is what the choice of
    formats depends on."""

    architecture: str
    metadata: Mapping[str, bytes]
    tensors: tuple[WeightRef, ...]
    layers: int
    shared: int
    experts: int


def contents(checkpoint: Checkpoint) -> Contents:
    """ModelError if the checkpoint has no form as a GGUF file that means the same."""
    return _of_gguf(checkpoint) if checkpoint.kind == "gguf" else _of_hf(checkpoint)


def _of_gguf(checkpoint: Checkpoint) -> Contents:
    data, arch = checkpoint.metadata, checkpoint.architecture
    assert isinstance(data, Metadata)
    if not checkpoint.tensors:
        raise ModelError(f"{checkpoint.path} holds a vocabulary but no weights; there is nothing to quantize.")
    heads = _whole(data, f"{arch}.attention.head_count", 1)
    return Contents(
        architecture=arch,
        metadata={key: data.encoded(key) for key in data if key not in _REPLACED},
        tensors=tuple(single(name, tensor) for name, tensor in checkpoint.tensors.items()),
        layers=_whole(data, f"{arch}.block_count", 0),
        shared=heads // _whole(data, f"{arch}.attention.head_count_kv", heads),
        experts=_whole(data, f"{arch}.expert_count", 0),
    )


def _whole(data: Metadata, key: str, default: int) -> int:
    """A whole number; some architectures have one for each layer, of which the largest counts."""
    value = data.get(key, default)
    if isinstance(value, np.ndarray) and value.size:
        value = int(value.max())
    return value if isinstance(value, int) and value > 0 else default


def _of_hf(checkpoint: Checkpoint) -> Contents:
    model = load_model(checkpoint)
    if model.family not in _EXPORTABLE:
        known = ", ".join(_EXPORTABLE)
        raise ModelError(f"The family {model.family} cannot be written as GGUF; the families that can are: {known}.")
    arch = _architecture(model)
    factors = _rope_factors(model)
    plain = without_factors(model)
    keys = _keys(arch, plain) | {f"{arch}.{key}": value for key, value in pooling_keys(model).items()}
    keys |= ranking_keys(model, arch)
    tensors = (*_tensors(model), *(ConstantWeight(name, array) for name, array in factors.items()))
    tensors += dense_tensors(model, arch) + ranking_tensors(model)
    _check_same(plain, arch, keys, factors, tensors)
    tokens = model.config.second_text or model.config.vocab
    vocabulary = tokenizer_keys(checkpoint, tokens, model.ranks) | vocabulary_keys(model)
    named: dict[str, Any] = {"general.architecture": arch, "general.name": checkpoint.path.resolve().name}
    named |= {GGUF_KEYS[name]: value for name, value in checkpoint.sampling.items()}
    return Contents(
        architecture=arch,
        metadata={key: encode_value(value) for key, value in (named | keys | vocabulary).items()},
        tensors=tensors,
        layers=model.config.layers,
        shared=model.config.heads // model.config.kv_heads,
        experts=model.config.experts,
    )


def _architecture(model: Model) -> str:
    """Some families have another name with experts, Granite 4 the older ones' without state-space layers, and Gemma 3 one of its
    own where it looks both ways."""
    with_experts = {"qwen3_5": "qwen35moe", "lfm2": "lfm2moe", "nemotron_h": "nemotron_h_moe"}
    if model.family == "granite_hybrid" and not model.config.recurrent:
        return "granitemoe" if model.config.experts else "granite"
    if model.family == "gemma3" and not model.config.causal:
        return "gemma-embedding"
    return (with_experts if model.config.experts else {}).get(model.family, _ARCHITECTURES[model.family])


# -- keys ----------------------------------------------------------------------------------------------------------------


def _keys(arch: str, model: Model) -> dict[str, Any]:
    """The keys of the GGUF specification for a decoder's configuration."""
    c, data = model.config, model.checkpoint.metadata
    eps = "layer_norm_epsilon" if arch in _LAYER_NORMS else "layer_norm_rms_epsilon"
    keys: dict[str, Any] = {
        "block_count": c.layers,
        "context_length": c.max_context,
        "embedding_length": c.hidden,
        "feed_forward_length": c.mlp,
        "vocab_size": c.second_text or c.vocab,
        "attention.head_count": c.heads,
        "attention.head_count_kv": c.kv_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        f"attention.{eps}": c.eps,
    }
    if (rope := c.rope or c.local_rope) is not None:
        keys |= _rope_keys(rope, data)
    if c.rope is not None and c.local_rope is not None:
        keys["rope.freq_base_swa"] = _theta(c.local_rope)
    if c.experts:
        keys |= {"expert_count": c.experts, "expert_used_count": c.experts_used}
        for own, name in _EXPERT_WIDTHS.items():
            if isinstance(data.get(own), int):
                keys[f"{name}_feed_forward_length"] = data[own]
        keys.setdefault("expert_feed_forward_length", c.mlp)
    if arch == "hunyuan-moe":
        keys |= {"expert_shared_count": 1, "expert_shared_feed_forward_length": c.mlp}
    if isinstance(c, ExpertsConfig) and c.experts:
        keys |= _expert_keys(c, keys["expert_feed_forward_length"])
    if isinstance(c, DeltaConfig):
        keys |= delta_keys(model, c)
    if isinstance(c, Gemma4Config):
        keys |= gemma4_keys(model, c)
    if model.family == "lfm2":
        keys |= lfm2_keys(model)
    if (mamba := mamba_of(model)) is not None:
        keys |= mamba_keys(model, mamba)
    if not c.causal:
        keys |= encoder_keys(model)
    elif c.windows:
        keys |= _window_keys(model)
    if c.attention_softcap:
        keys["attn_logit_softcapping"] = c.attention_softcap
    if c.logit_softcap:
        keys["final_logit_softcapping"] = c.logit_softcap
    if c.attention_scale is not None and not np.isclose(c.attention_scale, c.head_dim**-0.5):
        keys["attention.scale"] = c.attention_scale
    if arch in ("command-r", "cohere2"):
        keys["logit_scale"] = c.logit_scale
    if arch in ("granite", "granitemoe", "granitehybrid"):
        keys |= {"embedding_scale": c.embedding_scale, "residual_scale": c.residual_scale}
        keys["logit_scale"] = 1 / c.logit_scale
    if c.query_growth:
        keys["attention.temperature_scale"] = c.query_growth
    if arch in ("gptneox", "stablelm"):
        keys["use_parallel_residual"] = c.parallel_residual
    return {f"{arch}.{key}": value for key, value in keys.items()}


def _expert_keys(c: ExpertsConfig, width: int) -> dict[str, Any]:
    keys: dict[str, Any] = {"leading_dense_block_count": c.dense, "interleave_moe_layer_step": 1}
    keys["expert_shared_count"] = c.shared // width
    if c.shared:
        keys["expert_shared_feed_forward_length"] = c.shared
    if c.routing["score"] == "sigmoid":
        keys |= {
            "expert_gating_func": 2,
            "expert_weights_scale": c.routing["scale"],
            "expert_weights_norm": c.renormalize,
        }
    if "groups" in c.routing:
        keys |= {"expert_group_count": c.routing["groups"], "expert_group_used_count": c.routing["groups_kept"]}
    return keys


def _window_keys(model: Model) -> dict[str, Any]:
    """The window, and which layers have it where the family alternates in another way than usual."""
    windows, every = model.config.windows, _family(model).full_every
    keys: dict[str, Any] = {"attention.sliding_window": max(windows)}
    usual = tuple(0 if every and (i + 1) % every == 0 else max(windows) for i in range(len(windows)))
    if every and windows != usual:
        keys["attention.sliding_window_pattern"] = np.array(windows) > 0
    return keys


def _family(model: Model) -> Family:
    return next(family for family in FAMILIES if family.name == model.family)


def _theta(rope: Rope) -> float:
    """The base of frequencies without scaling; any base will do for a single one."""
    count = rope.inv_freq.size
    return float(rope.inv_freq[-1].astype(np.float64) ** (-count / (count - 1))) if count > 1 else 10000.0


def _scaling(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary settings of config.json, those of the layers without a window where both are told apart."""
    parameters = data.get("rope_parameters")
    full = parameters.get("full_attention") if isinstance(parameters, Mapping) else None
    return rope_scaling(data if full is None else {**data, "rope_parameters": full})


def _rope_keys(rope: Rope, data: Mapping[str, Any]) -> dict[str, Any]:
    scaling = _scaling(data)
    theta = (
        scaling.get("rope_theta")
        or data.get("rope_theta")
        or data.get("rotary_emb_base")
        or data.get("global_rope_theta")
        or 10000.0
    )
    if scaling.get("alpha"):
        theta = _theta(rope)
    keys: dict[str, Any] = {"rope.freq_base": float(theta), "rope.dimension_count": 2 * rope.inv_freq.size}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    original = scaling.get("original_max_position_embeddings") or data.get("original_max_position_embeddings")
    if kind in ("longrope", "su", "yarn") and isinstance(original, int):
        keys["rope.scaling.original_context_length"] = original
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(scaling["factor"])}
    if kind == "yarn":
        for own, name in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if scaling.get(own) is not None:
                keys[f"rope.scaling.{name}"] = float(scaling[own])
    usual = yarn_scale(float(scaling["factor"])) if kind == "yarn" else 1.0
    if not np.isclose(rope.scale, usual):
        # llama.cpp reads no yarn_attn_factor but Grok's
        keys["rope.scaling.attn_factor"] = rope.scale / usual
    return keys


def _rope_factors(model: Model) -> dict[str, Array]:
    """Divisors of the rotary frequencies that GGUF files carry as tensors: Llama 3's, both sets of LongRoPE, and those that stop
    pairs."""
    scaling, rope = _scaling(model.checkpoint.metadata), model.config.rope
    kind = scaling.get("rope_type") or scaling.get("type")
    if rope is None:
        return {}
    if kind == "llama3":
        theta = float(scaling.get("rope_theta") or model.checkpoint.metadata.get("rope_theta") or 10000.0)
        return {"rope_freqs.weight": base_frequencies(2 * rope.inv_freq.size, theta) / rope.inv_freq}
    if kind == "proportional":
        base = base_frequencies(2 * rope.inv_freq.size, float(scaling["rope_theta"]))
        return {
            "rope_freqs.weight": np.divide(base, rope.inv_freq, out=np.full_like(base, STILL), where=rope.inv_freq > 0)
        }
    if kind in ("longrope", "su"):
        return {f"rope_factors_{w}.weight": np.array(scaling[f"{w}_factor"], np.float32) for w in ("long", "short")}
    return {}


def _check_same(
    model: Model, arch: str, keys: Mapping[str, Any], factors: Mapping[str, Array], tensors: tuple[WeightRef, ...]
) -> None:
    """ModelError if the keys, read back, do not describe the same model: GGUF files have no keys for some settings."""
    f32 = FORMATS["F32"]
    found = {name: Tensor(name, a.shape, f32, np.ascontiguousarray(a).view(np.uint8)) for name, a in factors.items()}
    shapes = {ref.name: Tensor(ref.name, ref.shape, f32, np.zeros(0, np.uint8)) for ref in tensors}
    written = replace(model.checkpoint, kind="gguf", architecture=arch, metadata=keys, tensors=shapes | found)
    again = load_model(written).config
    for field in fields(model.config):
        # norms are stored with their offset added; a head that is stored is used, tied or not; value heads are put in order
        if field.name in ("norm_offset", "may_tie", "tiled"):
            continue
        if not _alike(getattr(model.config, field.name), getattr(again, field.name)):
            raise ModelError(
                f"{model.checkpoint.path} sets {field.name} in a way that GGUF files of {arch} have no key for, so that it"
                " would be another model there."
            )


def _alike(a: object, b: object) -> bool:
    if isinstance(a, Rope) and isinstance(b, Rope):
        same = a.inv_freq.shape == b.inv_freq.shape and np.allclose(a.inv_freq, b.inv_freq, rtol=1e-5, atol=1 / STILL)
        return bool(same and np.isclose(a.scale, b.scale, rtol=1e-5))
    if isinstance(a, float) and isinstance(b, float):
        return bool(np.isclose(a, b, rtol=1e-6))
    return a == b


# -- tensors -------------------------------------------------------------------------------------------------------------


def _tensors(model: Model) -> Iterator[WeightRef]:
    """The weights by canonical name, laid out as GGUF files have them."""
    if model.family in _BY_PROGRAM:
        yield from _of_program(model)
        return
    names, parts = import_module(f"engine.models.{model.family}").HF_NAMES, _PARTS.get(model.family)
    for pattern in sorted(names, key=lambda name: name.startswith("blk.")):
        for layer in range(model.config.layers if "{i}" in pattern else 1):
            weight = model.weight(pattern.replace("{i}", str(layer)))
            if weight is not None:
                _check_columns(weight)
                found = (weight,) if parts is None else parts(model, weight)
                yield from (_laid_out(model, pattern, part) for part in found)
    model.check_all_used()


def _of_program(model: Model) -> Iterator[WeightRef]:
    """The weights that the family's program multiplies with, which have GGUF's names."""
    found = {ref.name: ref for call in model.program(16, "f16").calls for ref in call.weights.values()}
    for name, ref in found.items():
        if not name.startswith("rope"):
            _check_columns(ref)
            yield _laid_out(model, name, ref)


def _check_columns(weight: WeightRef) -> None:
    if input_spec(weight).columns is not None:
        raise ModelError(
            f"{weight.name} has its columns in another order (act-order), which GGUF files have no form for."
        )


def _laid_out(model: Model, pattern: str, weight: WeightRef) -> WeightRef:
    c = model.config
    if c.norm_offset and pattern.endswith("norm.weight") and not pattern.endswith(".ssm_norm.weight"):
        return ConstantWeight(weight.name, weight.dense() + np.float32(c.norm_offset))
    part = pattern.split(".")[-2]
    if part == "attn_qkv" and model.family in _GROUPED:
        rows = np.arange((c.heads + 2 * c.kv_heads) * c.head_dim).reshape(c.kv_heads, -1, c.head_dim)
        return select(
            weight.name, weight, np.concatenate([rows[:, :-2].ravel(), rows[:, -2].ravel(), rows[:, -1].ravel()])
        )
    pairs = _neighbours(model)
    if part in ("attn_q", "attn_k") and pairs:
        heads = c.heads if part == "attn_q" else c.kv_heads
        return select(weight.name, weight, _interleaved(heads, c.head_dim, pairs))
    return weight


def _neighbours(model: Model) -> int:
    """Rotary dimensions of a head that GGUF files of the family have as neighbours, where this checkpoint has halves."""
    rope = model.config.rope
    return 2 * rope.inv_freq.size if rope is not None and _family(model).interleaved and not rope.interleaved else 0


def _interleaved(heads: int, head_dim: int, rotary: int) -> Array:
    """The rows of q or k with each pair (i, i + rotary / 2) of a head as neighbours: an index [heads * head_dim]."""
    head = np.arange(head_dim)
    head[:rotary] = head[:rotary].reshape(2, -1).T.ravel()
    return (np.arange(heads)[:, None] * head_dim + head).ravel()
