"""``engine serve``: a model behind OpenAI's HTTP protocol."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.console.demo import OptionalModel, model_or_demo
from engine.console.notes import note
from engine.console.opening import find_model
from engine.console.options import EngineOptions
from engine.errors import ConfigError, UsageError
from engine.serve.settings import LoadOptions, ServeOptions

if TYPE_CHECKING:
    from engine.runtime.config import EngineConfig
    from engine.serve.models_file import Named

_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


def serve(
    model: OptionalModel = None,
    *,
    also: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=MODEL", help="A further model, loaded when it is first asked for; may be repeated."),
    ] = None,
    models: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A TOML file of further models, each with settings of its own (docs/serve.md); without MODEL its first one is"
            " the server's first.",
        ),
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
      engine serve --models models.toml
    """
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise UsageError(f"{missing[0]} is not installed; install the extra serve: pip install 'engine[serve]'.")
    from engine.hub.names import short_name
    from engine.serve.keys import load_keys
    from engine.serve.models_file import Named, read_models
    from engine.serve.run import serve as run

    keys = load_keys(serving.key_file)
    named = [] if models is None else read_models(models, engine, load)
    named += [Named(name, one, engine, load) for name, one in _further(also or ())]
    if model is not None or models is None:
        path = find_model(model_or_demo(model))
        named.insert(0, Named(serving.name or short_name(path), str(path), engine, load))
    elif serving.name is not None:
        raise UsageError(f"--name is {serving.name}, and there is no MODEL that it names; {models} names its own.")
    run(_configs(named), serving, keys, note)


def _configs(models: Sequence[Named]) -> dict[str, EngineConfig]:
    """Each model's configuration by its name. UsageError where two have one name, ConfigError where one cannot be."""
    from engine.runtime.config import EngineConfig

    configs: dict[str, EngineConfig] = {}
    for one in models:
        if one.name in configs:
            raise UsageError(f"Two models are called {one.name}; each needs a name of its own.")
        settings = one.engine.settings() | one.load.settings()
        try:
            configs[one.name] = EngineConfig(model=find_model(one.model), populate_cache="when idle", **settings)
        except ConfigError as error:
            raise ConfigError(f"{one.name}: {error}") from error
    return configs


def _further(given: Iterable[str]) -> Iterator[tuple[str, str]]:
    for text in given:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise UsageError(f"--also is {text!r}; it must be a name and a model, such as small=owner/repo:Q4_K_M.")
        yield name, path
