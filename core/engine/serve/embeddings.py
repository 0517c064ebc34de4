"""POST /v1/embeddings, and Ollama's /api/embed and /api/embeddings."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from engine.backend.v1 import Array
from engine.errors import AdmissionError, FormatError, ModelError, RequestError
from engine.runtime.outputs import RequestOutput
from engine.runtime.pooling import PoolingParams, stacked
from engine.runtime.prepared import Prepared

from .embedding_fields import EmbedAsked, EmbeddingBody, OneEmbedAsked
from .errors import ApiError, named, without_folders
from .generation import Generation
from .keys import salt_of
from .model import ServedModel
from .models import Models
from .respond import last_outputs, written
from .sse import answered

MAX_INPUTS = 2048  # of a request, as OpenAI has it
Inputs = Sequence[str | list[int]]
T = TypeVar("T")


def routes(models: Models) -> APIRouter:
    router = APIRouter()

    async def embed(
        model: ServedModel,
        inputs: Inputs,
        params: PoolingParams,
        request: Request,
        priority: int | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        salt = salt_of(request.state.caller, cache_salt or "")
        beginning = begin(
            model,
            inputs,
            lambda given, *order: model.llm.prepare_embedding(given, params, *order),
            request.state.caller,
            model.priority(priority),
            salt,
        )
        with named({"prompt": "input"}):
            generation = await answered(request, beginning)
        return await last_outputs(request, generation)

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        """A vector for each text, or for each list of token ids."""
        model = await models.find(body.model)
        params = PoolingParams(body.pooling, body.normalize, body.dimensions)
        outputs = await embed(model, _listed(body.input), params, request, body.priority, body.cache_salt)
        tokens = tokens_of(outputs)
        answer = {
            "object": "list",
            "model": model.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        write = _coded if body.encoding_format == "base64" else _plain

        def items() -> list[dict[str, Any]]:
            return [_item(index, value) for index, value in enumerate(write(stacked(outputs)))]

        return await written(lambda: {**answer, "data": items()})

    @router.post("/api/embed")
    async def api_embed(body: EmbedAsked, request: Request) -> Response:
        """The same in Ollama's form."""
        start = time.monotonic()
        model = await models.find_tagged(body.model, body.keep_alive)
        model.check_context(body.options)
        outputs = await embed(model, _listed(body.input), PoolingParams(dimensions=body.dimensions), request)
        answer = {
            "model": model.name,
            "total_duration": int((time.monotonic() - start) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": tokens_of(outputs),
        }
        return await written(lambda: {**answer, "embeddings": _plain(stacked(outputs))})

    @router.post("/api/embeddings")
    async def api_embeddings(body: OneEmbedAsked, request: Request) -> Response:
        """One text's, in Ollama's older form."""
        model = await models.find_tagged(body.model, body.keep_alive)
        model.check_context(body.options)
        outputs = await embed(model, [body.prompt], PoolingParams(), request)
        return await written(lambda: {"embedding": _plain(stacked(outputs))[0]})

    return router


async def begin(
    model: ServedModel,
    inputs: Sequence[T],
    prepare: Callable[[T, int, bytes, asyncio.Semaphore], Awaitable[Prepared]],
    caller: str,
    priority: int,
    salt: bytes,
) -> Generation:
    """Takes places for a request, for half of all at most, once it can begin: its inputs, of which ``prepare`` makes the engine's
    requests, run so many at a time. ApiError or EngineError where it is wrong or there is no room; ``Generation.close`` must be
    called in the end."""
    start = time.monotonic()
    weight = min(len(inputs), max(model.admission.capacity // 2, 1))
    model.admission.check(caller, weight)
    gate = asyncio.Semaphore(weight)
    try:
        prepared = [await prepare(given, priority, salt, gate) for given in inputs]
    except AdmissionError as error:
        raise ApiError(400, str(error), "input", "context_length_exceeded") from error
    except RequestError as error:
        if isinstance(error.__cause__, (FormatError, ModelError)):  # the model's files are at fault
            raise ApiError(400, without_folders(str(error))) from error
        raise
    return Generation(model, prepared, model.admission.enter(caller, weight, priority), start)


def _listed(given: Any) -> Inputs:
    """ApiError 400 where there is nothing, or too much, to embed."""
    one = isinstance(given, str) or (given and isinstance(given[0], int))
    inputs = [given] if one else given
    if not inputs:
        raise ApiError(400, "The input is empty; give a text or token ids to embed.", "input")
    if len(inputs) > MAX_INPUTS:
        raise ApiError(400, f"There are {len(inputs)} inputs; at most {MAX_INPUTS} are taken.", "input")
    return inputs


def tokens_of(outputs: Sequence[RequestOutput]) -> int:
    return sum(len(output.prompt_token_ids) for output in outputs)


def _plain(vectors: Array) -> list[Any]:
    return list(vectors.tolist())


def _coded(vectors: Array) -> list[Any]:
    """Each as little-endian f32 in base64."""
    return [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]


def _item(index: int, embedding: Any) -> dict[str, Any]:
    return {"object": "embedding", "index": index, "embedding": embedding}
