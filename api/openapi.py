"""The OpenAPI schema, with what FastAPI does not derive."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from kvxfer.api.access import IGNORED_HEADER, SECURITY_SCHEME
from kvxfer.api.problem_models import LayoutMismatchProblem, Problem
from kvxfer.api.staleness import DESCRIPTION, HEADER
from kvxfer.instances import Change, Snapshot

# Models of responses that FastAPI does not derive from a return type.
_FURTHER_MODELS: Final[tuple[type, ...]] = (Change, Snapshot, Problem, LayoutMismatchProblem)
_MODE: Final[JsonSchemaMode] = "serialization"
_IGNORED: Final = {
    "description": "The members of the body that this version does not know, separated by commas. "
    "Absent if there are none.",
    "schema": {"type": "string"},
}


def describe(app: FastAPI) -> dict[str, Any]:
    """Returns the schema of the application, made once."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        _, further = TypeAdapter.json_schemas(
            [(model, _MODE, TypeAdapter(model)) for model in _FURTHER_MODELS],
            ref_template="#/components/schemas/{model}",
        )
        for path, operations in schema["paths"].items():
            if path.startswith("/v1/") and "get" in operations:
                headers = operations["get"]["responses"]["200"].setdefault("headers", {})
                headers[HEADER] = {"description": DESCRIPTION, "schema": {"type": "number"}}
            for operation in operations.values():
                if "application/json" in operation.get("requestBody", {}).get("content", {}):
                    _describe_ignored(path, operation)
        components = schema["components"]["schemas"]
        for name, model in further["$defs"].items():
            components.setdefault(name, model)
        schema["components"]["schemas"] = dict(sorted(components.items()))
        schema["components"]["securitySchemes"] = {
            SECURITY_SCHEME: {
                "type": "http",
                "scheme": "bearer",
                "description": "A token with any one of the scopes that a route names.",
            }
        }
        app.openapi_schema = schema
    return app.openapi_schema


def _describe_ignored(path: str, operation: dict[str, Any]) -> None:
    """Adds the header of ignored members. Answers to heartbeats, which are made without FastAPI, do
    not have it."""
    if path.endswith("/heartbeat"):
        return
    for status, response in operation["responses"].items():
        if status.startswith("2"):
            response.setdefault("headers", {})[IGNORED_HEADER] = _IGNORED
