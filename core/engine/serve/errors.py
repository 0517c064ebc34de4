"""Refusals: a status, and a JSON object in the protocol's form that says what is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from engine.errors import (
    AdmissionError,
    ConfigError,
    EngineError,
    EngineStoppedError,
    RequestError,
    TemplateError,
    TokenizerError,
    UsageError,
)

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_KINDS_OF_ANTHROPIC = _KINDS | {403: "permission_error", 413: "request_too_large", 504: "timeout_error"}
_ASKED_WRONGLY = (AdmissionError, ConfigError, RequestError, TemplateError, TokenizerError, UsageError)
_FOLDERS = re.compile(r"""[^\s'"(]*/(?:[^/:;,()'"\n]+/)*""")
GONE = 499
"""What is logged where nobody is left to answer, as nginx does."""


class FaultDetail(BaseModel):
    """What is wrong, in a sentence, and the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class Fault(BaseModel):
    """A refusal; ``type`` is there in Anthropic's protocol alone."""

    type: Literal["error"] | None = None
    error: FaultDetail


class OllamaFault(BaseModel):
    """A refusal in Ollama's protocol."""

    error: str


class ClientGoneError(Exception):
    """Nobody is left to answer."""


class ApiError(Exception):
    """A request that gets ``status`` and a sentence; ``param`` is the field at fault, ``retry_s`` when to come again."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_s = status, message, param, code, retry_s

    @property
    def headers(self) -> dict[str, str]:
        challenge = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        return challenge | ({} if self.retry_s is None else {"Retry-After": str(self.retry_s)})

    def body(self, path: str) -> dict[str, Any]:
        """For a request to ``path``: Anthropic's protocol has a type at the top, and Ollama's a sentence alone."""
        if path.startswith("/api/"):
            return {"error": self.message}
        anthropic = path.startswith("/v1/messages")
        kinds, fault = (_KINDS_OF_ANTHROPIC, "api_error") if anthropic else (_KINDS, "server_error")
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else fault)
        if anthropic and self.status == 503 and self.retry_s is not None:
            kind = "overloaded_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return ({"type": "error"} if anthropic else {}) | {"error": error}

    def response(self, path: str) -> Response:
        """The refusal of a request to ``path``."""
        return JSONResponse(self.body(path), self.status, self.headers)


def without_folders(sentence: str) -> str:
    """A sentence for a client, whom it does not concern where files lie: of paths the last parts alone."""
    return _FOLDERS.sub("", sentence)


def api_error(error: Exception) -> ApiError:
    """Any exception as a refusal; what is no fault of the request does not tell what it is."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):  # whose sentence may begin with a field's name
        return ApiError(400, str(error), error.field)
    sentence = str(error)[:1].upper() + str(error)[1:]
    if isinstance(error, ValidationError):  # of a chat that another protocol's fields were turned into
        return _invalid(error.errors())
    if isinstance(error, AdmissionError):
        return ApiError(400, sentence, code="context_length_exceeded")
    if isinstance(error, _ASKED_WRONGLY):
        return ApiError(400, sentence)
    if isinstance(error, EngineStoppedError):
        return ApiError(503, sentence, code="engine_stopped")
    if isinstance(error, EngineError):
        return ApiError(500, sentence)
    return ApiError(500, "The server has a defect; its log tells more under this request's id.")


@contextmanager
def named(names: Mapping[str, str | None]) -> Iterator[None]:
    """What is wrong with a request by its own names of fields, where it was turned into what has others; None where several may
    be at fault."""
    try:
        yield
    except (ApiError, ValidationError, *_ASKED_WRONGLY) as error:
        raise _renamed(api_error(error), names) from error


def _renamed(fault: ApiError, names: Mapping[str, str | None]) -> ApiError:
    old, message = fault.param, fault.message
    if old is None or old not in names:
        return fault
    new = names[old]
    for begin in ("", "The field "):
        if new is not None and message.startswith(f"{begin}{old} "):
            message = f"{begin}{new}{message.removeprefix(f'{begin}{old}')}"
    return ApiError(fault.status, message, new, fault.code, fault.retry_s)


