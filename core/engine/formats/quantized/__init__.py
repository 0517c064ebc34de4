"""Hugging Face checkpoints with quantized weights. Several stored tensors make one: codes, scales, zero points.

Each method has a module with ``compose(settings, parts)``, which takes the stored tensors out of ``parts`` and puts the
weights that they make in their place, under the names that unquantized checkpoints give them.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from engine.errors import FormatError
from engine.formats.checkpoint import Tensor
from engine.formats.quantized import mlx
from engine.formats.quantized.parts import Parts

# quant_method in config.json -> the module here
_METHODS: Mapping[str, str] = {
    "gptq": "gptq",
    "awq": "awq",
    "compressed-tensors": "compressed",
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "bitsandbytes": "bitsandbytes",
    "mxfp4": "mxfp4",
    "modelopt": "modelopt",
    "auto-round": "autoround",
    "intel/auto-round": "autoround",
}
# Formats that are no weights by themselves, and the ends of names under which they would be.
_CODES = ("U8", "I8", "I32", "U32", "F8_E4M3")
_ENDINGS = (".weight", ".qweight", ".weight_packed", "_blocks", "_proj")


def compose(config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: Path) -> dict[str, Tensor]:
    """The checkpoint's tensors with its quantized weights composed, as config.json's quantization_config says.

    FormatError names the methods there are when this one is missing, and what is wrong with a damaged weight.
    """
    parts = Parts(dict(tensors))
    settings = config.get("quantization_config")
    if mlx.describes(own := config.get("quantization", settings)):
        mlx.compose(own, parts)
    elif settings is not None:
        _compose(settings, parts, where)
    for name, tensor in parts.tensors.items():
        if tensor.format.name in _CODES and name.endswith(_ENDINGS):
            raise FormatError(
                f"{name} is stored as {tensor.format.name}, and {where} describes no quantization that gives it a scale."
            )
    return parts.tensors


def _compose(settings: Any, parts: Parts, where: Path) -> None:
    if not isinstance(settings, dict):
        raise FormatError(f"quantization_config in {where} must be an object.")
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise FormatError(
            f"{where} names the quantization method {method!r}; supported are {', '.join(_METHODS)}, and GGUF files."
        )
    parts.drop_cache_scales()
    import_module(f".{_METHODS[method]}", __package__).compose(settings, parts)
