from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from fastapi.routing import APIRoute
from openapi_spec_validator import validate
from pydantic import BaseModel, TypeAdapter

from kvxfer import instances as instance_records
from kvxfer import overview as overview_records
from kvxfer import scaling as scale_records
from kvxfer import traces as trace_records
from kvxfer import transfers as transfer_records
from kvxfer.api.routes import (
    block_tables,
    caller,
    handshakes,
    instances,
    operations,
    overview,
    page,
    scale,
    traces,
    transfers,
    watch,
)
from kvxfer.api.schemas import block_tables as block_table_schemas
from kvxfer.api.schemas import instances as instance_schemas
from kvxfer.api.schemas import overview as overview_schemas
from kvxfer.api.schemas import scale as scale_schemas
from kvxfer.api.schemas import traces as trace_schemas
from kvxfer.api.schemas import transfers as transfer_schemas
from kvxfer.api.schemas.problem import LayoutMismatchProblem, Problem
from kvxfer.cli.generated_docs import openapi
from kvxfer.layout import KvLayout

DOCS = Path(__file__).parents[2] / "docs"
SCHEMA = json.loads(openapi())
OPERATIONS = [
    pytest.param(path, method, operation, id=f"{method} {path}")
    for path, methods in SCHEMA["paths"].items()
    for method, operation in methods.items()
]


MODELS_WITH_EXAMPLES = [
    model
    for module in (
        instance_schemas,
        transfer_schemas,
        scale_schemas,
        block_table_schemas,
        overview_schemas,
        trace_schemas,
    )
    for model in vars(module).values()
    if isinstance(model, type)
    and issubclass(model, BaseModel)
    and "examples" in (model.model_config.get("json_schema_extra") or {})
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
    modules = (
        watch,
        instances,
        handshakes,
        transfers,
        block_tables,
        scale,
        overview,
        traces,
        caller,
        operations,
        page,
    )
    routes = {
        (route.path, method.lower())
        for module in modules
        for route in module.router.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods
    }
    assert routes == {(path, method) for path, item in SCHEMA["paths"].items() for method in item}


@pytest.mark.parametrize(("path", "method", "operation"), OPERATIONS)
def test_operation_has_summary_and_documented_errors(path, method, operation):
    assert operation["summary"]
    assert operation["tags"]
    for status, response in operation["responses"].items():
        if status.startswith("2"):
            continue
        (media_type,) = response["content"]
        assert media_type == "application/problem+json"
        content = response["content"][media_type]
        for code, example in content["examples"].items():
            model = LayoutMismatchProblem if code == "layout-mismatch" else Problem
            assert content["schema"] == {"$ref": f"#/components/schemas/{model.__name__}"}
            problem = model.model_validate(example["value"])
            assert (problem.code, problem.status) == (code, int(status))
            assert problem.detail


@pytest.mark.parametrize(("path", "method", "operation"), OPERATIONS)
def test_operation_that_reads_anything_from_the_request_documents_422(path, method, operation):
    reads = "requestBody" in operation or operation.get("parameters")
    assert ("422" in operation["responses"]) == bool(reads)


@pytest.mark.parametrize("model", MODELS_WITH_EXAMPLES, ids=lambda model: model.__name__)
def test_examples_are_valid_and_complete(model):
    for example in model.model_config["json_schema_extra"]["examples"]:
        parsed = model.model_validate(example)
        assert json.loads(parsed.model_dump_json(exclude_unset=True)) == example


def test_bodies_have_examples():
    for operation in (parameter.values[2] for parameter in OPERATIONS):
        if "requestBody" in operation:
            content = operation["requestBody"]["content"]
            if "application/x-protobuf" in content:
                continue
            schema = content["application/json"]["schema"]
            assert resolve(schema)["examples"]


@pytest.mark.parametrize(
    ("schema", "record"),
    [
        (instance_schemas.Layout, KvLayout),
        (instance_schemas.Load, instance_records.Load),
        (instance_schemas.Traffic, instance_records.Traffic),
        (instance_schemas.Reserved, instance_records.Reserved),
        (instance_schemas.Instance, instance_records.Instance),
        (instance_schemas.Lease, instance_records.Lease),
        (instance_schemas.Change, instance_records.Change),
        (instance_schemas.Snapshot, instance_records.Snapshot),
        (transfer_schemas.TransferRequest, transfer_records.TransferRequest),
        (transfer_schemas.Party, transfer_records.Party),
        (transfer_schemas.Transfer, transfer_records.Transfer),
        (transfer_schemas.OpenedTransfer, transfer_records.OpenedTransfer),
        (transfer_schemas.Score, transfer_records.Score),
        (instance_schemas.PublishedBlocks, instance_records.PublishedBlocks),
        (transfer_schemas.PlannedCopy, transfer_records.PlannedCopy),
        (transfer_schemas.PlannedLayer, transfer_records.PlannedLayer),
        (transfer_schemas.PlanSummary, transfer_records.PlanSummary),
        (transfer_schemas.Handshake, transfer_records.Handshake),
        (scale_schemas.ScalePlan, scale_records.ScalePlan),
        (scale_schemas.Demand, scale_records.Demand),
        (scale_schemas.Clip, scale_records.Clip),
        *(
            (getattr(overview_schemas, name), getattr(overview_records, name))
            for name in (
                "RoleSummary",
                "Place",
                "InstanceSummary",
                "TransferSummary",
                "FabricTraffic",
                "PairTraffic",
                "ScalingStep",
                "ScalingSummary",
                "Overview",
            )
        ),
        (trace_schemas.Trace, trace_records.Trace),
        (trace_schemas.TraceSpan, trace_records.TraceSpan),
        (trace_schemas.SpanEvent, trace_records.SpanEvent),
    ],
    ids=lambda value: value.__name__,
)
def test_body_and_record_have_the_same_members_and_defaults(schema, record):
    described = msgspec.inspect.type_info(record)
    assert isinstance(described, msgspec.inspect.StructType | msgspec.inspect.DataclassType)
    theirs = {field.name: field for field in described.fields}
    assert set(schema.model_fields) == set(theirs)
    for name, ours in TypeAdapter(schema).json_schema()["properties"].items():
        if "default" in ours:
            assert default_of(theirs[name]) == ours["default"], name


def default_of(field: msgspec.inspect.Field) -> object:
    made = field.default_factory
    default = field.default if made is msgspec.NODEFAULT else made()
    return msgspec.json.decode(msgspec.json.encode(default))
