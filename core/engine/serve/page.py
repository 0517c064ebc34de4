"""GET /, a page to chat and to watch the load, and GET /stats, the figures that it shows."""

from __future__ import annotations

import time
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response

from .metrics import Metrics, snapshot
from .model import ServedModel
from .models import Models

_ALLOWED = (
    "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
)
_SUMS = {
    "generated_tokens": "vllm:generation_tokens_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "ttft_sum_s": "vllm:time_to_first_token_seconds_sum",
    "ttft_count": "vllm:time_to_first_token_seconds_count",
}


def routes(models: Models, metrics: Metrics) -> APIRouter:
    router = APIRouter()
    html = files("engine.serve").joinpath("page.html").read_text("utf-8")

    def described(model: ServedModel) -> dict[str, Any]:
        label = {"model_name": model.name}
        sums = {name: metrics.registry.get_sample_value(sample, label) or 0 for name, sample in _SUMS.items()}
        return {"name": model.name, **snapshot(model), "refused": model.refused, **sums}

    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(html, headers={"Content-Security-Policy": _ALLOWED})

    @router.get("/stats")
    async def stats() -> dict[str, Any]:
        """Queue, batch, KV cache and sums of each model, as of now."""
        return {"time_s": time.monotonic(), "models": [described(model) for model in models.by_name.values()]}

    return router