def add_handlers(app: FastAPI) -> None:
    """All faults of requests in one form."""

    async def refuse(request: Request, error: Exception) -> Response:
        return api_error(error).response(request.url.path)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _invalid(error.errors(), error.body).response(request.url.path)

    async def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        sentences = {
            400: _unreadable(error.__cause__),
            404: f"There is nothing at {request.url.path}.",
            405: "This method is not for this path.",
        }
        response = ApiError(error.status_code, sentences.get(error.status_code, str(error.detail))).response(
            request.url.path
        )
        response.headers.update(error.headers or {})
        return response

    async def left(request: Request, error: Exception) -> Response:
        request.state.figures["gone"] = True
        return Response(status_code=GONE)

    app.add_exception_handler(Exception, refuse)
    app.add_exception_handler(ClientGoneError, left)
    app.add_exception_handler(ApiError, refuse)
    app.add_exception_handler(EngineError, refuse)
    app.add_exception_handler(ValidationError, refuse)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, unknown)


def _unreadable(why: BaseException | None) -> str:
    """What is wrong with bytes that FastAPI cannot parse at all."""
    if isinstance(why, RecursionError):
        return "The body is nested too deep to be read; send fewer levels of lists and objects."
    if isinstance(why, ValueError) and not isinstance(why, UnicodeError):
        return "The body has a whole number of more digits than are read; send a smaller one."
    return "The body is no JSON in UTF-8."


def _invalid(errors: Sequence[Mapping[str, Any]], body: Any = None) -> ApiError:
    """One of the faults that the schema finds: unsupported fields and objects that cannot be used before all others; else of
    the first field's the one that lies deepest, since a value that may be of several kinds has a fault for each."""
    if errors[0]["type"] == "json_invalid":
        return ApiError(400, "The body is no JSON.")
    telling = ("extra_forbidden", "too_deep", "finite_number")
    first = next((error for error in errors if error["type"] in telling), None)
    if first is None:
        field = _path(errors[0], body)[:1]
        likely = [error for error in errors if _path(error, body)[:1] == field]
        first = max(likely, key=lambda error: (len(_path(error, body)), not error["type"].endswith("_type")))
    param, kind = ".".join(map(str, _path(first, body))) or None, first["type"]
    if kind in ("extra_forbidden", "none_required") or (kind == "too_long" and not first["ctx"]["max_length"]):
        return ApiError(400, f"The field {param} is not supported here.", param, "unknown_parameter")
    if param is None:
        return ApiError(400, "The body must be a JSON object, sent as application/json.")
    if kind == "missing" or _lacks_type(first):
        return ApiError(400, f"The field {param} is missing.", param, "missing_required_parameter")
    said = first["msg"][:1].lower() + first["msg"][1:]
    if kind == "union_tag_invalid":
        said = f"input should be one of {first['ctx']['expected_tags']}"
    elif kind == "union_tag_not_found":
        said = "input should be an object"
    return ApiError(400, f"The field {param} is wrong: {said}.", param)


def _path(error: Mapping[str, Any], body: Any) -> list[str | int]:
    """Where in the body a fault is: of pydantic's path what the body has, without the names of kinds that a value may be of.
    Of what another protocol's fields were turned into, the field."""
    beginning, *parts = error["loc"]
    if beginning not in ("body", "query", "path"):
        return [beginning]
    if error["type"] == "missing":
        return [*_found(parts[:-1], body)[1], *parts[-1:]]
    _, path = _found(parts, body)
    return [*path, "type"] if error["type"] == "union_tag_invalid" or _lacks_type(error) else path


def _found(parts: Sequence[str | int], at: Any) -> tuple[bool, list[str | int]]:
    """What of a path is there, and whether its last part is: a kind may be called as a field beside it, such as ``text``."""
    if not parts:
        return False, []
    part, *rest = parts
    without = _found(rest, at)
    if not (part in at if isinstance(at, dict) else isinstance(at, list) and part in range(len(at))):
        return without
    last, path = _found(rest, at[part])
    return max((last or not rest, [part, *path]), without, key=lambda found: (found[0], len(found[1])))


def _lacks_type(error: Mapping[str, Any]) -> bool:
    return error["type"] == "union_tag_not_found" and isinstance(error["input"], dict)
