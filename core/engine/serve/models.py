"""The models that are served, and GET /v1/models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter

from .errors import ApiError
from .model import ServedModel


class Models:
    """Served models by name; the first is taken where a request names none."""

    def __init__(self, models: Mapping[str, ServedModel]) -> None:
        self.by_name = dict(models)

    @property
    def loaded(self) -> list[ServedModel]:
        return [model for model in self.by_name.values() if model.loaded]

    async def find(self, name: str | None) -> ServedModel:
        """A model that is loaded, now if it was not. ApiError 404 for a name that is not served, 503 if it cannot load."""
        model = self.known(name)
        await model.ready()
        return model

    async def find_tagged(self, name: str) -> ServedModel:
        """``find`` for Ollama's programs, which put a tag behind names that have none."""
        return await self.find(name.removesuffix(":latest") if name not in self.by_name else name)

    def known(self, name: str | None) -> ServedModel:
        """ApiError 404 for a name that is not served."""
        if name is None:
            return next(iter(self.by_name.values()))
        if name not in self.by_name:
            served = ", ".join(self.by_name)
            raise ApiError(404, f"There is no model {name[:200]!r}; served here: {served}.", "model", "model_not_found")
        return self.by_name[name]


def described(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "engine",
        "loaded": model.loaded,
        "max_model_len": model.max_model_len if model.loaded else None,
    }


def routes(models: Models) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """The models that requests may name."""
        return {"object": "list", "data": [described(model) for model in models.by_name.values()]}

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        return described(models.known(name))

    return router
