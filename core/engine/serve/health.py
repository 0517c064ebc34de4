"""GET /health, /metrics and /version."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from engine import __version__

from .metrics import Metrics
from .models import Models

STALL_S = 60.0
"""A model with work that has finished no step for so long is not healthy."""


def routes(models: Models, metrics: Metrics) -> APIRouter:
    router = APIRouter()

    def state() -> dict[str, bool]:
        health = [(model, model.llm.health()) for model in models.loaded]
        return {
            "live": all(each.alive for _, each in health),
            "ready": all(each.ready and not model.admission.draining for model, each in health),
            "progress": all(each.stalled_s < STALL_S for _, each in health),
        }

    def answer(good: bool, found: dict[str, bool]) -> Response:
        restarts = sum(model.llm.health().restarts for model in models.loaded)
        status = "ok" if good else "failing"
        return JSONResponse({"status": status, **found, "restarts": restarts}, 200 if good else 503)

    @router.get("/health")
    async def health() -> Response:
        """Whether the server is live, takes requests and makes progress."""
        found = state()
        return answer(all(found.values()), found)

    @router.get("/health/{part}")
    async def part_of_health(part: str) -> Response:
        """One of live, ready and progress."""
        found = state()
        if part not in found:
            return JSONResponse({"status": "unknown", **found}, 404)
        return answer(found[part], found)

    @router.get("/metrics")
    async def prometheus() -> Response:
        """Figures in Prometheus's format."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version")
    async def version() -> dict[str, Any]:
        return {"version": __version__}

    return router
