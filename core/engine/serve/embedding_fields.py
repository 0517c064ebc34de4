"""What requests for embeddings and rankings may say."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine.formats.pooling import Pooling

from .fields import AskedOfOllama, Body, ContextOption, Listed, Prompts
from .keep_alive import KeepAlive


class EmbeddingBody(Body):
    """POST /v1/embeddings: OpenAI's fields, vLLM's ``normalize``, ``priority`` and ``cache_salt``, and ``pooling``."""

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    """Taken, and without effect."""
    pooling: Pooling | None = None
    normalize: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None


class RankedDocument(Body):
    text: str


class RerankBody(Body):
    """POST /v1/rerank: the fields that Jina's, Cohere's and vLLM's have in common, and ``priority`` and ``cache_salt``."""

    model: str | None = None
    query: str
    documents: Listed[str | RankedDocument] = Field(min_length=1)
    top_n: int | None = Field(default=None, ge=1)
    """So many of the best alone."""
    return_documents: bool | None = None
    """False leaves the texts out of the answer."""
    priority: int | None = None
    cache_salt: str | None = None


class EmbedAsked(AskedOfOllama):
    """POST /api/embed. Clients set ``truncate`` unasked; a text is never cut, and one that is too long is refused."""

    model: str
    input: str | Listed[str]
    truncate: bool | None = None
    dimensions: int | None = None
    options: ContextOption | None = None
    keep_alive: KeepAlive | None = None


class OneEmbedAsked(AskedOfOllama):
    """POST /api/embeddings, Ollama's older form."""

    model: str
    prompt: str = Field(min_length=1)
    options: ContextOption | None = None
    keep_alive: KeepAlive | None = None
