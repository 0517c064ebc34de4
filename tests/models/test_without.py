"""Any one provider may be missing: fused forms fall apart, other ops go to the reference, and the tokens stay."""

from __future__ import annotations

import pytest
import tiny_models
from checkpoints import save

from engine import LLM, SamplingParams
from engine.errors import PlacementError
from engine.ops import OPS

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [[1, 20, 33], list(range(40, 75)), [7]]
FUSED = ("linear_group", "add_rms_norm", "rope_kv_write")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A dense model and one with experts: together they use every op of a decoder."""
    dense = save("qwen3", tmp_path_factory.mktemp("qwen3"))
    experts = save("mixtral", tmp_path_factory.mktemp("mixtral"))
    return {"qwen3": dense, "mixtral": tiny_models.to_gguf(experts, experts / "model.gguf")}


def run(path, backend, **settings):
    settings = {"kv_cache_dtype": "f32", "threads": 2, "max_num_batched_tokens": 16, "max_num_seqs": 8} | settings
    with LLM(path, backend=backend, **settings) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        return [out.outputs[0].token_ids for out in outputs], llm.loaded


@pytest.fixture(scope="module")
def whole(models):
    """model, backend -> tokens with everything in its place."""
    known = {}

    def get(model, backend):
        if (model, backend) not in known:
            known[model, backend] = run(models[model], backend)[0]
        return known[model, backend]

    return get


@pytest.mark.parametrize("model", ["qwen3", "mixtral"])
def test_all_backends_agree(model, whole, backend):
    assert whole(model, backend) == whole(model, "reference")


@pytest.mark.parametrize("model", ["qwen3", "mixtral"])
def test_fused_is_unfused(model, models, whole, backend):
    tokens, loaded = run(models[model], backend, fused=False)
    assert tokens == whole(model, backend)
    assert not any(placed.call.parts for placed in loaded.placement.calls)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("model", ["qwen3", "mixtral"])
def test_with_one_op_taken_out(model, op, models, whole, cpu):
    tokens, loaded = run(models[model], cpu, without=(op,))
    assert tokens == whole(model, cpu)
    program_ops = {placed.call.op for placed in loaded.placement.calls}
    fallen = {placed.call.op for placed in loaded.placement.fallbacks()}
    if op in program_ops:
        assert op in fallen
        assert any(op in notice for notice in loaded.notices)
    else:
        assert not fallen, "nothing else may leave the device"
    # Ops that share state with it move home along, and no others.
    assert fallen <= {op} | {other for group in STATES for other in group if op in group}


STATES = (("kv_write", "rope_kv_write", "attention", "kv_copy"), ("step_expand", "process_logits", "sample"))


def test_everything_is_on_the_device(models, cpu):
    for path in models.values():
        loaded = run(path, cpu, strict=True)[1]
        assert not loaded.placement.fallbacks() and not loaded.notices
        assert {placed.place for placed in loaded.placement.calls} == {"device"}


def test_strict_refuses_a_fallback(models, cpu):
    with pytest.raises(PlacementError, match="rms_norm"):
        run(models["qwen3"], cpu, without=("rms_norm",), strict=True)


def test_an_op_that_does_not_exist(models, backend):
    with pytest.raises(PlacementError, match="no op 'lineer'"):
        run(models["qwen3"], backend, without=("lineer",))
