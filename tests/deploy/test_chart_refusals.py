"""Invalid values are refused by name, before anything is installed."""

from __future__ import annotations

from typing import Any

import helm_python
import pytest

from tests.deploy.chart import render

BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "a misspelt value": (
        {"controlPlane": {"replica": 3}},
        "at '/controlPlane': additional properties 'replica' not allowed",
    ),
    "a count that is text": (
        {"router": {"replicas": "two"}},
        "at '/router/replicas': got string, want integer",
    ),
    "an invalid port": (
        {"controlPlane": {"port": 80800}},
        "at '/controlPlane/port': maximum: got 80,800, want 65,535",
    ),
    "an unknown engine": (
        {"workers": {"engine": "vLLM"}},
        "at '/workers/engine': value must be one of 'reference', 'vllm'",
    ),
    "an unknown fabric": (
        {"workers": {"decode": {"fabrics": ["rdma"]}}},
        "at '/workers/decode/fabrics/0': value must be one of 'local', 'verbs', 'ofi', 'tcp'",
    ),
    "a device without its domain": (
        {"workers": {"rdma": {"resource": "mlx5_0"}}},
        "at '/workers/rdma/resource': 'mlx5_0' does not match pattern",
    ),
    "a registry that is not Redis": (
        {"registry": {"kind": "external", "external": {"url": "http://redis:6379"}}},
        "at '/registry/external/url': 'http://redis:6379' does not match pattern",
    ),
    "a drain that leaves no time": (
        {"workers": {"drainSeconds": 5}},
        "at '/workers/drainSeconds': minimum: got 5, want 20",
    ),
    "huge pages of an invalid size": (
        {"workers": {"hugepages": {"size": "2MB"}}},
        "at '/workers/hugepages/size': value must be one of '2Mi', '1Gi'",
    ),
    "an invalid argument": (
        {"router": {"extraArgs": ["attempts=2"]}},
        "at '/router/extraArgs/0': 'attempts=2' does not match pattern",
    ),
    "replicas that share nothing": (
        {"controlPlane": {"replicas": 3}},
        "needs a registry that they share; set registry.kind to bundled or external",
    ),
    "an external registry without a Redis": (
        {"registry": {"kind": "external"}},
        "registry.kind is external and no Redis is named; set registry.external.url",
    ),
    "a registry named twice": (
        {"registry": {"kind": "external", "external": {"url": "redis://r", "existingSecret": "s"}}},
        "registry.external: both url and existingSecret are set; keep one of them",
    ),
    "workers without a control plane": (
        {"controlPlane": {"enabled": False}},
        "set controlPlane.externalUrl to the control plane they belong to",
    ),
    "workers without the secrets of their control plane": (
        {"controlPlane": {"enabled": False, "externalUrl": "http://kvxfer:8080"}},
        "auth.existingSecret is empty; name the Secret with the cluster key and tokens",
    ),
    "pods of the platform's users that are root": (
        {
            "platformUsers": True,
            "workers": {"decode": {"rdma": {"resource": "rdma/shared"}}},
        },
        "workers.decode: platformUsers is true and rdma.asRoot makes pods run as root",
    ),
    "one id for all workers": (
        {"workers": {"prefill": {"extraArgs": ["--instance-id=p"]}}},
        "workers.prefill: extraArgs has --instance-id=p, which all its pods would be named",
    ),
    "one id for all workers, as a variable": (
        {"workers": {"extraEnv": [{"name": "KVXFER_INSTANCE_ID", "value": "p"}]}},
        "workers.prefill: extraEnv has KVXFER_INSTANCE_ID, which all its pods would be named",
    ),
    "two control planes": (
        {"controlPlane": {"externalUrl": "http://kvxfer:8080"}},
        "controlPlane.externalUrl is http://kvxfer:8080 and controlPlane.enabled is true",
    ),
    "spans that are scattered": (
        {
            "tracing": {"enabled": True},
            "registry": {"kind": "bundled"},
            "controlPlane": {"replicas": 2},
        },
        "tracing.endpoint is empty and the control plane has several replicas",
    ),
    "an autoscaler of nothing": (
        {"autoscaler": {"enabled": True}, "workers": {"decode": {"enabled": False}}},
        "autoscaler.enabled is true; it needs controlPlane.enabled, workers.prefill.enabled",
    ),
    "an autoscaler with its own backend": (
        {"autoscaler": {"enabled": True, "policy": {"backend": {"kind": "processes"}}}},
        "autoscaler.policy.backend is the chart's to set; leave it out",
    ),
    "vLLM without a model": (
        {"workers": {"decode": {"engine": "vllm"}}},
        "workers.decode: engine is vllm and model is empty; set workers.model",
    ),
    "a group of the reference engine": (
        {"workers": {"kind": "LeaderWorkerSet", "groupSize": 2}},
        "workers.prefill: groupSize is 2 with kind LeaderWorkerSet and engine reference",
    ),
    "a rollout that cannot move": (
        {"workers": {"rollout": {"maxSurge": 0, "maxUnavailable": 0}}},
        "workers.prefill: rollout.maxSurge and maxUnavailable are both 0",
    ),
    "a setting that the chart makes": (
        {"workers": {"engine": "vllm", "model": "m", "connector": {"instance_id": "x"}}},
        "workers.prefill: connector.instance_id is the chart's to set",
    ),
    "an unknown option of the transfer engine": (
        {"workers": {"transferEngine": {"exclude-nics": ["mlx5_8"]}}},
        "at '/workers/transferEngine': additional properties 'exclude-nics' not allowed",
    ),
    "a list of options within another": (
        {"workers": {"decode": {"transferEngine": {"nics": [["mlx5_0"]]}}}},
        "at '/workers/decode/transferEngine/nics/0': got array, want integer or string",
    ),
    "an unknown option of the transfer engine's tuning": (
        {"workers": {"transferEngine": {"tuning": {"path-mtu": 4096}}}},
        "at '/workers/transferEngine/tuning': additional properties 'path-mtu' not allowed",
    ),
    "options of the transfer engine in a map": (
        {"workers": {"transferEngine": {"nics": {"lanes": 4}}}},
        "workers.prefill: transferEngine.nics is a map; only transferEngine.tuning is one",
    ),
    "an option of the transfer engine that the chart sets": (
        {"workers": {"transferEngine": {"port": 9000}}},
        "workers.prefill: transferEngine.port is the chart's to set",
    ),
    "an option of the transfer engine that is set twice": (
        {
            "workers": {
                "engine": "vllm",
                "model": "m",
                "transferEngine": {"traffic_class": 4},
                "connector": {"traffic_class": 2},
            }
        },
        "workers.prefill: both transferEngine.traffic_class and connector.traffic_class are set",
    ),
}


@pytest.mark.parametrize(("values", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_values_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        render(values)
    assert message in str(refused.value)
