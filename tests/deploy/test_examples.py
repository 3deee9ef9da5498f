"""The Kubernetes examples: what they name exists, in the program and in each other."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer
import yaml

from kvxfer.cli import app
from kvxfer.connectors.sglang import plugin
from kvxfer.connectors.sglang.settings import BackendSettings
from kvxfer.connectors.vllm.settings import ConnectorSettings

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
    """Those that are written as --name=value."""
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


def test_there_is_one_for_each_engine() -> None:
    assert [file.stem for file in FILES] == ["control-plane", "sglang", "vllm"]


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
    assert found == {"kvxfer", "sglang-prefill", "sglang-decode"}


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


@pytest.mark.parametrize(
    "container", [one for one in CONTAINERS if one.values[0]["command"][0] == "kvxfer"]
)
def test_kvxfer_takes_its_options(container: dict[str, Any]) -> None:
    command = typer.main.get_command(app).commands[container["command"][1]]  # type: ignore[attr-defined]
    known = {name for parameter in command.params for name in parameter.opts}
    given = {argument for argument in container["args"] if argument.startswith("--")}
    assert given
    assert given <= known


def test_the_secret_of_the_comment_has_every_key() -> None:
    for file in FILES:
        keys = set(secret_keys(list(yaml.safe_load_all(file.read_text()))))
        comment = file.read_text() + (ROOT / "deploy/examples/control-plane.yaml").read_text()
        assert keys <= set(re.findall(r"--from-literal=([a-z-]+)=", comment))


def test_vllm_is_given_settings_of_the_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    roles = []
    for name, container in containers():
        if not name.startswith("vllm"):
            continue
        for variable, value in environment(container).items():
            monkeypatch.setenv(variable, value)
        transfer = json.loads(options(container)["--kv-transfer-config"])
        assert importlib.util.find_spec(transfer["kv_connector_module_path"])
        settings = ConnectorSettings.read(
            transfer["kv_connector_extra_config"],
            role=transfer["kv_role"],
            engine_id="engine",
            model="model",
        )
        roles.append((name, settings.role.value, settings.http_address))
    assert roles == [
        ("vllm-prefill", "prefill", "http://$(POD_IP):8100"),
        ("vllm-decode", "decode", "http://$(POD_IP):8100"),
    ]


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
