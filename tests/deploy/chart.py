"""The chart as Helm renders it: value sets, their objects, and ways to find them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "kvxfer"
VALUE_SETS = sorted((ROOT / "deploy" / "helm" / "examples").glob("*.yaml"))
RELEASE, NAMESPACE = "kvxfer", "llm"

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Container:
    """A container of a pod, with the name of the object that makes the pod."""

    owner: str
    component: str
    pod: Object
    spec: Object

    @property
    def arguments(self) -> list[str]:
        return [*self.spec.get("args", [])]

    @property
    def environment(self) -> dict[str, Object]:
        return {entry["name"]: entry for entry in self.spec.get("env", [])}


@dataclass(frozen=True, slots=True)
class Rendered:
    """All objects of a release."""

    name: str
    values: Object
    objects: list[Object]
    notes: str

    def of(self, *kinds: str) -> list[Object]:
        return [one for one in self.objects if one["kind"] in kinds]

    def one(self, kind: str, name: str) -> Object:
        [found] = [one for one in self.of(kind) if one["metadata"]["name"] == name]
        return found

    def pods(self) -> Iterator[tuple[Object, Object]]:
        """Yields each object that makes pods, with its pod template."""
        for one in self.objects:
            if one["kind"] == "Deployment":
                yield one, one["spec"]["template"]
            elif one["kind"] == "LeaderWorkerSet":
                yield one, one["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
                yield one, one["spec"]["leaderWorkerTemplate"]["workerTemplate"]
            elif one["kind"] == "Pod":
                yield one, one

    def containers(self) -> Iterator[Container]:
        for owner, pod in self.pods():
            component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
            for spec in pod["spec"]["containers"]:
                name = f"{owner['kind']} {owner['metadata']['name']}"
                yield Container(name, component, pod, spec)

    def secret(self, name: str) -> dict[str, str]:
        data = self.one("Secret", name)["data"]
        return {key: base64.b64decode(value).decode() for key, value in data.items()}


def render(
    values: Mapping[str, Any] | None = None,
    *,
    name: str = "defaults",
    release: str = RELEASE,
    cluster: helm_python.Config | None = None,
) -> Rendered:
    """Returns what `helm install` would send to the cluster. Helm's `lookup` reads `cluster`."""
    with helm_python.Chart.load(CHART) as chart:
        given = dict(values or {})
        how: dict[str, Any] = {"name": release, "namespace": NAMESPACE}
        files = (
            chart.render(given, **how)
            if cluster is None
            else cluster.render(chart, given, **how, is_upgrade=True)
        )
        merged = chart.merge_values(given)
    objects = [
        document
        for path, text in files.items()
        if path.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document
    ]
    return Rendered(name, merged, objects, files["kvxfer/templates/NOTES.txt"])


def value_set(path: Path) -> Object:
    return yaml.safe_load(path.read_text()) or {}


def vllm_transfer(container: Container) -> Object:
    """Returns the --kv-transfer-config of a vLLM container."""
    [text] = [a for a in container.arguments if a.startswith("--kv-transfer-config=")]
    transfer: Object = json.loads(text.partition("=")[2])
    return transfer
