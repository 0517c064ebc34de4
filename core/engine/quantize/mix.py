"""Which format each tensor of a GGUF gets for a type such as Q4_K_M: most have the type's own, those where errors cost most
have more bits. The choices are those that llama.cpp makes for its types of the same names (src/llama-quant.cpp)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from engine.errors import UsageError
from engine.formats import FORMATS


@dataclass(frozen=True)
class QuantType:
    """``format`` of most tensors; ``file_type``: the number in general.file_type."""

    name: str
    format: str
    file_type: int


TYPES: Mapping[str, QuantType] = MappingProxyType(
    {
        name: QuantType(name, form, number)
        for name, form, number in (
            ("F32", "F32", 0),
            ("F16", "F16", 1),
            ("BF16", "BF16", 32),
            ("Q8_0", "Q8_0", 7),
            ("Q6_K", "Q6_K", 18),
            ("Q5_K_M", "Q5_K", 17),
            ("Q5_K_S", "Q5_K", 16),
            ("Q5_1", "Q5_1", 9),
            ("Q5_0", "Q5_0", 8),
            ("Q4_K_M", "Q4_K", 15),
            ("Q4_K_S", "Q4_K", 14),
            ("Q4_1", "Q4_1", 3),
            ("Q4_0", "Q4_0", 2),
            ("IQ4_NL", "IQ4_NL", 25),
            ("IQ4_XS", "IQ4_XS", 30),
            ("MXFP4", "MXFP4", 38),
            ("Q3_K_L", "Q3_K", 13),
            ("Q3_K_M", "Q3_K", 12),
            ("Q3_K_S", "Q3_K", 11),
            ("Q2_K", "Q2_K", 10),
            ("Q2_K_S", "Q2_K", 21),
        )
    }
)
_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "MXFP4_MOE": "MXFP4"}
_SMALLER = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
"""Formats in blocks of 32, at least as exact, for rows that are no whole number of superblocks."""
_LAYER = re.compile(r"blk\.(\d+)\.")
_KEPT = (
    "_norm.weight",
    "ffn_gate_inp.weight",
    "position_embd.weight",
    "token_types.weight",
    "ssm_conv1d.weight",
    "shortconv.conv.weight",
    "per_layer_model_proj.weight",
)
VALUES = (".attn_v.weight", ".attn_qkv.weight", ".attn_kv_b.weight")
"""Ends of the names of value projections, and of matrices that have them."""


def quant_type(name: str) -> QuantType:
    """The type of a name, in any case; UsageError that lists them if there is none."""
    found = TYPES.get(_ALIASES.get(name.upper(), name.upper()))
    if found is None:
        raise UsageError(f"There is no type {name!r}; the types are: {', '.join(TYPES)}, NF4, INT8.")
    return found


@dataclass(frozen=True)
class Model:
    """What the choice depends on besides the tensor. ``shared``: query heads a KV head; ``tied``: the embedding table is the
    output projection, too; ``importance``: whether an importance matrix is used; ``values``, ``downs``: the layers with a value
    projection, and with a feed-forward's second one, where not all have them."""

    architecture: str
    layers: int
    shared: int = 1
    experts: int = 0
    tied: bool = False
    importance: bool = False
    values: tuple[int, ...] = ()
    downs: tuple[int, ...] = ()

    def value(self, layer: int) -> tuple[int, int]:
        """Which value projection the layer's is, and of how many."""
        return (self.values.index(layer), len(self.values)) if self.values else (layer, self.layers)

    def down(self, layer: int) -> int:
        """Which of the second projections the layer's is: llama-quantize goes by the layer where there are experts."""
        return layer if self.experts > 1 or layer not in self.downs else self.downs.index(layer)


