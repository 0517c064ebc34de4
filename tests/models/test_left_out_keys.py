"""A config.json that leaves keys out says what transformers takes it to say."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from handmade import safetensors_bytes

from engine.errors import ModelError
from engine.formats import Checkpoint, open_checkpoint
from engine.models import FAMILIES, load_model
from engine.models.rope import Rope

CONFIGS = pytest.importorskip("transformers").CONFIG_MAPPING

WINDOWS: dict[str, Any] = {"use_sliding_window": True, "max_window_layers": 3}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
# Beside the defaults of a family's class, what makes its other keys show.
ALSO: dict[str, list[dict[str, Any]]] = {
    "qwen2": [WINDOWS],
    "qwen3": [WINDOWS],
    "qwen2_moe": [WINDOWS],
    "qwen3_moe": [WINDOWS],
    "gemma2": [{"head_dim": 128}],
    "phi3": [{"rope_parameters": LONG, "max_position_embeddings": 131072}],
    "gpt_neox": [{"rope_parameters": {"rope_type": "linear", "factor": 2.0}}],
}
USUAL = {"deepseek_v2": {"num_experts_per_tok": 6}}
TOLD_BY_TENSORS = {"mlp", "kv_heads", "head_dim", "experts", "q_rank", "shared", "may_tie"}
"""What no tensor fits that is not as it says."""
EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts"}
"""Keys without which tensors are left over."""
# Published files of Gemma 4 have global_head_dim in its place.
OF_OLD = {("qwen2_moe", "layer_types"), ("gemma4_text", "per_layer_config")}
NAMES = [name for family in FAMILIES for name in family.hf if name != "kimi_k2"]
"""Kimi K2's configuration is not one of transformers."""
CASES = [(name, also) for name in NAMES for also in ({}, *ALSO.get(name, []))]


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("empty")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(safetensors_bytes({}))
    return open_checkpoint(folder)


def read(checkpoint: Checkpoint, name: str, data: dict[str, Any]) -> dict[str, Any]:
    config = load_model(replace(checkpoint, architecture=name, metadata=data)).config
    return {key: plain(value) for key, value in vars(config).items() if key not in TOLD_BY_TENSORS}


def plain(value: Any) -> Any:
    if isinstance(value, Rope):
        return [value.interleaved, value.scale, *value.inv_freq.tolist()]
    return value


def filled_in(name: str, data: dict[str, Any]) -> dict[str, Any]:
    """All keys, as transformers understands some of them, and as a file has them: the names of members are texts."""
    found: dict[str, Any] = json.loads(json.dumps(CONFIGS[name].from_dict(deepcopy(data)).to_dict()))
    return found


@pytest.mark.parametrize(
    ("name", "also"), CASES, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_a_key_that_is_left_out(name: str, also: dict[str, Any], empty: Checkpoint) -> None:
    data = filled_in(name, USUAL.get(name, {}) | also)
    for key in data:
        if (name, key) in OF_OLD or key in EXPERTS | set(USUAL.get(name, {})):
            continue
        less = {other: value for other, value in data.items() if other != key}
        try:
            got = read(empty, name, less)
        except ModelError:
            continue  # a refusal misleads nobody
        want = read(empty, name, filled_in(name, less))
        assert got == want, key


@pytest.mark.parametrize("name", ["mixtral", "cohere", "gpt_oss", "gpt_neox", "qwen3"])
def test_a_scaling_of_old_without_a_base(name: str, empty: Checkpoint) -> None:
    data = filled_in(name, {})
    del data["rope_parameters"]
    data["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    assert read(empty, name, data) == read(empty, name, filled_in(name, data))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_a_scaling_that_is_added(name: str, empty: Checkpoint) -> None:
    """People add the rope_scaling of a model's page to the config.json that newer transformers wrote."""
    data = filled_in(name, {})
    plainly = read(empty, name, data)
    data["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert read(empty, name, data) == read(empty, name, filled_in(name, data)) != plainly


def test_a_scaling_that_is_added_keeps_the_base(empty: Checkpoint) -> None:
    parameters = {"rope_type": "default", "rope_theta": 7e5}
    scaling = {"type": "linear", "factor": 2.0}
    data = filled_in("qwen3", {"rope_parameters": parameters}) | {"rope_scaling": scaling}
    want = filled_in("qwen3", {"rope_parameters": scaling | {"rope_theta": 7e5}})
    assert read(empty, "qwen3", data) == read(empty, "qwen3", want)
