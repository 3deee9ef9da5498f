"""Objects against the JSON schemas that Kubernetes publishes for each of its versions.

The package kubernetes-validate has these schemas, but none for objects of operators. Those below
cover the fields that the chart writes.
"""

from __future__ import annotations

import functools
import json
import re
from importlib.resources import files
from typing import Any

from jsonschema_rs import Draft202012, Draft202012Validator, Registry

OLDEST, NEWEST = "1.28", "1.37"
_SCHEMAS = files("kubernetes_validate") / "kubernetes-json-schema"
_NAME = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"}
_STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}


def _strict(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


_SELECTOR = _strict(["matchLabels"], matchLabels={**_STRINGS, "minProperties": 1})
_INTERVAL = {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"}
_KEY = _strict(["name", "key"], name=_NAME, key={"type": "string"})
_ENDPOINT = _strict(
    ["port", "path"],
    port={"type": "string"},
    path={"type": "string"},
    interval=_INTERVAL,
    scheme={"enum": ["http", "https"]},
    authorization=_strict(["credentials"], type={"const": "Bearer"}, credentials=_KEY),
    tlsConfig=_strict(["ca"], serverName={"type": "string"}, ca=_strict(["secret"], secret=_KEY)),
)
_RULE = {
    "type": "object",
    "properties": {
        "alert": {"type": "string"},
        "record": {"type": "string"},
        "expr": {"type": ["string", "number"]},
        "for": _INTERVAL,
        "keep_firing_for": _INTERVAL,
        "labels": _STRINGS,
        "annotations": _STRINGS,
    },
    "required": ["expr"],
    "additionalProperties": False,
    "oneOf": [{"required": ["alert"]}, {"required": ["record"]}],
}
_GROUP = _strict(
    ["name", "rules"],
    name={"type": "string"},
    interval=_INTERVAL,
    rules={"type": "array", "items": _RULE, "minItems": 1},
)
# The parts of operators' specs that the chart writes. Kubernetes' schema checks pod templates.
_CUSTOM: dict[tuple[str, str], dict[str, Any]] = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _strict(
        ["selector", "endpoints"],
        selector=_SELECTOR,
        endpoints={"type": "array", "items": _ENDPOINT, "minItems": 1},
    ),
    ("monitoring.coreos.com/v1", "PodMonitor"): _strict(
        ["selector", "podMetricsEndpoints"],
        selector=_SELECTOR,
        podMetricsEndpoints={"type": "array", "items": _ENDPOINT, "minItems": 1},
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _strict(
        ["groups"], groups={"type": "array", "items": _GROUP, "minItems": 1}
    ),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): _strict(
        ["leaderWorkerTemplate"],
        replicas={"type": "integer", "minimum": 0},
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        rolloutStrategy=_strict(
            ["type"],
            type={"const": "RollingUpdate"},
            rollingUpdateConfiguration=_strict(
                [], maxUnavailable={"type": "integer"}, maxSurge={"type": "integer"}
            ),
        ),
        leaderWorkerTemplate=_strict(
            ["workerTemplate"],
            size={"type": "integer", "minimum": 1},
            restartPolicy={"enum": ["RecreateGroupOnPodRestart", "None"]},
            leaderTemplate={"type": "object"},
            workerTemplate={"type": "object"},
        ),
    ),
}


def problems(one: dict[str, Any], version: str) -> list[str]:
    """Returns the errors that the schemas of a Kubernetes version find in an object."""
    custom = _CUSTOM.get((one["apiVersion"], one["kind"]))
    if custom is None:
        return _errors(_validator(version, one["kind"], one["apiVersion"]), one)
    found = _errors(_validator(version, "ObjectMeta", "meta/v1"), one["metadata"])
    found += _errors(Draft202012Validator(custom), one["spec"])
    for name in ("leaderTemplate", "workerTemplate"):
        if template := one["spec"].get("leaderWorkerTemplate", {}).get(name):
            found += _errors(_validator(version, "PodTemplateSpec", "v1"), template)
    return found


def _errors(validator: Draft202012Validator, one: Any) -> list[str]:
    return [
        f"{'.'.join(map(str, error.instance_path))}: {error.message}"
        for error in validator.iter_errors(one)
    ]


@functools.cache
def _validator(version: str, kind: str, api_version: str) -> Draft202012Validator:
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = _read(version, f"{kind.lower()}-{group}.json")
    return Draft202012Validator(schema, registry=_definitions(version))


@functools.cache
def _definitions(version: str) -> Registry:
    definitions = _read(version, "_definitions.json")
    return Registry([(definitions["$id"], definitions)], draft=Draft202012)


def _read(version: str, name: str) -> Any:
    return json.loads((_SCHEMAS / f"v{version}.0-local-strict" / name).read_text())
