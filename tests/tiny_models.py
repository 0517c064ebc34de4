"""Small random checkpoints: Hugging Face folders from NumPy alone, and any such folder as a GGUF."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from safetensors.numpy import load_file, save_file

TEXTS = (
    "Once upon a time there was a small engine that could.",
    "The quick brown fox jumps over the lazy dog; numbers like 0 1 2 3 4 5 6 7 8 9 too.",
    "naïve café, 東京, 🙂, tabs\tand\nlines",
)
VOCAB = 320
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@cache
def _tokenizer_text() -> str:
    """A byte-level BPE of at most VOCAB tokens, <unk> 0, <s> 1, </s> 2, with <s> put before a text."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer.to_str()


def write_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(_tokenizer_text())
    settings = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def llama_tensors(rng: np.random.Generator, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Random weights that give logits of some units, so that choices have margins."""
    hidden, mlp, head = config["hidden_size"], config["intermediate_size"], 16
    shapes = {"model.embed_tokens.weight": (VOCAB, hidden), "lm_head.weight": (VOCAB, hidden)}
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        shapes |= {f"{p}self_attn.{name}_proj.weight": (head * n, hidden) for name, n in (("q", 4), ("k", 2), ("v", 2))}
        shapes |= {p + "self_attn.o_proj.weight": (hidden, head * 4), p + "mlp.down_proj.weight": (hidden, mlp)}
        shapes |= {p + "mlp.gate_proj.weight": (mlp, hidden), p + "mlp.up_proj.weight": (mlp, hidden)}
    tensors = {
        name: rng.standard_normal(shape, np.float32) * np.float32(2 * shape[1] ** -0.5)
        for name, shape in shapes.items()
    }
    names = ("input_layernorm", "post_attention_layernorm")
    norms = [f"model.layers.{i}.{name}.weight" for i in range(config["num_hidden_layers"]) for name in names]
    return tensors | {name: 1 + rng.standard_normal(hidden, np.float32) / 5 for name in (*norms, "model.norm.weight")}


def write_llama(
    folder: Path, rng: np.random.Generator, tensors: dict[str, np.ndarray] | None = None, **config: Any
) -> None:
    """A llama with a tokenizer; ``config`` overrides keys of config.json (None takes one out)."""
    merged = {key: value for key, value in (CONFIG | config).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(merged))
    save_file(tensors or llama_tensors(rng, CONFIG), folder / "model.safetensors")
    write_tokenizer(folder)


# -- Hugging Face to GGUF, by the published names and keys ---------------------------------------------------------------

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_EXPERTS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from paired halves to neighbouring pairs, as GGUF files of llama have them."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def to_gguf(
    folder: Path,
    path: Path,
    dtype: type[np.generic] = np.float32,
    vocab: bool = True,
    split_experts: bool = False,
    **keys: Any,
) -> Path:
    """The checkpoint of a folder as a GGUF with weights in F32 or F16 (norms and biases always F32), and experts in one tensor
    or, as in the first files of Mixtral, each in one of its own. ``keys``, without the architecture before them, are added."""
    config = json.loads((folder / "config.json").read_text())
    tensors = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
    arch = "llama" if config["model_type"] == "mixtral" else config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    _add_keys(writer, config)
    for key, value in keys.items():
        writer.add_key_value(f"{arch}.{key}", value, gguf.GGUFValueType.get_type(value))
    if vocab:
        _add_vocab(writer, json.loads((folder / "tokenizer.json").read_text()))
    renamed = _renamed(config, tensors, interleaved=arch == "llama")
    for name, array in (_split_experts(renamed) if split_experts else renamed).items():
        writer.add_tensor(name, np.ascontiguousarray(array, dtype if array.ndim > 1 else np.float32))
    finish(writer)
    return path


def _split_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        experts = {name.replace("_exps", f".{e}"): member for e, member in enumerate(array)}
        found |= experts if "_exps" in name else {name: array}
    return found


def finish(writer: gguf.GGUFWriter) -> None:
    """Writes all that the writer was given, and closes it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    old = {"rope_theta": config.get("rope_theta", 10000.0)} | (config.get("rope_scaling") or {})
    return config.get("rope_parameters") or old


def _head_dim(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _add_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(_rope(config)["rope_theta"])
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    if config.get("num_local_experts"):
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])


