"""``engine serve``: a model behind OpenAI's HTTP protocol."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from engine.cli.options import EngineOptions, Model
from engine.cli.running import find_model, note
from engine.errors import UsageError
from engine.serve.settings import ServeOptions

_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How much of a model runs at a time."""

    max_seqs: Annotated[int, typer.Option(help="Most sequences that run at a time.")] = 64
    kv_tokens: Annotated[
        int | None, typer.Option(help="Tokens that the KV cache holds; 65536, or one context if that is more.")
    ] = None
    policy: Annotated[
        str, typer.Option(help="Who goes first: fcfs, or priority, the lowest value of a request first.")
    ] = "fcfs"

    def settings(self) -> dict[str, Any]:
        """As keywords of ``EngineConfig``."""
        return {"max_num_seqs": self.max_seqs, "kv_cache_tokens": self.kv_tokens, "policy": self.policy}


def serve(model: Model, *, serving: ServeOptions, load: LoadOptions, engine: EngineOptions) -> None:
    """Serve a model by OpenAI's HTTP protocol.

    Requests share steps, and what does not fit waits in a queue or is refused. The log goes to stderr, one JSON object a
    line, without prompts. SIGTERM lets running requests finish.

    \b
    Examples:
      engine serve model.gguf
      engine serve owner/repo:Q4_K_M --name qwen --port 9000 --max-seqs 32
    """
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise UsageError(f"{missing[0]} is not installed; install the extra serve: pip install 'engine[serve]'.")
    from engine.hub.names import short_name
    from engine.serve.keys import load_keys
    from engine.serve.run import serve as run

    keys = load_keys(serving.key_file)
    path = find_model(model)
    run({serving.name or short_name(path): path}, engine.settings() | load.settings(), serving, keys, note)
