"""The models that are served, and GET /v1/models."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from fastapi import APIRouter

from .errors import ApiError
from .model import ServedModel

_taken: ContextVar[list[ServedModel]] = ContextVar("taken")


@contextmanager
def in_use() -> Iterator[None]:
    """Models that are found by this task stay loaded until the end."""
    taken: list[ServedModel] = []
    token = _taken.set(taken)
    try:
        yield
    finally:
        _taken.reset(token)
        for model in taken:
            model.release()


class Models:
    """Served models by name; the first is taken where a request names none. ``budget``: bytes that all which are loaded may
    take."""

    def __init__(self, models: Mapping[str, ServedModel], budget: float | None = None) -> None:
        self.by_name = dict(models)
        self._budget = budget
        self._making_room = asyncio.Lock()

    @property
    def loaded(self) -> list[ServedModel]:
        return [model for model in self.by_name.values() if model.loaded]

    async def find(self, name: str | None) -> ServedModel:
        """A model that is loaded, now if it was not, for as long as the task is ``in_use``. ApiError 404 for a name that is
        not served, 503 if it cannot load or the server shuts down."""
        model = self.known(name)
        if not model.loaded:
            model.admission.check_open()
        model.take()
        _taken.get().append(model)
        if self._budget is None or model.loaded:
            await model.ready()
            return model
        async with self._making_room:
            if not model.loaded:
                await self._make_room(model)
            await model.ready(self._make_room)  # what it takes is known for certain once it is there
        return model

    async def _make_room(self, wanted: ServedModel) -> None:
        """Unloads models without a request, the one last used longest ago first, until there is room. ApiError 503 where there
        is none now, or never."""
        assert self._budget is not None
        takes = f"{wanted.name} takes {wanted.bytes / 2**30:.2f} GiB"
        if wanted.bytes > self._budget:
            why = f"{takes}, more than the memory budget of {self._budget / 2**30:g} GiB"
            why += "; raise --memory-budget, or lower --kv-tokens."
            raise ApiError(503, why, "model", "model_not_loaded")
        while wanted.bytes + sum(model.bytes for model in self.loaded) > self._budget:
            idle = [model for model in self.loaded if not model.users]
            if not idle:
                why = f"{takes}, for which the memory budget has no room now; try again later, or another model."
                raise ApiError(503, why, "model", "model_not_loaded", retry_s=5)
            await min(idle, key=lambda model: model.used_at).retire()

    async def retire_idle(self) -> None:
        """Unloads models that nobody has used for long enough."""
        for model in self.loaded:
            if model.expired:
                await model.retire()

    async def find_tagged(self, name: str, keep_s: float | None = None) -> ServedModel:
        """``find`` for Ollama's programs, which put a tag behind names that have none; ``keep_s`` is the model's from now on."""
        model = await self.find(self.known_tagged(name).name)
        if keep_s is not None:
            model.keep_s = keep_s
        return model

    async def unload(self, name: str) -> ServedModel:
        """Unloads such a model, once it has no request. ApiError 404 for a name that is not served."""
        model = self.known_tagged(name)
        model.keep_s = 0.0
        await model.retire()
        return model

    def known_tagged(self, name: str) -> ServedModel:
        """``known`` for such programs."""
        return self.known(name.removesuffix(":latest") if name not in self.by_name else name)

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
