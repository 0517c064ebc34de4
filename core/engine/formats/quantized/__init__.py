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
from engine.formats.quantized.parts import Parts

# quant_method in config.json -> the module here
_METHODS: Mapping[str, str] = {}


def compose(config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: Path) -> dict[str, Tensor]:
    """The checkpoint's tensors with its quantized weights composed, as config.json's quantization_config says.

    FormatError names the methods there are when this one is missing, and what is wrong with a damaged weight.
    """
    settings = config.get("quantization_config")
    parts = Parts(dict(tensors))
    if settings is None:
        return parts.tensors
    if not isinstance(settings, dict):
        raise FormatError(f"quantization_config in {where} must be an object.")
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise FormatError(
            f"{where} names the quantization method {method!r}; supported are {', '.join(_METHODS)}, and GGUF files."
        )
    import_module(f".{_METHODS[method]}", __package__).compose(settings, parts)
    return parts.tensors
