"""The server against its own description: whatever fits it, and whatever does not, no request is a fault of the server."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from engine.serve.errors import Fault, OllamaFault


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_request_is_a_fault_of_the_server(start, mode):
    running = start(max_model_len=48, kv_cache_tokens=4096)  # answers are short, however many tokens are asked for
    schema = schemathesis.openapi.from_url(f"{running.url}/openapi.json")

    def check(case) -> None:
        response = case.call(timeout=60)
        case.validate_response(response, checks=[not_a_server_error])
        if 400 <= response.status_code < 500 and not case.path.startswith("/health/"):
            (OllamaFault if case.path.startswith("/api/") else Fault).model_validate(response.json())

    bounds = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    tried = 0
    for operation in (found.ok() for found in schema.get_all_operations()):
        if mode is GenerationMode.NEGATIVE and operation.method == "get":
            continue  # there is nothing that could be wrong
        bounds(given(case=operation.as_strategy(generation_mode=mode))(check))()
        tried += 1
    assert tried > 8
    running.wait_until_free()


def test_bodies_and_refusals_are_described(running):
    described = running.http.get("/openapi.json").json()
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            assert {"4XX", "5XX"} <= operation["responses"].keys() and "422" not in operation["responses"], path
            if method == "post":
                body = operation["requestBody"]["content"]["application/json"]["schema"]
                assert described["components"]["schemas"][body["$ref"].split("/")[-1]]["additionalProperties"] is False
