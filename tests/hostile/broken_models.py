"""Kinds of broken model: each takes a good one and breaks it in one way."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from good_models import GGUF, Folder
from handmade import safetensors_bytes, safetensors_of

GGUF_KINDS: dict[str, Callable[[GGUF], object]] = {}
FOLDER_KINDS: dict[str, Callable[[Folder], object]] = {}
TEMPLATE_BOMBS: dict[str, str] = {
    "a loop in a loop": "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "loops of macros": "{% macro f() %}{% for i in range(90000) %}{% endfor %}{% endmacro %}"
    "{% for i in range(90000) %}{{ f() }}{% endfor %}",
    "macros that double": "{% macro m0() %}{% endmacro %}"
    + "".join(f"{{% macro m{n + 1}() %}}{{{{ m{n}() }}}}{{{{ m{n}() }}}}{{% endmacro %}}" for n in range(40))
    + "{{ m40() }}",
    "long output": "{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}",
    "long output of its own text": "{% for i in range(99999) %}" + "x" * 100000 + "{% endfor %}",
    "a long product": "{{ 'x' * 99999999999 }}",
    "a product in steps": "{{ ('x' * 60000) * 60000 }}",
    "text kept aside": "{% set kept %}{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}{% endset %}",
    "joined by ~": "{% set n = namespace(x='xx') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "joined by +": "{% set n = namespace(x='xx') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "lists joined": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "lists in lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "lists in lists as JSON": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
    "{{ n.x | tojson }}",
    "replaced": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x.replace('x', 'xx') %}{% endfor %}",
    "replaced by a filter": "{% set n = namespace(x='x') %}{% for i in range(60) %}"
    "{% set n.x = n.x | replace('x', 'xxx') %}{% endfor %}",
    "joined by a filter": "{% set n = namespace(x='xx') %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] | join(n.x) %}{% endfor %}",
    "joined by a method": "{% set n = namespace(x='xx') %}{% for i in range(60) %}"
    "{% set n.x = n.x.join([n.x, n.x]) %}{% endfor %}",
    "padded by a method": "{{ 'x'.ljust(9999999999) }}",
    "centred": "{{ 'x' | center(9999999999) }}",
    "indented": "{{ 'x\nx' | indent(9999999999) }}",
    "indented JSON": "{{ [1] | tojson(indent=9999999999) }}",
    "formatted by %": "{{ '%9999999999d' % 1 }}",
    "formatted by a filter": "{{ '%9999999999d' | format(1) }}",
    "formatted by a method": "{{ '{:9999999999}'.format(1) }}",
    "a width out of an argument": "{{ '{:{}}'.format(1, 9999999999) }}",
    "a power": "{{ 9 ** 99999999 }}",
    "a range": "{{ range(999999999) | list }}",
    "words without end": "{{ lipsum(n=99999999) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a way out": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a file": "{% include '/etc/passwd' %}",
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "no end": "{% for m in messages %}",
}


def _gguf(name: str, breaks: Callable[[GGUF], object]) -> None:
    GGUF_KINDS[name] = breaks


def _folder(name: str, breaks: Callable[[Folder], object]) -> None:
    FOLDER_KINDS[name] = breaks


def build(kind: Callable[[Any], object], good: Any) -> Any:
    """The good model broken by the kind; the good one stays as it is."""
    broken = copy.deepcopy(good)
    kind(broken)
    return broken


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


# -- GGUF: the container ---------------------------------------------------------------------------------------------------

for cut in (5, 23, 40, 400):
    _gguf(f"cut after {cut} bytes", lambda g, n=cut: _set(g, "finish", lambda data: data[:n]))
for percent in (10, 50, 99):
    _gguf(f"cut at {percent} %", lambda g, n=percent: _set(g, "finish", lambda data: data[: len(data) * n // 100]))
_gguf("another magic", lambda g: g.settings.update(magic=b"GGML"))
_gguf("version 1", lambda g: g.settings.update(version=1))
_gguf("version 9", lambda g: g.settings.update(version=9))
_gguf("big-endian", lambda g: g.settings.update(version=3 << 24))
for name, count in (("some", 1000), ("2^32", 1 << 32), ("2^63", 1 << 63), ("2^64 - 1", (1 << 64) - 1)):
    _gguf(f"{name} keys claimed", lambda g, n=count: g.settings.update(key_count=n))
    _gguf(f"{name} tensors claimed", lambda g, n=count: g.settings.update(tensor_count=n))
_gguf("fewer keys claimed", lambda g: g.settings.update(key_count=3))
_gguf(
    "a key longer than the file", lambda g: g.key("x", "str", "").keys.append(("", "raw", struct.pack("<Q", 1 << 40)))
)
_gguf("a key that is no UTF-8", lambda g: g.keys.append((b"\xff\xfe", "u8", 1)))
_gguf("a key twice", lambda g: g.keys.append(g.keys[0]))
_gguf("an unknown type", lambda g: g.keys.append(("x", "raw", struct.pack("<II", 77, 0))))
_gguf("a string past the end", lambda g: g.keys.append(("x", "raw", struct.pack("<IQ", 8, 1 << 40))))
_gguf("an array past the end", lambda g: g.keys.append(("x", "raw", struct.pack("<IIQ", 9, 4, 1 << 61))))
_gguf("an array whose size wraps", lambda g: g.keys.append(("x", "raw", struct.pack("<IIQ", 9, 10, (1 << 61) + 1))))
_gguf(
    "arrays nested deep", lambda g: g.keys.append(("x", "raw", struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9000))
)
_gguf("a million empty arrays", lambda g: g.keys.append(
    ("x", "raw", struct.pack("<IIQ", 9, 9, 1_000_000) + struct.pack("<IQ", 4, 0) * 1_000_000)
))  # fmt: skip
_gguf("two hundred thousand keys", lambda g: g.keys.extend((f"{n:x}", "u8", 0) for n in range(200_000)))
_gguf("a hundred thousand tensors", lambda g: g.tensors.extend(
    {"name": f"{n:x}", "dims": [1], "data": bytes(4)} for n in range(100_000)
))  # fmt: skip

# -- GGUF: tensors -----------------------------------------------------------------------------------------------------

EMBEDDING, NORM = "token_embd.weight", "output_norm.weight"
_gguf("an offset past the end", lambda g: g.tensors[-1].update(offset=1 << 30))
_gguf("an offset that wraps", lambda g: g.tensors[-1].update(offset=(1 << 64) - 32))
_gguf("an offset not aligned", lambda g: g.tensors[-1].update(offset=4))
_gguf("tensors that overlap", lambda g: g.tensors[-1].update(offset=0))
_gguf("a tensor twice", lambda g: g.tensors.append(dict(g.tensors[-1])))
_gguf("no dimension", lambda g: g.tensor(NORM).update(dims=[]))
_gguf("nine dimensions", lambda g: g.tensor(NORM).update(dims=[1] * 8 + [64]))
_gguf("2^31 dimensions", lambda g: g.tensor(NORM).update(n_dims=1 << 31))
_gguf("a dimension of 0", lambda g: g.tensor(NORM).update(dims=[64, 0]))
_gguf("dimensions whose product wraps", lambda g: g.tensor(NORM).update(dims=[1 << 32, 1 << 32]))
_gguf("dimensions of 2^63", lambda g: g.tensor(NORM).update(dims=[1 << 63, 1 << 63]))
_gguf("a type that was removed", lambda g: g.tensor(EMBEDDING).update(type=4))
_gguf("an unknown tensor type", lambda g: g.tensor(EMBEDDING).update(type=1 << 31))
_gguf("blocks that do not fit the row", lambda g: g.tensor(EMBEDDING).update(type=12))
_gguf("a wrong block size", lambda g: g.tensor(EMBEDDING).update(type=8))
_gguf("a name that is no UTF-8", lambda g: g.tensor(NORM).update(name=b"\xc3("))
_gguf("a name of 1,000 bytes", lambda g: g.tensor(NORM).update(name="n" * 1000))
_gguf("a missing tensor", lambda g: g.tensors.remove(g.tensor("blk.1.ffn_up.weight")))
_gguf("a tensor that nothing uses", lambda g: g.tensor("blk.1.ffn_up.weight").update(name="blk.9.ffn_up.weight"))
_gguf("a wrong shape", lambda g: g.tensor("blk.0.attn_q.weight").update(dims=[32, 128]))
_gguf("a matrix for a vector", lambda g: g.tensor(NORM).update(dims=[32, 2]))
_gguf("no tensors", lambda g: g.tensors.clear())

# -- GGUF: what the model says of itself -------------------------------------------------------------------------------

_gguf("alignment 0", lambda g: g.key("general.alignment", "u32", 0))
_gguf("alignment 33", lambda g: g.key("general.alignment", "u32", 33))
_gguf("alignment 2^31", lambda g: g.key("general.alignment", "u32", 1 << 31))
_gguf("no architecture", lambda g: g.drop("general.architecture"))
_gguf("an unknown architecture", lambda g: g.key("general.architecture", "str", "perceptron"))
_gguf("an architecture of a megabyte", lambda g: g.key("general.architecture", "str", "x" * (1 << 20)))
_gguf("an architecture that is a number", lambda g: g.key("general.architecture", "u32", 5))
_gguf("part of a split", lambda g: g.key("split.count", "u32", 3))
_gguf("part of 2^32 - 1", lambda g: g.key("split.count", "u32", (1 << 32) - 1))
for key, values in {
    "block_count": (None, 0, 3, 1 << 31),
    "embedding_length": (None, 0, 63, (1 << 32) - 1),
    "attention.head_count": (None, 0, 3, (1 << 32) - 1),
    "attention.head_count_kv": (0, 3, 1 << 31),
    "attention.key_length": (0, 17, 1 << 31),
    "feed_forward_length": (None, 0, 1 << 31),
    "context_length": (None, 0, (1 << 32) - 1),
    "rope.dimension_count": (15, 1 << 31),
    "expert_count": (1 << 31,),
}.items():
    for number in values:
        name = f"llama.{key}"
        _gguf(f"{key} {number}", lambda g, k=name, n=number: g.drop(k) if n is None else g.key(k, "u32", n))
    if key != "expert_count":
        _gguf(f"{key} a string", lambda g, k=f"llama.{key}": g.key(k, "str", "many"))
_gguf("block_count an array", lambda g: g.key("llama.block_count", "[u32]", [2, 2]))
for number in (float("nan"), float("inf"), -1.0, 0.0):
    _gguf(f"epsilon {number}", lambda g, n=number: g.key("llama.attention.layer_norm_rms_epsilon", "f32", n))
    _gguf(f"rope base {number}", lambda g, n=number: g.key("llama.rope.freq_base", "f32", n))

# -- GGUF: its tokenizer ---------------------------------------------------------------------------------------------------

TOKENS = "tokenizer.ggml.tokens"
_gguf("no tokens", lambda g: g.drop(TOKENS))
_gguf("an empty vocabulary", lambda g: g.key(TOKENS, "[str]", []))
_gguf("tokens that are numbers", lambda g: g.key(TOKENS, "[u32]", [1, 2, 3]))
_gguf("a token that is no UTF-8", lambda g: g.key(TOKENS, "[str]", [b"\xff", *g.value(TOKENS)[1:]]))
_gguf("more tokens than embeddings", lambda g: g.key(TOKENS, "[str]", [*g.value(TOKENS), *map(str, range(5000, 9000))]))
_gguf("too few token types", lambda g: g.key("tokenizer.ggml.token_type", "[i32]", [1, 2]))
_gguf("token types that are strings", lambda g: g.key("tokenizer.ggml.token_type", "[str]", ["a"]))
_gguf("no merges", lambda g: g.drop("tokenizer.ggml.merges"))
_gguf("merges of unknown tokens", lambda g: g.key("tokenizer.ggml.merges", "[str]", ["qqqq zzzz"]))
_gguf("merges without a space", lambda g: g.key("tokenizer.ggml.merges", "[str]", ["ab"]))
_gguf("a merge that is no UTF-8", lambda g: g.key("tokenizer.ggml.merges", "[str]", [b"a \xff"]))
_gguf("tokens that come from every pair", lambda g: (
    g.drop("tokenizer.ggml.token_type").drop("tokenizer.ggml.scores").key("tokenizer.ggml.model", "str", "llama")
    .key(TOKENS, "[str]", ["a" * n for n in range(1, 1025)])
))  # fmt: skip
_gguf("an unknown tokenizer", lambda g: g.key("tokenizer.ggml.model", "str", "abacus"))
_gguf("no tokenizer", lambda g: g.drop("tokenizer.ggml.model"))
_gguf("an unknown pre-tokenizer", lambda g: g.key("tokenizer.ggml.pre", "str", "abacus"))
_gguf("a pre-tokenizer that is a number", lambda g: g.key("tokenizer.ggml.pre", "u32", 5))
_gguf("bos beyond the vocabulary", lambda g: g.key("tokenizer.ggml.bos_token_id", "u32", 1 << 31))
_gguf("bos a string", lambda g: g.key("tokenizer.ggml.bos_token_id", "str", "<s>"))
_gguf("eos beyond the vocabulary", lambda g: g.key("tokenizer.ggml.eos_token_id", "u32", 1 << 31))
_gguf("add_bos_token a number", lambda g: g.key("tokenizer.ggml.add_bos_token", "u32", 7))
CHAT_KINDS = (
    "a template that is a number",
    "a template that is no UTF-8",
    "template a number",
    "template file no UTF-8",
)
_gguf("a template that is a number", lambda g: g.key("tokenizer.chat_template", "u32", 7))
_gguf("a template that is no UTF-8", lambda g: g.key("tokenizer.chat_template", "str", b"{{ '\xff' }}"))

# -- safetensors -----------------------------------------------------------------------------------------------------------


def _header(breaks: Callable[[dict[str, Any]], object]) -> Callable[[Folder], None]:
    """A model.safetensors whose header has been changed, and its bytes not."""

    def kind(folder: Folder) -> None:
        data = safetensors_of(folder.tensors)
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        breaks(header)
        folder.files["model.safetensors"] = safetensors_bytes(header, data[8 + length :])

    return kind


def _bytes(breaks: Callable[[bytes], bytes]) -> Callable[[Folder], None]:
    return lambda folder: _set(folder.files, "model.safetensors", breaks(safetensors_of(folder.tensors)))


WEIGHT = "model.norm.weight"
_folder("safetensors empty", _bytes(lambda data: b""))
for percent in (10, 50, 99):
    _folder(f"safetensors cut at {percent} %", _bytes(lambda data, n=percent: data[: len(data) * n // 100]))
_folder("safetensors with bytes left", _bytes(lambda data: data + bytes(8)))
for length in (0, 1 << 20, 1 << 40, (1 << 64) - 1):
    _folder(f"safetensors header of {length}", _bytes(lambda data, n=length: struct.pack("<Q", n) + data[8:]))
_folder("safetensors header no JSON", _bytes(lambda data: data[:8] + b"[" + data[9:]))
_folder("safetensors header no UTF-8", _bytes(lambda data: data[:20] + b"\xff" + data[21:]))
_folder("safetensors header nested", lambda f: _set(f.files, "model.safetensors", safetensors_bytes(b'{"a":' * 90_000)))
_folder("safetensors header of lists", lambda f: _set(
    f.files, "model.safetensors", safetensors_bytes(b'{"a":[' + b"[]," * 2_000_000 + b"[]]}")
))  # fmt: skip
_folder("safetensors dtype unknown", _header(lambda h: h[WEIGHT].update(dtype="F7")))
_folder("safetensors dtype missing", _header(lambda h: h[WEIGHT].pop("dtype")))
_folder("safetensors dtype of another width", _header(lambda h: h[WEIGHT].update(dtype="F16")))
_folder("safetensors shape negative", _header(lambda h: h[WEIGHT].update(shape=[-64])))
_folder("safetensors shape whose product wraps", _header(lambda h: h[WEIGHT].update(shape=[1 << 62, 1 << 62, 64])))
_folder("safetensors shape a string", _header(lambda h: h[WEIGHT].update(shape="64")))
_folder("safetensors offsets reversed", _header(lambda h: h[WEIGHT]["data_offsets"].reverse()))
_folder(
    "safetensors offsets past the end", _header(lambda h: h[WEIGHT].update(data_offsets=[1 << 40, (1 << 40) + 256]))
)
_folder("safetensors offsets that overlap", _header(lambda h: h[WEIGHT].update(data_offsets=[0, 256])))
_folder("safetensors entry a list", _header(lambda h: h.update({WEIGHT: []})))
_folder("safetensors weight of integers", lambda f: f.tensors.update({WEIGHT: np.ones(64, np.int64)}))
_folder("safetensors weight missing", lambda f: f.tensors.pop("model.layers.1.mlp.up_proj.weight"))
_folder("safetensors weight of the wrong shape", lambda f: f.tensors.update({WEIGHT: np.ones(65, np.float32)}))
_folder("safetensors weight of no elements", lambda f: f.tensors.update({WEIGHT: np.ones(0, np.float32)}))
_folder(
    "safetensors weight that nothing uses", lambda f: f.tensors.update({"model.layers.7.mlp": np.ones(4, np.float32)})
)
_folder("index of a file that is not there", lambda f: _set(
    f.files, "model.safetensors.index.json", {"weight_map": {WEIGHT: "model.safetensors", "other": "model-00002.safetensors"}}
))  # fmt: skip
_folder("index that leads out of the folder", lambda f: _set(
    f.files, "model.safetensors.index.json", {"weight_map": {WEIGHT: "../../model.safetensors"}}
))  # fmt: skip
_folder("index without a map", lambda f: _set(f.files, "model.safetensors.index.json", {"weight_map": []}))
_folder("index of numbers", lambda f: _set(f.files, "model.safetensors.index.json", {"weight_map": {WEIGHT: 5}}))

# -- config.json -----------------------------------------------------------------------------------------------------------

_folder("config empty", lambda f: _set(f.files, "config.json", b""))
_folder("config no JSON", lambda f: _set(f.files, "config.json", b"{'model_type': 'llama'}"))
_folder("config no UTF-8", lambda f: _set(f.files, "config.json", b'{"model_type": "\xff"}'))
_folder("config a list", lambda f: _set(f.files, "config.json", []))
_folder("config nested", lambda f: _set(f.files, "config.json", b"[" * 1_000_000))
_folder("config of a million lists", lambda f: _set(f.files, "config.json", b'{"a":[' + b"[]," * 1_000_000 + b"[]]}"))
_folder(
    "config a number of a million digits", lambda f: _set(f.files, "config.json", b'{"a":' + b"9" * 1_000_000 + b"}")
)
_folder("config unknown model", lambda f: f.config(model_type="perceptron"))
_folder("config model a number", lambda f: f.config(model_type=5))
for key, numbers in {
    "hidden_size": (0, -64, 63, 2**63, 1e300, "64", None, [64], True),
    "num_hidden_layers": (0, -1, 3, 10**9, 2.5),
    "num_attention_heads": (0, 5, 2**40),
    "num_key_value_heads": (0, 3, -2),
    "intermediate_size": (0, 97, 2**62),
    "vocab_size": (0, 319, 2**40, "320"),
    "max_position_embeddings": (0, -1, 2**60),
    "rms_norm_eps": (0, -1e-5, "small", float("nan")),
    "rope_theta": (0, -1, "many", float("inf"), float("nan")),
    "hidden_act": ("perceptron", 5),
    "head_dim": (0, -16, 2**40, 17),
    "eos_token_id": ("</s>", -5, [2, "x"], {}),
}.items():
    for number in numbers:
        _folder(f"config {key} {number!r}", lambda f, k=key, n=number: f.config(**{k: n}))
for number in (
    5,
    "linear",
    {"rope_type": "perceptron"},
    {"rope_type": "linear"},
    {"rope_type": "linear", "factor": -1},
):
    _folder(f"config rope_scaling {number!r}", lambda f, n=number: f.config(rope_scaling=n))

# -- tokenizer.json --------------------------------------------------------------------------------------------------------

_folder("tokenizer missing", lambda f: f.files.pop("tokenizer.json"))
_folder("tokenizer empty", lambda f: _set(f.files, "tokenizer.json", b""))
_folder("tokenizer no JSON", lambda f: _set(f.files, "tokenizer.json", b"{"))
_folder("tokenizer no UTF-8", lambda f: _set(f.files, "tokenizer.json", b'{"version": "\xff"}'))
_folder("tokenizer nested", lambda f: _set(f.files, "tokenizer.json", b'{"a":' * 200_000))
_folder("tokenizer a list", lambda f: _set(f.files, "tokenizer.json", []))
_folder("tokenizer without a model", lambda f: f.files["tokenizer.json"].pop("model"))
_folder("tokenizer unknown model", lambda f: f.files["tokenizer.json"]["model"].update(type="Abacus"))
_folder("tokenizer ids negative", lambda f: f.files["tokenizer.json"]["model"]["vocab"].update(x=-1))
_folder("tokenizer ids of 2^40", lambda f: f.files["tokenizer.json"]["model"]["vocab"].update(x=1 << 40))
_folder("tokenizer ids beyond the embeddings", lambda f: f.files["tokenizer.json"]["model"]["vocab"].update(h=5000))
_folder("tokenizer merges unknown", lambda f: f.files["tokenizer.json"]["model"].update(merges=[["qqqq", "zzzz"]]))
_folder("tokenizer merges numbers", lambda f: f.files["tokenizer.json"]["model"].update(merges=[1, 2]))
_folder("tokenizer decoder unknown", lambda f: f.files["tokenizer.json"].update(decoder={"type": "Abacus"}))
_folder(
    "tokenizer template of unknown tokens",
    lambda f: f.files["tokenizer.json"]["post_processor"].update(special_tokens={}),
)
_folder("tokenizer pattern no regex", lambda f: f.files["tokenizer.json"].update(
    pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
))  # fmt: skip
_folder("tokenizer settings no JSON", lambda f: _set(f.files, "tokenizer_config.json", b"nothing"))
_folder("tokenizer settings bos a list", lambda f: f.files["tokenizer_config.json"].update(bos_token=["<s>"]))
_folder("template a number", lambda f: f.files["tokenizer_config.json"].update(chat_template=5))
_folder("template file no UTF-8", lambda f: _set(f.files, "chat_template.jinja", b"{{ '\xff' }}"))