def quantizable(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a matrix that may lose precision: no norm, bias, router or table of positions."""
    return prod(shape[:-1]) > 1 and name.endswith("weight") and not name.endswith(_KEPT)


def choose(kind: QuantType, name: str, shape: tuple[int, ...], model: Model) -> str:
    """The format of a quantizable tensor, before ``fitting`` has looked at its rows."""
    if kind.format in ("F32", "F16", "BF16"):
        return kind.format
    if name == "output.weight" or (model.tied and name.endswith("token_embd.weight")):
        exact = kind.name == "MXFP4" or kind.format == "Q8_0" or model.architecture == "falcon"
        return "Q8_0" if exact or shape[-1] % FORMATS[kind.format].block else "Q6_K"
    if kind.name == "MXFP4":
        return "MXFP4" if len(shape) > 2 else "Q8_0"
    found = _LAYER.match(name)
    if found is None:
        return kind.format
    layer = int(found[1])
    if name.endswith(VALUES):
        return _value(kind, *model.value(layer), model)
    if ".attn_k." in name:
        return "Q8_0" if model.experts == 8 else kind.format
    if ".ffn_down" in name:
        return _down(kind, model.down(layer), model)
    if ".attn_output." in name:
        return _output(kind, model)
    return kind.format


def fitting(form: str, cols: int) -> str:
    """The format, or where rows of ``cols`` are not whole blocks of it one with smaller blocks, in the end F16."""
    if cols % FORMATS[form].block:
        form = _SMALLER.get(form, form)
    return form if cols % FORMATS[form].block == 0 else "F16"


def _more_bits(layer: int, layers: int) -> bool:
    """The first and the last eighth of the layers, and every third between."""
    first = layers // 8
    return layer < first or layer >= 7 * layers // 8 or (layer - first) % 3 == 2


def _value(kind: QuantType, layer: int, layers: int, model: Model) -> str:
    """Value projections: small where query heads share them, and every error reaches the output."""
    if model.experts == 8:
        return "Q8_0"
    many = model.shared >= 4
    found = {
        "Q2_K": "Q4_K" if many else "Q3_K",
        "Q2_K_S": "Q4_K" if many else "Q2_K",
        "Q3_K_M": "Q5_K" if layer < 2 else "Q4_K",
        "Q3_K_L": "Q5_K",
        "IQ4_NL": "Q5_K" if many else "IQ4_NL",
        "IQ4_XS": "Q5_K" if many else "IQ4_XS",
        "Q4_K_S": "Q5_K" if layer < 4 else "Q4_K",
        "Q4_K_M": "Q6_K" if _more_bits(layer, layers) else "Q4_K",
        "Q5_K_M": "Q6_K" if _more_bits(layer, layers) else "Q5_K",
    }.get(kind.name, kind.format)
    # 80 layers with shared KV heads: these matrices are an eighth of the query's, and cost little
    large = model.architecture == "llama" and model.layers == 80 and model.shared > 1
    return "Q5_K" if large and found in ("Q3_K", "Q4_K") else found


def _down(kind: QuantType, layer: int, model: Model) -> str:
    """The feed-forward's second projection, of dense layers and of experts."""
    falcon, first = model.architecture == "falcon", layer < model.layers // 8
    more = _more_bits(layer, model.layers)
    if kind.name == "Q3_K_M":
        return "Q5_K" if layer < model.layers // 16 else "Q3_K" if falcon and not more else "Q4_K"
    if kind.name == "Q4_K_M" and falcon:
        return "Q6_K" if layer < model.layers // 16 else "Q5_K" if more else "Q4_K"
    return {
        "Q2_K": "Q3_K",
        "Q2_K_S": "Q4_K" if first else "Q2_K",
        "Q3_K_L": "Q4_K" if falcon else "Q5_K",
        "Q4_K_M": "Q6_K" if more else "Q4_K",
        "Q5_K_M": "Q6_K" if more else "Q5_K",
        "Q4_K_S": "Q5_K" if first and not falcon else "Q4_K",
        "IQ4_NL": "Q5_K" if first and not model.importance else "IQ4_NL",
        "IQ4_XS": "Q5_K" if first and not model.importance else "IQ4_XS",
        "Q4_0": "Q4_1" if first and model.importance else "Q4_0",
        "Q5_0": "Q5_1" if first and model.importance else "Q5_0",
    }.get(kind.name, kind.format)


def _output(kind: QuantType, model: Model) -> str:
    """The attention's output projection."""
    if model.architecture == "falcon":
        return "Q4_K" if kind.name == "Q3_K_L" else kind.format
    if model.experts == 8:
        more = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ4_NL", "IQ4_XS")
        return "Q5_K" if kind.name in more else kind.format
    return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(kind.name, kind.format)


def layers_with(names: Iterable[str], ends: str | tuple[str, ...]) -> tuple[int, ...]:
    """Of tensors, those whose names end so, in order."""
    found = {int(match[1]) for name in names if name.endswith(ends) and (match := _LAYER.match(name))}
    return tuple(sorted(found))
