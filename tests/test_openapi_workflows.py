"""Sequences of requests from the OpenAPI schema (schemathesis, stateful): later requests read,
change and delete what earlier ones created, in any order.

Each answer is one that the schema describes, and no server error but the 503s named below. A
created resource can be read; a deleted one cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import Case, Response
from schemathesis.checks import CheckFunction, not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ensure_resource_availability,
    response_schema_conformance,
    status_code_conformance,
    use_after_free,
)

from tests.test_openapi_contract import TOKEN, control_plane

_LAYOUT = {
    "num_layers": 2,
    "num_kv_heads": 2,
    "head_size": 8,
    "dtype": "float32",
    "block_size": 16,
}
_WORKERS = [
    {
        "instance_id": f"{role}-0",
        "role": role,
        "model": "m",
        "engine_address": f"kvx://127.0.0.1:1/{number:032x}",
        "http_address": "http://127.0.0.1:9",
        "layout": _LAYOUT,
        "num_blocks": 16,
        "fabrics": ["tcp"],
        "state": "ready",
        "incarnation": "of this test",
    }
    for number, role in enumerate(("prefill", "decode"))
]

schema = schemathesis.openapi.from_asgi("/openapi.json", control_plane())


class Workflow(schema.as_state_machine()):
    def get_call_kwargs(self, case: Case) -> dict[str, Any]:
        return {"headers": {"Authorization": f"Bearer {TOKEN}"}}

    def before_call(self, case: Case) -> None:
        """Replaces some random bodies, which are hardly ever a valid worker, request or update."""
        chosen = len(repr(case.body)) % 3
        if case.operation.label == "POST /v1/instances" and chosen < len(_WORKERS):
            case.body = _WORKERS[chosen]
        elif case.operation.label == "POST /v1/transfers" and chosen:
            case.body = {"model": "m"}
        elif case.operation.label == "POST /v1/weights/updates" and chosen:
            case.body = {"model": "m", "version": 1}

    def validate_response(
        self,
        response: Response,
        case: Case,
        additional_checks: Sequence[CheckFunction] = (),
        **kwargs: Any,
    ) -> None:
        if response.status_code == 503:
            # There is no pair without a fleet, and this control plane is stopping.
            assert response.json()["code"] in ("no-capacity", "control-plane-unavailable")
            return
        case.validate_response(
            response,
            checks=[
                not_a_server_error,
                status_code_conformance,
                content_type_conformance,
                response_schema_conformance,
                use_after_free,
                ensure_resource_availability,
            ],
        )


TestWorkflow = Workflow.TestCase
TestWorkflow.settings = settings(
    max_examples=30,
    stateful_step_count=12,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
