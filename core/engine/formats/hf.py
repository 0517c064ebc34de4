"""Hugging Face folders: config.json, safetensors (one file, or shards with an index), generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from engine.errors import FormatError
from engine.formats import pooling, ranking_files, recommended, tokenizer_hf
from engine.formats.checkpoint import Checkpoint, Tensor
from engine.formats.jsonfile import is_plain_name, read_object
from engine.formats.language_model import text_config, text_tensors
from engine.formats.mlx_layout import undone
from engine.formats.quantized import compose
from engine.formats.safetensors import read_safetensors

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MODELOPT = "hf_quant_config.json"  # of NVIDIA's Model Optimizer, whose first folders say nothing in config.json


def open_folder(folder: Path) -> Checkpoint:
    """Opens a folder with config.json and safetensors; FormatError if something is missing or damaged."""
    config_path = folder / "config.json"
    if (folder / "adapter_config.json").is_file() and not any((folder / name).is_file() for name in (_SINGLE, _INDEX)):
        raise FormatError(
            f"{folder} holds an adapter and no model; merge it into its base model, and give that folder."
        )
    if not config_path.is_file():
        raise FormatError(
            f"{folder} has no config.json; give a GGUF file or a folder with config.json and safetensors."
        )
    config = read_object(config_path)
    text = text_config(config)
    config = config if text is None else text
    architecture = config.get("model_type")
    if not isinstance(architecture, str) or not architecture:
        raise FormatError(f"{config_path} must name the architecture as a string in model_type.")
    path = folder / "generation_config.json"
    generation = read_object(path) if path.is_file() else {}
    ends = _eos_ids(folder, config, generation)
    if "quantization_config" not in config and (folder / _MODELOPT).is_file():
        config = {**config, "quantization_config": {"quant_method": "modelopt"}}
    tensors = _read_tensors(folder)
    if text is not None:
        tensors = text_tensors(tensors, folder)
    return Checkpoint(
        path=folder,
        kind="hf",
        architecture=architecture,
        metadata=config,
        tensors=compose(config, undone(architecture, tensors, folder), config_path),
        eos_ids=ends,
        sampling=recommended.of_generation_config(generation),
        load_tokenizer=partial(tokenizer_hf.build_tokenizer, folder, config, ends),
        load_chat_template=partial(tokenizer_hf.chat_template, folder),
        load_embedding=partial(pooling.of_folder, folder),
        load_ranking=partial(ranking_files.of_folder, folder, config),
    )


def _eos_ids(folder: Path, config: Mapping[str, Any], generation: Mapping[str, Any]) -> frozenset[int]:
    ends: set[int] = set()
    for where in (config, generation):
        value = where.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise FormatError(f"eos_token_id in {folder} must be a token id or a list of them.")
        ends.update(ids)
    return frozenset(ends)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    places = _places(folder / _INDEX) if (folder / _INDEX).is_file() else {}
    shards = list(dict.fromkeys(places.values()))
    # Saving one file, transformers deletes a folder's earlier shards and leaves their index.
    left = _SINGLE not in shards and not all((folder / shard).is_file() for shard in shards)
    if (folder / _SINGLE).is_file() and (left or not shards):
        return read_safetensors(folder / _SINGLE)
    if shards:
        return _read_shards(folder, shards, places)
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise FormatError(f"{folder} holds PyTorch pickles only, which are never loaded; convert it to safetensors.")
    raise FormatError(f"{folder} has neither {_SINGLE} nor {_INDEX}.")


def _places(index: Path) -> dict[str, str]:
    """Tensors to the names of their files."""
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise FormatError(f"{index} must map tensors to files in weight_map.")
    return {tensor: _plain_name(index, place) for tensor, place in places.items()}


def _read_shards(folder: Path, shards: list[str], places: Mapping[str, str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name in shards:
        if not (folder / name).is_file():
            raise FormatError(f"{folder / name} is missing, though {_INDEX} lists it.")
        shard = read_safetensors(folder / name)
        if twice := next((tensor for tensor in shard if tensor in tensors), None):
            raise FormatError(f"{folder / name} holds the tensor {twice!r} that an earlier file holds too.")
        if absent := next((tensor for tensor, place in places.items() if place == name and tensor not in shard), None):
            raise FormatError(f"{folder / name} lacks the tensor {absent!r} that {_INDEX} places there.")
        tensors |= shard
    return tensors


def _plain_name(index: Path, name: Any) -> str:
    """A shard's file name, which must not lead out of the folder."""
    if not is_plain_name(name) or not name.endswith(".safetensors"):
        raise FormatError(f"{index} names {name!r}, which is not a plain name of a safetensors file.")
    return name
