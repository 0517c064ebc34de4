"""Each op's call as the arguments of its native kernel, whose files define their order and numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from .compile import ABSENT, Lowering
from .layouts import KV_DTYPE_NUMBERS
from .weights import SPANS

ACTIVATION_NUMBERS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "clamped_swiglu": 4, "sigmoid": 5, "identity": 6}
ROWS_DIM = {"T": 0, "R": 2}
PROCESSED_BY = (
    "logits", "rows", "positions", "token_seq", "seq_slots", "prompt_lengths", "temperature", "top_k", "top_p", "min_p",
    "repetition_penalty", "frequency_penalty", "presence_penalty", "bias_offsets", "bias_ids", "bias_values",
    "mask_rows", "masks", "typical_p", "no_repeat_ngram_size", "candidates",
)  # fmt: skip
DRAWN_BY = (
    "logits", "rows", "positions", "token_seq", "seq_slots", "temperature", "seeds", "branches",
    "want_logprobs", "candidates", "targets",
)  # fmt: skip
KV_STATES = ("k", "v", "k_scale", "v_scale")


def _rows_dim(low: Lowering, name: str) -> int:
    return ROWS_DIM[str(low.bound.call.inputs[name].shape[0])[0]]


def _width(low: Lowering, name: str) -> int:
    return int(low.bound.call.inputs[name].shape[-1])


def _choices(low: Lowering, name: str) -> int:
    """Rows a token: k where the leading dimension is ``T*k``."""
    return int(str(low.bound.call.inputs[name].shape[0]).partition("*")[2] or 1)


def _weight(low: Lowering, name: str) -> Any:
    return low.bound.weights[name].handle


def _kv_dtype(low: Lowering) -> str:
    array = low.states[low.bound.call.states["k"]]
    names = {
        np.dtype(np.float32): "f32",
        np.dtype(np.float16): "f16",
        np.dtype(np.uint16): "bf16",
        np.dtype(np.int8): "int8",
        np.dtype(np.int16): "int16",
    }
    return names[array.dtype]


def _kv_states(low: Lowering) -> list[str]:
    return [name for name in KV_STATES if name in low.bound.call.states]


def _block_size(low: Lowering) -> int:
    k = low.states[low.bound.call.states["k"]]
    return int(k.shape[2] * k.shape[4])


def step_expand(low: Lowering) -> None:
    names = ("token_ids", "seq_slots", "seq_starts", "query_offsets", "history_copies")
    inputs = low.inputs(*names, "fill_slots", "fill_positions", "fill_ids") + low.family("page_table")
    sizes = low.bound.call.attr("block_sizes")
    numbers = {f"block_size.{g}": size for g, size in enumerate(sizes)}
    low.emit("step_expand", inputs, states=["history"], max_len=low.limits.max_context, groups=len(sizes), **numbers)


def kv_copy(low: Lowering) -> None:
    names = list(low.bound.call.states)
    arrays = [low.states[low.bound.call.states[name]] for name in names]
    sizes = {f"block_bytes.{n}": array.nbytes // array.shape[0] for n, array in enumerate(arrays)}
    low.emit("kv_copy", low.inputs("block_copies"), states=names, **sizes)


def kv_write(low: Lowering) -> None:
    call = low.bound.call
    numbers = {name: call.attr(name) for name in ("kv_heads", "head_dim", "latent")}
    numbers["block_size"] = _block_size(low)
    inputs = low.inputs("new_k", "new_v", "kv_slots")
    low.emit("kv_write", inputs, states=_kv_states(low), kv_dtype=KV_DTYPE_NUMBERS[_kv_dtype(low)], **numbers)


def rope_kv_write(low: Lowering) -> None:
    call = low.bound.call
    names = ("heads", "kv_heads", "head_dim", "interleaved", "scale", "eps", "weight_offset")
    numbers = {name: call.attr(name) for name in names} | {"block_size": _block_size(low)}
    numbers["rotary_dim"] = call.attr("rotary_dim") or call.attr("head_dim")
    numbers["kv_dtype"] = KV_DTYPE_NUMBERS[_kv_dtype(low)]
    inputs = low.inputs("q", "new_k", "new_v", "positions", "kv_slots")
    weights = [_weight(low, name) for name in ("inv_freq", "q_norm", "k_norm") if name in call.weights]
    low.emit("rope_kv_write", inputs, weights, states=_kv_states(low), **numbers)


def attention(low: Lowering) -> None:
    names = ("heads", "kv_heads", "head_dim", "scale", "block_size", "window", "softcap", "v_head_dim", "causal")
    numbers = {name: low.bound.call.attr(name) for name in names}
    numbers["latent"] = "v" not in low.bound.call.states
    inputs = low.inputs("q", "seq_starts", "query_offsets", "page_table")
    sinks = [_weight(low, "sinks")] if "sinks" in low.bound.weights else []
    low.emit("attention", inputs, sinks, states=_kv_states(low), kv_dtype=KV_DTYPE_NUMBERS[_kv_dtype(low)], **numbers)


def embed(low: Lowering) -> None:
    low.emit("embed", low.inputs("ids"), [_weight(low, "weight")], scale=low.bound.call.attr("scale"))


def quantize(low: Lowering) -> None:
    choices = _choices(low, "x")
    numbers = {"width": _width(low, "x"), "choices": choices, "scale": low.bound.call.attr("scale")}
    layout = low.bound.call.attr("layout")
    kernel = "quantize_bf16" if layout == "bf16" else "quantize"
    low.emit(kernel, low.inputs("x"), rows_dim=_rows_dim(low, "x"), **numbers | _span(layout))


def gather_columns(low: Lowering) -> None:
    low.emit(
        "gather_columns",
        low.inputs("x"),
        [_weight(low, "columns")],
        width=_width(low, "x"),
        rows_dim=_rows_dim(low, "x"),
    )


def _span(layout: str) -> dict[str, int]:
    """The number that tells a kernel how to pack its rows; none where it does not, or as bf16."""
    return {"span": SPANS[layout]} if layout in SPANS else {}


def _activation(low: Lowering) -> list[int]:
    """The places of a packed and of a plain x, one of them absent."""
    [x] = low.inputs("x")
    return [x, ABSENT] if low.bound.call.inputs["x"].dtype in SPANS else [ABSENT, x]


def _matrices(low: Lowering) -> tuple[list[Any], int]:
    """The weights of a linear or of several on one input, then the biases of those that have one; and 2^i for each of these."""
    names = sorted((n for n in low.bound.weights if n.startswith("weight")), key=_member)
    biases = [name.replace("weight", "bias") for name in names]
    biased = [n for n, name in enumerate(biases) if name in low.bound.weights]
    return [_weight(low, n) for n in (*names, *(biases[n] for n in biased))], sum(1 << n for n in biased)


def linear(low: Lowering) -> None:
    weights, biased = _matrices(low)
    inputs, more = [*_activation(low), *low.inputs("residual")], []
    drawing = low.drawing
    if drawing is not None and drawing.head is not None and low.bound.call.outputs[0].id == drawing.logits:
        inputs += drawing.head.conditions
        more = [drawing.head.best, drawing.head.greedy]
    low.emit("linear", inputs, weights, more_outputs=more, rows_dim=_rows_dim(low, "x"), bias=biased)


def _member(name: str) -> int:
    return int(name.partition(".")[2] or 0)


def causal_conv(low: Lowering) -> None:
    columns, width = low.bound.call.weights["weight"].shape
    inputs = low.inputs("x", "seq_starts", "query_offsets", "page_table")
    numbers = {"columns": columns, "width": width, "block_size": low.bound.call.attr("block_size")}
    numbers["silu"] = low.bound.call.attr("act") == "silu"
    vectors = [_weight(low, name) for name in ("weight", "bias") if name in low.bound.weights]
    low.emit("causal_conv", inputs, vectors, states=["tail"], **numbers)


def gated_delta(low: Lowering) -> None:
    names = ("key_heads", "value_heads", "key_dim", "value_dim", "block_size")
    numbers = {name: low.bound.call.attr(name) for name in names}
    inputs = low.inputs("qkv", "decay", "beta", "seq_starts", "query_offsets", "page_table")
    low.emit("gated_delta", inputs, [_weight(low, "rate"), _weight(low, "bias")], states=["memory"], **numbers)


def ssm_scan(low: Lowering) -> None:
    numbers = {name: low.bound.call.attr(name) for name in ("heads", "groups", "state_dim", "head_dim", "block_size")}
    inputs = low.inputs("xbc", "dt", "seq_starts", "query_offsets", "page_table")
    vectors = [_weight(low, name) for name in ("rate", "bias", "skip")]
    low.emit("ssm_scan", inputs, vectors, states=["memory"], **numbers)


def rms_norm(low: Lowering) -> None:
    call = low.bound.call
    numbers = {"eps": call.attr("eps"), "weight_offset": call.attr("weight_offset"), "width": _width(low, "x")}
    numbers |= _span(call.attr("packed")) | ({"head_dim": call.attr("head_dim")} if call.attr("wide_weight") else {})
    low.emit("rms_norm", low.inputs("x"), [_weight(low, "weight")], rows_dim=_rows_dim(low, "x"), **numbers)


def layer_norm(low: Lowering) -> None:
    vectors = [_weight(low, name) for name in ("weight", "bias") if name in low.bound.weights]
    numbers = {name: low.bound.call.attr(name) for name in ("eps", "head_dim")} | _span(low.bound.call.attr("packed"))
    low.emit("layer_norm", low.inputs("x"), vectors, rows_dim=_rows_dim(low, "x"), **numbers)


def add_rms_norm(low: Lowering) -> None:
    call = low.bound.call
    numbers = {"eps": call.attr("eps"), "weight_offset": call.attr("weight_offset")} | _span(call.attr("packed"))
    low.emit(
        "add_rms_norm", low.inputs("x", "residual"), [_weight(low, "weight")], rows_dim=_rows_dim(low, "x"), **numbers
    )


def rope(low: Lowering) -> None:
    call = low.bound.call
    numbers = {name: call.attr(name) for name in ("heads", "head_dim", "interleaved", "scale")}
    numbers["rotary_dim"] = call.attr("rotary_dim") or call.attr("head_dim")
    low.emit("rope", low.inputs("x", "positions"), [_weight(low, "inv_freq")], **numbers)


def gated_act(low: Lowering) -> None:
    kind = ACTIVATION_NUMBERS[low.bound.call.attr("kind")]
    numbers = {name: low.bound.call.attr(name) for name in ("alpha", "limit")}
    numbers |= {"kind": kind, "rows_dim": _rows_dim(low, "gate")} | _span(low.bound.call.attr("packed"))
    products = low.gated.get(low.bound.call.outputs[-1].id)
    if products is not None:
        given = low.of(products)
        return low.emit("gated_linear", _activation(given), _matrices(given)[0], **numbers)
    numbers |= {"width": _width(low, "gate"), "choices": _choices(low, "gate")}
    low.emit("gated_act", low.inputs("gate", "up"), **numbers)


def scale_softcap(low: Lowering) -> None:
    numbers = {name: low.bound.call.attr(name) for name in ("scale", "softcap")}
    low.emit("scale_softcap", low.inputs("x"), width=_width(low, "x"), rows_dim=_rows_dim(low, "x"), **numbers)


def add(low: Lowering) -> None:
    low.emit("add", low.inputs("a", "b"), width=_width(low, "a"), rows_dim=_rows_dim(low, "a"))


def gather_rows(low: Lowering) -> None:
    low.emit("gather_rows", low.inputs("x", "rows"), width=_width(low, "x"))


def head_linear(low: Lowering) -> None:
    low.emit("head_linear", low.inputs("x"), [_weight(low, "weight")])


def concat_heads(low: Lowering) -> None:
    heads = low.bound.call.attr("heads")
    low.emit(
        "concat_heads", low.inputs("a", "b"), heads=heads, a=_width(low, "a") // heads, b=_width(low, "b") // heads
    )


def moe_route(low: Lowering) -> None:
    call = low.bound.call
    names = ("k", "renormalize", "scale", "groups", "groups_kept", "group_best")
    numbers = {name: call.attr(name) for name in names} | {"experts": _width(low, "logits")}
    given = [name for name in ("correction_bias", "expert_scale") if name in low.bound.weights]
    numbers |= {"bias": "correction_bias" in given, "scaled": "expert_scale" in given}
    weights = [_weight(low, name) for name in given]
    low.emit(
        "moe_route", low.inputs("logits"), weights, score={"softmax": 0, "sigmoid": 1}[call.attr("score")], **numbers
    )


def moe_linear(low: Lowering) -> None:
    weights, biased = _matrices(low)
    choices = int(low.bound.call.inputs["ids"].shape[1])
    inputs = [*_activation(low), *low.inputs("ids")]
    low.emit("moe_linear", inputs, weights, k=choices, per_choice=low.bound.call.attr("per_choice"), bias=biased)


def moe_combine(low: Lowering) -> None:
    choices = int(low.bound.call.inputs["weights"].shape[1])
    low.emit("moe_combine", [*low.inputs("y", "weights"), ABSENT], k=choices, width=_width(low, "y"))


def process_logits(low: Lowering) -> None:
    if low.drawing is not None and low.bound.call is low.drawing.processing:
        return  # sample's kernel does it
    _emit_of_rows(low, "process_logits", low.inputs(*PROCESSED_BY))


def sample(low: Lowering) -> None:
    drawing = low.drawing
    if drawing is None or low.bound.call is not drawing.sampling:
        return _emit_of_rows(low, "sample", low.inputs("processed", *DRAWN_BY))
    inputs = low.inputs_of(drawing.processing, *PROCESSED_BY) + low.inputs(*DRAWN_BY)
    inputs += [drawing.head.best, drawing.head.greedy] if drawing.head else [ABSENT, ABSENT]
    _emit_of_rows(low, "process_and_sample", inputs)


def _emit_of_rows(low: Lowering, kernel: str, inputs: list[int]) -> None:
    low.emit(kernel, inputs, states=["history"], width=_width(low, "logits"), max_len=low.limits.max_context)
