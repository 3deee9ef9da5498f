"""The Kubernetes example of SGLang: every name in it exists, in the program or the example."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from kvxfer.connectors.sglang import plugin
from kvxfer.connectors.sglang.settings import BackendSettings

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy" / "examples").glob("*.yaml"))
MANIFESTS = [one for file in FILES for one in yaml.safe_load_all(file.read_text())]
SOURCES = "\n".join(file.read_text() for file in (ROOT / "kvxfer").rglob("*.py"))
KEY = "0123456789abcdef"


def containers() -> Iterator[tuple[str, dict[str, Any]]]:
    for manifest in MANIFESTS:
        if manifest["kind"] == "Deployment":
            for container in manifest["spec"]["template"]["spec"]["containers"]:
                yield manifest["metadata"]["name"], container


CONTAINERS = [pytest.param(container, id=name) for name, container in containers()]


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: str(entry.get("value", KEY)) for entry in container.get("env", [])}


def options(container: dict[str, Any]) -> dict[str, str]:
    """Returns the options that are written as --name=value."""
    pairs = (argument.partition("=") for argument in container["args"] if "=" in argument)
    return {name: value for name, _, value in pairs}


def secret_keys(manifest: object) -> Iterator[str]:
    if isinstance(manifest, dict):
        if "secretKeyRef" in manifest:
            yield manifest["secretKeyRef"]["key"]
        for part in manifest.values():
            yield from secret_keys(part)
    elif isinstance(manifest, list):
        for part in manifest:
            yield from secret_keys(part)


def test_services_select_the_pods_and_ports_of_a_deployment() -> None:
    templates = [m["spec"]["template"] for m in MANIFESTS if m["kind"] == "Deployment"]
    for manifest in MANIFESTS:
        if manifest["kind"] != "Service":
            continue
        wanted = manifest["spec"]["selector"]
        [pod] = [t["spec"] for t in templates if t["metadata"]["labels"] == wanted]
        named = {
            port["name"]: port["containerPort"]
            for container in pod["containers"]
            for port in container["ports"]
        }
        for port in manifest["spec"]["ports"]:
            assert named[port["targetPort"]] == port["port"]


def test_urls_lead_to_a_service() -> None:
    ports = {
        manifest["metadata"]["name"]: [port["port"] for port in manifest["spec"]["ports"]]
        for manifest in MANIFESTS
        if manifest["kind"] == "Service"
    }
    found = set()
    for name, container in containers():
        text = json.dumps([container.get("args"), environment(container)])
        for url in re.findall(r"http://[a-z][a-z-]*:\d+", text):
            host, port = urlsplit(url).hostname, urlsplit(url).port
            assert port in ports[str(host)], (name, url)
            found.add(host)
    assert found == {"sglang-prefill", "sglang-decode"}


@pytest.mark.parametrize("container", CONTAINERS)
def test_variables_exist(container: dict[str, Any]) -> None:
    for name in environment(container):
        assert name == "POD_IP" or (name.startswith("KVXFER_") and f'"{name}"' in SOURCES), name


@pytest.mark.parametrize("container", CONTAINERS)
def test_probes_and_ports_are_those_that_the_program_listens_on(container: dict[str, Any]) -> None:
    ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
    arguments = container["args"]
    port = options(container).get("--port") or arguments[arguments.index("--port") + 1]
    assert ports["http"] == port
    bootstrap = options(container).get("--disaggregation-bootstrap-port")
    assert ports.get("bootstrap") == bootstrap


def test_the_secret_of_the_comment_has_every_key() -> None:
    for file in FILES:
        keys = set(secret_keys(list(yaml.safe_load_all(file.read_text()))))
        assert keys <= set(re.findall(r"--from-literal=([a-z-]+)=", file.read_text()))


def test_sglang_is_given_settings_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_CLUSTER_KEY", KEY)
    modes = []
    for name, container in containers():
        given = options(container)
        if "--disaggregation-mode" in given:
            assert given["--disaggregation-transfer-backend"] == plugin.NAME
            assert BackendSettings.read(environment(container)).host == "$(POD_IP)"
            modes.append((name, given["--disaggregation-mode"]))
    assert modes == [("sglang-prefill", "prefill"), ("sglang-decode", "decode")]
