"""Engines for the tests of this folder, opened once and closed at the end of a file."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest

from engine import LLM
from engine.runtime.load import Loaded


@pytest.fixture(scope="session")
def stories_peer(stories):
    """torch, transformers, and its model of stories260K."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)  # a tiny model is slower with more
    return (
        torch,
        transformers,
        transformers.AutoModelForCausalLM.from_pretrained(stories / "hf", dtype=torch.float32).eval(),
    )


@pytest.fixture(scope="module")
def open_llm(llama):
    """``open_llm(backend, **settings)``: an LLM over the tiny llama, the same one for the same settings."""
    opened = {}

    def get(backend, **settings):
        key = backend, *sorted(settings.items())
        if key not in opened:
            defaults = {"threads": 2, "kv_cache_dtype": "f32", "kv_cache_tokens": 2048}
            opened[key] = LLM(llama, backend=backend, **(defaults | settings))
        return opened[key]

    yield get
    for llm in opened.values():
        llm.close()


@pytest.fixture
def llm(open_llm, backend):
    """An engine with the default settings, which must be idle and hold no blocks after the test."""
    found = open_llm(backend)
    yield found
    assert_idle(found)


@pytest.fixture
def idle():
    """``idle(llm)`` fails unless the engine is idle and holds no blocks."""
    return assert_idle


def _busy(stats):
    return stats.waiting or stats.running or stats.steps_in_flight


def assert_idle(llm):
    """A sequence that a stop string ended may be in one step more, and between two until the loop has heard of its end."""
    deadline = time.monotonic() + 5
    while _busy(stats := llm.engine._core.scheduler.stats()) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert (stats.waiting, stats.running, stats.steps_in_flight) == (0, 0, 0)
    assert all(pool.used == 0 for pool in stats.pools)
    llm.engine._core.scheduler.check()


@dataclass
class SlowTicket:
    ticket: Any

    def wait(self):
        time.sleep(0.005)
        return self.ticket.wait()


@dataclass
class SlowSession:
    session: Any

    def submit(self, inputs):
        return SlowTicket(self.session.submit(inputs))

    def close(self):
        self.session.close()


@pytest.fixture
def slowly(monkeypatch):
    """Steps of at least 5 ms, so that a test can act before a request has ended."""
    make = Loaded.session
    monkeypatch.setattr(Loaded, "session", lambda self: SlowSession(make(self)))
