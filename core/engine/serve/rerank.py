"""POST /v1/rerank: which documents answer a query, by a model that reads each with it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from engine.runtime.pooling import stacked

from .embedding_fields import RerankBody
from .embeddings import MAX_INPUTS, begin, tokens_of
from .errors import ApiError, named
from .keys import salt_of
from .models import Models
from .respond import last_outputs, written
from .sse import answered


def routes(models: Models) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/rerank")
    @router.post("/v2/rerank", include_in_schema=False)  # as Cohere's clients ask
    async def rerank(body: RerankBody, request: Request) -> Response:
        """The documents by how well they answer the query, the best first; those of equal scores in their own order."""
        model = await models.find(body.model)
        texts = [given if isinstance(given, str) else given.text for given in body.documents]
        if len(texts) > MAX_INPUTS:
            raise ApiError(400, f"There are {len(texts)} documents; at most {MAX_INPUTS} are taken.", "documents")
        beginning = begin(
            model,
            texts,
            lambda text, *order: model.llm.prepare_ranking(body.query, text, *order),
            request.state.caller,
            model.priority(body.priority),
            salt_of(request.state.caller, body.cache_salt or ""),
        )
        with named({"input": "documents"}):
            generation = await answered(request, beginning)
        outputs = await last_outputs(request, generation)
        tokens = tokens_of(outputs)

        def items() -> list[dict[str, Any]]:
            scores = stacked(outputs)[:, 0].tolist()
            best = sorted(range(len(texts)), key=lambda n: -scores[n])[: body.top_n]
            return [_item(n, scores[n], None if body.return_documents is False else texts[n]) for n in best]

        answer = {
            "id": f"rerank-{request.state.request_id}",
            "model": model.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        return await written(lambda: {**answer, "results": items()})

    return router


def _item(index: int, score: float, text: str | None) -> dict[str, Any]:
    item = {"index": index, "relevance_score": score}
    return item if text is None else {**item, "document": {"text": text}}
