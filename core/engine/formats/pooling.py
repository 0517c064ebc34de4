"""How a model's files would have a text embedded: sentence-transformers' modules.json, or GGUF's pooling_type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.errors import FormatError
from engine.formats.jsonfile import is_plain_name, read_list, read_object

Pooling = Literal["last", "mean", "cls"]
"""The hidden state of the last token, the mean of all, or that of the first."""
_MODES: Mapping[str, Pooling] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_SWITCHES: Mapping[str, Pooling] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
_GGUF: Mapping[int, Pooling] = {0: "last", 1: "mean", 2: "cls", 3: "last"}
"""0 is none: the file leaves it open."""


@dataclass(frozen=True)
class Embedding:
    """What an embedding is where a request does not say; that of a causal decoder of whose files none says anything."""

    pooling: Pooling = "last"
    normalize: bool = True


def of_folder(folder: Path) -> Embedding:
    """By modules.json, if there is one. FormatError where it asks for what is not there."""
    path = folder / "modules.json"
    if not path.is_file():
        return Embedding()
    pooling: Pooling = "last"
    normalize = False
    for module in read_list(path):
        kind = module.get("type") if isinstance(module, dict) else None
        name = kind.rpartition(".")[2] if isinstance(kind, str) else None
        if name == "Pooling":
            pooling = _pooling(folder / _inner(path, module.get("path")) / "config.json")
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            raise FormatError(
                f"{path} has the module {kind!r}; embeddings are made of Transformer, Pooling and Normalize alone."
            )
    return Embedding(pooling, normalize)


def of_gguf(architecture: str, metadata: Mapping[str, Any]) -> Embedding:
    """By the key pooling_type. FormatError where it asks for what is not there."""
    key = f"{architecture}.pooling_type"
    value = metadata.get(key, 0)
    if not isinstance(value, int) or value not in _GGUF:
        raise FormatError(f"The metadata's {key} is {value}; embeddings know 0 (open), 1 (mean), 2 (cls) and 3 (last).")
    return Embedding(_GGUF[value])


def _inner(path: Path, name: Any) -> str:
    """A module's folder, which must not lead out of the model's."""
    if not is_plain_name(name):
        raise FormatError(f"{path} names {name!r}, which is not a plain name of a folder.")
    return name


def _pooling(path: Path) -> Pooling:
    settings = read_object(path)
    mode = settings.get("pooling_mode")
    modes = mode if isinstance(mode, list) else [] if mode is None else [mode]
    on = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True]
    found = [_MODES.get(one) if isinstance(one, str) else None for one in modes] or [_SWITCHES.get(name) for name in on]
    if len(found) != 1 or found[0] is None:
        asked = ", ".join(map(str, modes or on)) or "nothing"
        raise FormatError(f"{path} pools by {asked}; embeddings know one of {', '.join(_MODES)}.")
    return found[0]
