"""A real server on a free port, with a tiny random model; one for all tests of a module."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tiny_models

from engine.runtime.config import EngineConfig
from engine.runtime.engine import Engine
from engine.runtime.load import load
from engine.serve.keys import Keys
from engine.serve.models import Models
from engine.serve.run import Server, listen, make_server
from engine.serve.settings import ServeOptions
from engine.serve.tracing import Tracing

WAIT_S = 180.0


@dataclass
class Running:
    """A server in a thread of this process."""

    url: str
    models: Models
    server: Server
    logs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def engine(self) -> Engine:
        return next(iter(self.models.by_name.values())).llm.engine

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=WAIT_S)

    def used_blocks(self) -> int:
        return sum(pool.used for pool in self.engine.scheduler_stats().pools)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Fails if the condition does not come about."""
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, "the server did not get there"
            time.sleep(0.005)

    def wait_until_logged(self, **fields: Any) -> None:
        """Until the last line of the log has these: it is written when an answer has been sent, which its reader may be
        ahead of."""
        self.wait_until(lambda: bool(self.logs) and fields.items() <= self.logs[-1].items())

    def wait_until_free(self) -> None:
        """Until no request is left and no block is held."""
        admission = next(iter(self.models.by_name.values())).admission
        self.wait_until(lambda: not admission.running and not admission.waiting and not self.used_blocks())


@pytest.fixture(scope="session")
def talker(tmp_path_factory) -> Path:
    """A random llama with a chat template that answers in letters and, greedily, never ends by itself."""
    return tiny_models.write_talker(tmp_path_factory.mktemp("talker"))


@pytest.fixture(scope="module")
def start(talker) -> Iterator[Callable[..., Running]]:
    """Starts a server: ``start(model=folder, keys=Keys, options={...}, further={name: folder}, **settings)``."""
    closing = []

    def begin(
        model: Path = talker,
        keys: Keys | None = None,
        options: dict[str, Any] | None = None,
        further: dict[str, Path] | None = None,
        tracing: Tracing | None = None,
        **settings: Any,
    ) -> Running:
        defaults = {"backend": "cpu", "threads": 2, "kv_cache_tokens": 4096, "max_model_len": 1024, "max_num_seqs": 64}
        settings = defaults | settings
        openers = {name: partial(opened, path, settings) for name, path in {"tiny": model, **(further or {})}.items()}
        given = ServeOptions(port=0, **(options or {}))
        listening = listen(given)
        logs: list[dict[str, Any]] = []

        def write(event: str, **fields: Any) -> None:
            logs.append({"event": event, **fields})

        sequences = dict.fromkeys(openers, settings["max_num_seqs"])
        server, models = make_server(openers, sequences, given, keys or Keys({}), write, tracing)
        models.known(None).load()
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        closing.append((server, thread, models))
        return Running(f"http://127.0.0.1:{listening.getsockname()[1]}", models, server, logs)

    yield begin
    for server, thread, models in closing:
        server.should_exit = True
        thread.join(WAIT_S)
        for model in models.loaded:
            model.close()


def opened(model: Path, settings: dict[str, Any], _: ExitStack) -> Engine:
    return Engine(load(EngineConfig(model=model, **settings)))


@pytest.fixture(scope="module")
def running(start) -> Running:
    """One server with the defaults."""
    return start()
