"""Options of ``engine serve`` that are not the engine's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.errors import ConfigError

MAX_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Who may ask, and for how much."""

    host: Annotated[str, typer.Option(help="Address to listen on; 127.0.0.1 is this machine alone.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000
    name: Annotated[
        str | None, typer.Option(help="What the model is called; its file's or folder's name if not given.")
    ] = None
    key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Lines of a key's SHA-256 in hex and a name for it. Keys come from ENGINE_SERVE_KEYS, too.",
        ),
    ] = None
    max_queue: Annotated[int, typer.Option(help="Most sequences that wait; further requests get 429.")] = 256
    max_per_key: Annotated[int | None, typer.Option(help="Most requests of one key at a time.")] = None
    deadline: Annotated[float | None, typer.Option(metavar="SECONDS", help="Most time for a request.")] = None
    memory_budget: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            help="Most memory for the weights and KV caches of all models that are loaded; those used least lately make room.",
        ),
    ] = None
    idle_unload: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Unload a model that had no request for so long.")
    ] = None
    max_body: Annotated[float, typer.Option(metavar="MIB", help="Largest body of a request.")] = 8.0
    drain: Annotated[
        float, typer.Option(metavar="SECONDS", help="Most time for running requests to finish after SIGTERM.")
    ] = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= MAX_PORT:
            raise ConfigError(f"--port is {self.port}; it must be from 0 to {MAX_PORT}.")
        least = {"max-queue": self.max_queue, "drain": self.drain}
        above = {"max-per-key": self.max_per_key, "deadline": self.deadline, "max-body": self.max_body}
        above |= {"memory-budget": self.memory_budget, "idle-unload": self.idle_unload}
        for name, value in (least | above).items():
            if value is not None and not (value > 0 or (value == 0 and name in least)):
                raise ConfigError(f"--{name} is {value:g}; it must be {'at least' if name in least else 'above'} 0.")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How much of a model runs at a time."""

    max_seqs: Annotated[int, typer.Option(help="Most sequences that run at a time.")] = 64
    kv_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens that the KV cache holds; 65536, or one context if that is more, or all that fit on a GPU."
        ),
    ] = None
    policy: Annotated[
        str, typer.Option(help="Who goes first: fcfs, or priority, the lowest value of a request first.")
    ] = "fcfs"
    decode_slowdown: Annotated[
        float,
        typer.Option(
            help="Prompts that come may slow running answers down by about this factor, and by more where more requests"
            " wait than run; 0 is no limit, for the most requests a second."
        ),
    ] = 2.5

    def settings(self) -> dict[str, Any]:
        """As keywords of ``EngineConfig``."""
        load = {"max_num_seqs": self.max_seqs, "kv_cache_tokens": self.kv_tokens, "policy": self.policy}
        return {**load, "decode_slowdown": self.decode_slowdown or None}
