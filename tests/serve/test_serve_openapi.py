"""Whatever the OpenAPI document allows, and much that it does not: no request makes the server fail."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="ping-llm serve needs the extra `serve`")
pytest.importorskip("schemathesis", reason="schemathesis is not installed")

import schemathesis
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from ping_llm.serve.access import Limits, ServeSettings
from ping_llm.serve.api import router
from ping_llm.serve.server import make_app
from serving_fixtures import NODES, service, some_store

EXAMPLES = 25
CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
ROUTES = [
    (route.path, method) for route in router.routes if isinstance(route, APIRoute) for method in route.methods or ()
]
ALLOWED = [(*route, GenerationMode.POSITIVE) for route in [*ROUTES, ("/healthz", "GET")]]
FORBIDDEN = [
    (path, method, GenerationMode.NEGATIVE)
    for path, method in ROUTES
    if path not in {"/api/v1/model", "/api/v1/places", "/api/v1/read"}  # to which anything may be sent
]

schemathesis.openapi.format("node", st.sampled_from([*NODES, "203.0.113.250", "::", "0.0.0.0", " 192.0.2.1", "1.2.3"]))


@pytest.fixture(scope="module")
def api() -> Iterator[Any]:
    limits = Limits(seconds=10)
    with service(None, some_store(), limits) as shared:
        app = make_app(shared, ServeSettings(limits=limits, open_to_all=True))
        yield schemathesis.openapi.from_asgi("/openapi.json", app)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method", "mode"), [*ALLOWED, *FORBIDDEN])
def test_no_request_makes_the_server_fail(api: Any, path: str, method: str, mode: GenerationMode) -> None:
    asked = 0

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        nonlocal asked
        asked += 1
        reply = case.call()
        case.validate_response(reply, checks=CHECKS)
        if reply.status_code != 200:
            assert list(reply.json()) == ["error"]

    ask()
    assert asked
