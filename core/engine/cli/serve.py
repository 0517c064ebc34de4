"""``engine serve``: a model behind OpenAI's HTTP protocol."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from engine.cli.demo import OptionalModel, model_or_demo
from engine.cli.options import EngineOptions
from engine.cli.running import find_model, note
from engine.errors import UsageError
from engine.serve.settings import ServeOptions

_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


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
            help="Prompts that come may slow running answers down by about this factor; 0 is no limit, for the most"
            " requests a second."
        ),
    ] = 2.5

    def settings(self) -> dict[str, Any]:
        """As keywords of ``EngineConfig``."""
        load = {"max_num_seqs": self.max_seqs, "kv_cache_tokens": self.kv_tokens, "policy": self.policy}
        return {**load, "decode_slowdown": self.decode_slowdown or None}


def serve(
    model: OptionalModel = None,
    *,
    also: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=MODEL", help="A further model, loaded when it is first asked for; may be repeated."),
    ] = None,
    serving: ServeOptions,
    load: LoadOptions,
    engine: EngineOptions,
) -> None:
    """Serve a model by OpenAI's HTTP protocol.

    Requests share steps, and what does not fit waits in a queue or is refused. The log goes to stderr, one JSON object a
    line, without prompts. SIGTERM lets running requests finish.

    \b
    Examples:
      engine serve model.gguf
      engine serve owner/repo:Q4_K_M --name qwen --port 9000 --max-seqs 32
      engine serve model.gguf --also small=owner/other:Q8_0
    """
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise UsageError(f"{missing[0]} is not installed; install the extra serve: pip install 'engine[serve]'.")
    from engine.hub.names import short_name
    from engine.serve.keys import load_keys
    from engine.serve.run import serve as run

    keys = load_keys(serving.key_file)
    further = _further(also or ())
    path = find_model(model_or_demo(model))
    models = {serving.name or short_name(path): path, **{name: find_model(one) for name, one in further.items()}}
    run(models, engine.settings() | load.settings(), serving, keys, note)


def _further(given: Iterable[str]) -> dict[str, str]:
    found = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise UsageError(f"--also is {text!r}; it must be a name and a model, such as small=owner/repo:Q4_K_M.")
        found[name] = path
    return found