def _renamed(config: dict[str, Any], tensors: dict[str, np.ndarray], interleaved: bool) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, array in tensors.items():
        stem, _, kind = name.rpartition(".")
        if stem in _OUTER:
            found[f"{_OUTER[stem]}.{kind}"] = array
            continue
        layer, inner = stem.removeprefix("model.layers.").split(".", 1)
        if ".experts." in inner:
            number, which = inner.rsplit(".", 2)[1:]
            experts.setdefault(f"blk.{layer}.{_EXPERTS[which]}.{kind}", {})[int(number)] = array
            continue
        if interleaved and inner in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config["num_attention_heads"] if inner.endswith("q_proj") else config["num_key_value_heads"]
            found[f"blk.{layer}.{_NAMES[inner]}.{kind}"] = interleave(array, heads)
        else:
            found[f"blk.{layer}.{_NAMES[inner]}.{kind}"] = array
    found |= {name: np.stack([members[e] for e in sorted(members)]) for name, members in experts.items()}
    if _rope(config).get("rope_type") == "llama3":
        found["rope_freqs.weight"] = _llama3_divisors(_rope(config), _head_dim(config))
    return found


def _llama3_divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """What Llama 3.1's reference code divides each frequency by, written once more from its three cases."""
    divisors = []
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factor, old = rope["factor"], rope["original_max_position_embeddings"]
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / head_dim)
        if wavelength < old / high:
            divisors.append(1.0)
        elif wavelength > old / low:
            divisors.append(factor)
        else:
            smooth = (old / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def _add_vocab(writer: gguf.GGUFWriter, tokenizer: dict[str, Any]) -> None:
    ids = tokenizer["model"]["vocab"]
    special = {entry["id"] for entry in tokenizer["added_tokens"]}
    texts = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(texts))]
    )
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)


TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'forbidden' %}{{ raise_exception('forbidden it is') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_talker(folder: Path, template: str = TEMPLATE, letters: int = 1) -> Path:
    """A random llama with a chat template that greedily answers in tokens of at most so many letters and never ends by
    itself, drawn or not; its context is 32768 tokens."""
    tensors = llama_tensors(np.random.default_rng(5), CONFIG)
    write_tokenizer(folder)
    ids = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    others = [i for token, i in ids.items() if not (len(token) <= letters and token.isascii() and token.isalpha())]
    tensors["lm_head.weight"][others] = 0
    _never_end(tensors)
    write_llama(folder, np.random.default_rng(5), tensors, max_position_embeddings=32768)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return folder


MARKED = {"I look. ": False, "[TOOL_CALLS]": True, '[{"name": "weather", "arguments": {"city": "a"}}]': False}
HARMONY = {
    "<|channel|>": True,
    "analysis": False,
    "<|message|>": True,
    "I need it. ": False,
    "<|end|>": True,
    "<|start|>": True,
    "assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>": False,
    '{"city": "a"}': False,
}


def write_marking(folder: Path, marked: dict[str, bool] = MARKED, template: str = TEMPLATE) -> Path:
    """A talker whose tokens have these texts, some of which are special, as Mistral's and Llama 3's marks are."""
    write_talker(folder, "{% if tools %}{{ tools | tojson }}{% endif %}" + template)
    written = json.loads((folder / "tokenizer.json").read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for text, special in marked.items():  # in place of the last that are merged
        token = written["model"]["vocab"].pop("".join(written["model"]["merges"].pop()))
        written["added_tokens"].append({"id": token, "content": text, "special": special, **plain})
    (folder / "tokenizer.json").write_text(json.dumps(written))
    return folder


def _never_end(tensors: dict[str, np.ndarray]) -> None:
    """Gives the end a probability of next to nothing, by a dimension that is positive in every token's state."""
    tensors["model.embed_tokens.weight"][:, 0] = 1
    tensors["model.norm.weight"][0] = 1
    for name, weight in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0
    tensors["lm_head.weight"][:, 0] = 0
    tensors["lm_head.weight"][CONFIG["eos_token_id"], 0] = -1000


def own_home(folder: Path, monkeypatch: Any) -> Path:
    """A folder for what commands keep, in place of the person's own."""
    for name in ("DATA", "STATE", "CONFIG", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(folder / name.lower()))
    monkeypatch.setenv("HOME", str(folder))
    return folder
