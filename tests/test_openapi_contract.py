"""Requests made of the OpenAPI schema itself (schemathesis): no server error, no surprise.

Whatever a request holds, the answer is one that the schema describes, and never a 5xx.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from kvxfer.api.app import create_app
from kvxfer.api.settings import Settings
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.web.tokens import Scope, watch_tokens
from tests.virtual_time import VirtualClock
from verify.control_plane import CLUSTER_KEY

TOKEN = "token-with-every-scope"


@schemathesis.serializer("application/x-protobuf")
def as_it_is(context: Any, value: Any) -> bytes:
    """The bytes that were made up: hardly ever a message of OTLP."""
    return value if isinstance(value, bytes) else str(value).encode()


def control_plane() -> FastAPI:
    """One that asks for tokens, and lets this test do everything. No time passes in it."""
    clock = VirtualClock()
    with tempfile.NamedTemporaryFile() as file:
        file.write(f"tester {','.join(Scope)} {TOKEN}\n".encode())
        file.flush()
        tokens = watch_tokens(Path(file.name), clock=clock)
    app = create_app(
        Settings(cluster_key=CLUSTER_KEY, tokens=tokens, rate_limit=0),
        EmbeddedRegistry(clock=clock),
        clock=clock,
    )
    app.state.control_plane.stopping.set()  # a watch ends at once
    return app


schema = schemathesis.openapi.from_asgi("/openapi.json", control_plane())


@schema.parametrize()
@settings(
    max_examples=40,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_every_answer_is_one_that_the_schema_describes(case):
    answer = case.call(headers={"Authorization": f"Bearer {TOKEN}"})
    if answer.status_code == 503:
        # Without a fleet there is no pair, and this control plane says that it is stopping.
        assert answer.json()["code"] in ("no-capacity", "control-plane-unavailable")
        return
    case.validate_response(
        answer,
        checks=[
            not_a_server_error,
            status_code_conformance,
            content_type_conformance,
            response_schema_conformance,
        ],
    )
