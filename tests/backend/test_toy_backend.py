"""The promise of the contract: eight methods are enough."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest
import toy_backend

from engine import LLM, SamplingParams
from engine.backend import v1
from engine.ops import OPS
from engine.program.reference import ReferenceProvider

BEGINNING = (
    ", there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, red ball."
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=200)


@pytest.fixture
def toy(install):
    install("engine.backends", "toy", "toy_backend:manifest")
    return "toy"


def test_it_is_small_and_has_the_eight_methods_alone():
    assert len(Path(toy_backend.__file__).read_text().splitlines()) < 100
    methods = {n for n, m in inspect.getmembers(v1.Device, inspect.isfunction) if not n.startswith("_")}
    assert len(methods) == 8
    public = {n for n, m in inspect.getmembers(toy_backend.ToyDevice, inspect.isfunction) if not n.startswith("_")}
    assert public == methods


def test_values_are_neither_aliased_nor_arrays():
    device = toy_backend.ToyDevice()
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    value = device.copy_in(array)
    array[0, 0] = 99
    out = device.copy_out(value)
    assert out[0, 0] == 0
    out[0, 0] = 77
    assert device.copy_out(value)[0, 0] == 0


def test_it_tells_the_story_with_every_op_through_the_device(stories, toy, monkeypatch):
    trips = []
    bind = ReferenceProvider.bind

    def counted(self, bound, limits):
        """Each op call of the program, with the copies that one run of it made."""
        run, call = bind(self, bound, limits), bound.call

        def step(frame):
            device = self._device
            before = device.copies_out, device.copies_in
            run(frame)
            trips.append((call, device.copies_out - before[0], device.copies_in - before[1]))

        return step

    monkeypatch.setattr(ReferenceProvider, "bind", counted)
    with LLM(stories / "stories260K-f32.gguf", backend=toy) as llm:
        story = llm.generate("Once upon a time", GREEDY)[0].outputs[0]
        placement = llm.loaded.placement
    assert story.text.startswith(BEGINNING) and len(story.token_ids) == 200
    assert {placed.place for placed in placement.calls} == {"device"}
    assert len(trips) == 200 * len(placement.body + placement.head)
    for call, out, into in trips:
        assert out == len(call.inputs) + len(call.weights) + len(call.states), call.op
        assert into == len(call.outputs) + len(call.states), call.op
    ops = {call.op for call, _, _ in trips}
    assert ops == {placed.call.op for placed in placement.calls} <= set(OPS)
    assert {"step_expand", "kv_copy", "embed", "linear", "attention", "kv_write", "process_logits", "sample"} <= ops


def test_steps_leave_nothing_behind(llama, toy):
    def alive(tokens):
        with LLM(llama, backend=toy, max_num_seqs=2) as llm:
            llm.generate([[1, 5, 9]], SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
            return llm.loaded.device.alive, llm.loaded.device.most_alive

    assert alive(3) == alive(30)


def test_closing_frees_the_states(llama, toy):
    with LLM(llama, backend=toy, max_num_seqs=2) as llm:
        device, states = llm.loaded.device, len(llm.loaded.plan.states)
        before = device.alive
    assert device.alive == before - states


def test_same_tokens_as_the_reference(llama, toy):
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=20, n=2, logprobs=3, repetition_penalty=1.2)
    outputs = []
    for backend in (toy, "reference"):
        with LLM(llama, backend=backend, max_num_seqs=4, max_num_batched_tokens=8) as llm:
            outputs.append([out.outputs for out in llm.generate(["The quick brown fox", "Once"], params)])
    assert outputs[0] == outputs[1]
