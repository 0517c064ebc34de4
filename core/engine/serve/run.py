"""The server's life: load, listen, serve, drain."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from engine.errors import UsageError
from engine.runtime.async_llm import AsyncLLM

from .admission import Admission
from .app import make_app
from .keys import VARIABLE, Keys
from .log import log
from .metrics import Metrics
from .model import ServedModel
from .models import Models
from .settings import ServeOptions

_LOCAL = ("127.0.0.1", "localhost", "::1")
_SPARE = 1.25
"""Sequences that the scheduler is given, for each that it may run: so its next one is there when one ends."""


class Server(uvicorn.Server):
    """Serves until SIGTERM or SIGINT, then refuses what is new, and ends once all requests have been answered; a second
    signal ends it at once."""

    def __init__(self, app: ASGIApp, admissions: list[Admission], drain_s: float) -> None:
        super().__init__(
            uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False)
        )
        self._admissions = admissions
        self._drain_s = drain_s
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if any(admission.draining for admission in self._admissions):
            self.should_exit = self.force_exit = True
            return
        for admission in self._admissions:
            admission.draining = True
        log("draining", signal=signal.Signals(sig).name)

    async def on_tick(self, counter: int) -> bool:
        if self._draining is None and all(admission.draining for admission in self._admissions):
            self._draining = asyncio.ensure_future(self._drain())
        return await super().on_tick(counter)

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._drain_s):
                for admission in self._admissions:
                    await admission.idle.wait()
        except TimeoutError:
            log("drain_timeout", running=sum(admission.running for admission in self._admissions))
            self.config.timeout_graceful_shutdown = 1
        self.should_exit = True


def make_server(
    models: dict[str, AsyncLLM], options: ServeOptions, keys: Keys, logs: Callable[..., None] = log
) -> tuple[Server, Models]:
    """A server of loaded models, by name, that does not listen yet."""
    metrics = Metrics()
    served = Models(
        {
            name: ServedModel(name, llm, _admission(llm, options), metrics, options.deadline)
            for name, llm in models.items()
        }
    )
    metrics.models = served.by_name
    app = make_app(served, metrics, keys, int(options.max_body * 2**20), logs)
    return Server(app, [model.admission for model in served.by_name.values()], options.drain), served


def _admission(llm: AsyncLLM, options: ServeOptions) -> Admission:
    most = llm.engine.loaded.config.max_num_seqs
    return Admission(int(most * _SPARE), options.max_queue, options.max_per_key)


def listen(options: ServeOptions) -> socket.socket:
    """A listening socket. UsageError where the address cannot be had."""
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
        return socket.create_server(found[0][4][:2], family=found[0][0], backlog=2048)
    except OSError as error:
        raise UsageError(
            f"{options.host}:{options.port} cannot be listened on: {error.strerror or error}; choose another --port."
        ) from error


def serve(
    models: dict[str, Path], settings: dict[str, Any], options: ServeOptions, keys: Keys, note: Callable[[str], None]
) -> None:
    """Loads the models, and serves them until a signal. ``note`` tells a person what there is to know."""
    from engine.cli.processes import shown
    from engine.cli.progress import Wait
    from engine.runtime.config import EngineConfig
    from engine.runtime.engine import Engine
    from engine.runtime.load import load

    listening = listen(options)
    loaded: dict[str, AsyncLLM] = {}
    listed = ExitStack()
    try:
        for name, path in models.items():
            with Wait(f"Loading {name}") as wait:
                loaded[name] = AsyncLLM(Engine(load(EngineConfig(model=path, **settings), wait.update)))
            listed.enter_context(shown(loaded[name].engine.loaded))
            for notice in loaded[name].engine.loaded.notices:
                note(notice)
        if options.host not in _LOCAL and not keys:
            note(
                f"Anybody who reaches {options.host} may ask: there are no keys. Give some in {VARIABLE} or --key-file."
            )
        server, _ = make_server(loaded, options, keys)
        host, port = listening.getsockname()[:2]
        note(f"Serving {', '.join(models)} at http://{f'[{host}]' if ':' in host else host}:{port}")
        server.run([listening])
    finally:
        listening.close()
        listed.close()
        for llm in loaded.values():
            llm.engine.close()
