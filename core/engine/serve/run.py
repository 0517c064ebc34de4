"""The server's life: load, listen, serve, drain."""

from __future__ import annotations

import asyncio
import errno
import gc
import math
import os
import resource
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from engine.errors import UsageError
from engine.runtime.config import EngineConfig
from engine.runtime.engine import Engine

from .admission import Admission
from .app import make_app
from .connection import ACCEPTED, Connection
from .keys import VARIABLE, Keys
from .log import log, log_libraries
from .metrics import Metrics
from .model import ServedModel
from .models import Models
from .settings import ServeOptions
from .tracing import Tracing, load_tracing

_LOCAL = ("127.0.0.1", "localhost", "::1")
_SPARE = 1.25
"""Sequences that the scheduler is given, for each that it may run: so its next one is there when one ends."""
_BACKLOG = 2048
"""Connections that wait to be accepted."""
_IDLE_S = 75
"""For how long a connection is kept without a request: longer than by proxies and clients, which would send one as it closes."""
_GARBAGE = (50_000, 10, 5)
"""Thresholds of Python's search for garbage, in place of those for a start, by which asyncio's closed connections, which are
some, would stay for hours."""
_TICKS = 10
"""Of a tenth of a second each, between looks for models that idle."""


class Server(uvicorn.Server):
    """Serves until SIGTERM or SIGINT, then refuses what is new, and ends once all requests have been answered; a second
    signal ends it at once."""

    def __init__(self, app: ASGIApp, models: Models, drain_s: float) -> None:
        quiet: dict[str, Any] = {"log_config": None, "log_level": "error", "access_log": False, "server_header": False}
        kept: dict[str, Any] = {"backlog": ACCEPTED, "timeout_keep_alive": _IDLE_S}
        super().__init__(uvicorn.Config(app, http=Connection, lifespan="off", ws="none", **kept, **quiet))
        self._models = models
        self._admissions = [model.admission for model in models.by_name.values()]
        self._drain_s = drain_s
        self._draining: asyncio.Task[None] | None = None
        self._retiring: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_BACKLOG)  # asyncio gives the system what it is to accept in a turn

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if any(admission.draining for admission in self._admissions):
            self.should_exit = self.force_exit = True
            return
        for admission in self._admissions:
            admission.draining = True

    async def on_tick(self, counter: int) -> bool:
        if self._draining is None and all(admission.draining for admission in self._admissions):
            self._draining = asyncio.ensure_future(self._drain())
        if counter % _TICKS == 0 and (self._retiring is None or self._retiring.done()):
            self._retiring = asyncio.ensure_future(self._models.retire_idle())
        return await super().on_tick(counter)

    async def _drain(self) -> None:
        log("draining", running=sum(admission.running for admission in self._admissions))
        end = time.monotonic() + self._drain_s
        try:
            async with asyncio.timeout(self._drain_s):
                for admission in self._admissions:
                    await admission.idle.wait()
        except TimeoutError:
            log("drain_timeout", running=sum(admission.running for admission in self._admissions))
            for model in self._models.loaded:  # what still runs ends with a fault that says why
                await asyncio.to_thread(model.llm.engine.close)
        # For what is not at work here: bodies that are on their way, and answers that nobody reads.
        self.config.timeout_graceful_shutdown = max(1, math.ceil(end - time.monotonic()))
        self.should_exit = True


def make_server(
    models: Mapping[str, Callable[[ExitStack], Engine]],
    max_num_seqs: Mapping[str, int],
    options: ServeOptions,
    keys: Keys,
    logs: Callable[..., None] = log,
    tracing: Tracing | None = None,
) -> tuple[Server, Models]:
    """A server, not listening yet, of models by name, each with what loads it and with how many sequences it may run."""
    metrics = Metrics()
    keep_s = math.inf if options.idle_unload is None else options.idle_unload
    served = Models(
        {
            name: ServedModel(name, opener, _admission(max_num_seqs[name], options), metrics, options.deadline, keep_s)
            for name, opener in models.items()
        },
        options.memory_budget and options.memory_budget * 2**30,
    )
    metrics.models = served.by_name
    app = make_app(served, metrics, keys, int(options.max_body * 2**20), logs, tracing)
    return Server(app, served, options.drain), served


def _admission(max_num_seqs: int, options: ServeOptions) -> Admission:
    return Admission(int(max_num_seqs * _SPARE), options.max_queue, options.max_per_key)


def listen(options: ServeOptions) -> socket.socket:
    """A listening socket. UsageError where the address cannot be had."""
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
        address = found[0][4][:2]
        both = address[0] == "::" and socket.has_dualstack_ipv6()  # every address, those of IPv4 among them
        listening = socket.create_server(address, family=found[0][0], backlog=_BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        names = isinstance(error, socket.gaierror)  # whose numbers are not the system's
        reason = error.strerror if names or error.errno is None else os.strerror(error.errno)
        other = "--host" if names or error.errno == errno.EADDRNOTAVAIL else "--port"
        raise UsageError(
            f"{options.host}:{options.port} cannot be listened on: {reason}; choose another {other}."
        ) from error
    # asyncio sets TCP_NODELAY where the protocol is named; without it, an answer's body waits 40 ms for its head's receipt.
    return socket.socket(listening.family, listening.type, socket.IPPROTO_TCP, listening.detach())


def raise_file_limit() -> None:
    """As many open files, and so connections, as the system lets this process have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS says more than it gives
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def serve(models: Mapping[str, EngineConfig], options: ServeOptions, keys: Keys, note: Callable[[str], None]) -> None:
    """Loads the first model, and serves all until a signal; the others are loaded when they are asked for. ``note`` tells
    a person what there is to know. UsageError where a file is not there."""
    if wrong := next((config.model for config in models.values() if not config.model.exists()), None):
        raise UsageError(f"There is no model {wrong}.")
    raise_file_limit()
    log_libraries()
    listening = listen(options)
    openers = {name: partial(_open, name, config, note) for name, config in models.items()}
    sequences = {name: config.max_num_seqs for name, config in models.items()}
    tracing = load_tracing(note)
    server, served = make_server(openers, sequences, options, keys, tracing=tracing)
    try:
        first = served.known(None)
        first.load()
        if options.memory_budget is not None and first.bytes > options.memory_budget * 2**30:
            raise UsageError(
                f"{first.name} takes {first.bytes / 2**30:.2f} GiB, more than --memory-budget {options.memory_budget:g}; raise"
                " it, or lower --kv-tokens."
            )
        if options.host not in _LOCAL and not keys:
            note(
                f"Anybody who reaches {options.host} may ask: there are no keys. Give some in {VARIABLE} or --key-file."
            )
        host, port = listening.getsockname()[:2]
        note(f"Serving {', '.join(models)} at http://{f'[{host}]' if ':' in host else host}:{port}")
        gc.set_threshold(*_GARBAGE)
        server.run([listening])
    finally:
        listening.close()
        for model in served.loaded:
            model.close()
        if tracing is not None:
            tracing.close()


def _open(name: str, config: EngineConfig, note: Callable[[str], None], opened: ExitStack) -> Engine:
    """The model's engine; ``engine ps`` shows it until ``opened`` is closed."""
    from engine.console.processes import shown
    from engine.console.progress import Wait
    from engine.runtime.load import load

    with Wait(f"Loading {name}") as wait:
        loaded = load(config, wait.update)
    opened.enter_context(shown(loaded))
    for notice in loaded.notices:
        note(notice)
    return Engine(loaded)
