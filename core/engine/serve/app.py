"""The application: routes, refusals, and the gate around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.types import ASGIApp

from engine import __version__

from . import (
    chat_completions,
    completions,
    embeddings,
    health,
    messages,
    models,
    ollama,
    page,
    rerank,
    responses,
    tokens,
)
from .errors import Fault, OllamaFault, add_handlers
from .gate import Gate
from .keys import Keys
from .log import log
from .metrics import Metrics
from .tracing import Tracing


def make_app(
    served: models.Models,
    metrics: Metrics,
    keys: Keys,
    max_body: int,
    logs: Callable[..., None] = log,
    tracing: Tracing | None = None,
) -> ASGIApp:
    """All endpoints for these models. ``max_body`` is in bytes."""
    app = FastAPI(title="engine", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    add_handlers(app)
    for router in (
        chat_completions.routes(served),
        completions.routes(served),
        messages.routes(served),
        responses.routes(served),
        embeddings.routes(served),
        rerank.routes(served),
        models.routes(served),
        tokens.routes(served),
        health.routes(served, metrics),
        page.routes(served, metrics),
    ):
        app.include_router(router, responses=_refusals(Fault))
    app.include_router(ollama.routes(served), responses=_refusals(OllamaFault))
    return Gate(app, keys, max_body, logs, tracing)


def _refusals(form: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": form, "description": "A refusal, or a fault of the server"} for status in ("4XX", "5XX")}
