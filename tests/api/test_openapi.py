from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path

import pytest
from fastapi.routing import APIRoute
from openapi_spec_validator import validate
from pydantic import TypeAdapter

from kvxfer import instances, overview, scaling, traces, transfers, weight_updates
from kvxfer.api import routes
from kvxfer.api.problem_models import LayoutMismatchProblem, Problem
from kvxfer.cli.generated_docs import openapi
from kvxfer.kv import block_table
from kvxfer.record import Record
from kvxfer.record_schema import example

DOCS = Path(__file__).parents[2] / "docs"
SCHEMA = json.loads(openapi())
OPERATIONS = [
    pytest.param(path, method, operation, id=f"{method} {path}")
    for path, methods in SCHEMA["paths"].items()
    for method, operation in methods.items()
]


# No answer contains these. Their hashes are integers in Python and text only in JSON.
NOT_ANSWERED = (instances.BlockUpdate, instances.PublishBlocks, transfers.TransferRequest)
RECORDS = [
    record
    for module in (instances, transfers, overview, scaling, traces, block_table, weight_updates)
    for record in vars(module).values()
    if isinstance(record, type)
    and issubclass(record, Record)
    and record.__name__ in SCHEMA["components"]["schemas"]
]


def resolve(schema):
    return SCHEMA["components"]["schemas"][schema["$ref"].rpartition("/")[2]]


def test_schema_is_valid_openapi():
    validate(SCHEMA)


def test_committed_schema_is_that_of_the_code():
    assert (DOCS / "openapi.json").read_text() == openapi(), (
        "run `python -m kvxfer.cli.generated_docs docs`"
    )


def test_every_route_is_in_the_schema():
    names = [module.name for module in pkgutil.iter_modules(routes.__path__)]
    modules = [importlib.import_module(f"{routes.__name__}.{name}") for name in names]
    there = {
        (route.path, method.lower())
        for module in modules
        for route in module.router.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods
    }
    assert there == {(path, method) for path, item in SCHEMA["paths"].items() for method in item}


@pytest.mark.parametrize(("path", "method", "operation"), OPERATIONS)
def test_operation_has_summary_and_documented_errors(path, method, operation):
    assert operation["summary"]
    assert operation["tags"]
    for status, response in operation["responses"].items():
        if status.startswith(("2", "3")):
            continue
        (media_type,) = response["content"]
        assert media_type == "application/problem+json"
        content = response["content"][media_type]
        for code, shown in content["examples"].items():
            model = LayoutMismatchProblem if code == "layout-mismatch" else Problem
            assert content["schema"] == {"$ref": f"#/components/schemas/{model.__name__}"}
            problem = model.model_validate(shown["value"])
            assert (problem.code, problem.status) == (code, int(status))
            assert problem.detail


@pytest.mark.parametrize(("path", "method", "operation"), OPERATIONS)
def test_operation_that_reads_anything_from_the_request_documents_422(path, method, operation):
    reads = "requestBody" in operation or operation.get("parameters")
    assert ("422" in operation["responses"]) == bool(reads)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_examples_are_valid(record):
    adapter = TypeAdapter(record)
    parsed = adapter.validate_python(example(record))
    if record not in NOT_ANSWERED:
        assert adapter.validate_json(adapter.dump_json(parsed)) == parsed


def test_bodies_have_examples():
    for operation in (parameter.values[2] for parameter in OPERATIONS):
        if "requestBody" in operation:
            content = operation["requestBody"]["content"]
            if "application/x-protobuf" in content:
                continue
            schema = content["application/json"]["schema"]
            assert resolve(schema)["examples"]


def test_answers_to_bodies_name_what_they_ignore():
    said = {
        (method, path)
        for path, methods in SCHEMA["paths"].items()
        for method, operation in methods.items()
        for status, response in operation["responses"].items()
        if "Kvxfer-Ignored" in response.get("headers", {}) and status.startswith("2")
    }
    takes_json = {
        (method, path)
        for path, methods in SCHEMA["paths"].items()
        for method, operation in methods.items()
        if "application/json" in operation.get("requestBody", {}).get("content", {})
    }
    assert said == takes_json - {("put", "/v1/instances/{instance_id}/heartbeat")}
    assert len(said) > 8
