"""The options, routes and Kubernetes calls of the programs in the chart, read from the programs."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import typer
import yaml

from kvxfer.addresses import host_and_port
from kvxfer.cli import app
from kvxfer.connectors.vllm.settings import ConnectorSettings
from kvxfer.errors import InvalidArgument
from kvxfer.instances import Role
from kvxfer.router.api_keys import parse_api_keys
from kvxfer.scheduler.pairing_file import parse_pairing_file
from kvxfer.scheduler.redis_registry.url import RedisUrl
from kvxfer.scheduler.scaling.kubernetes import KubernetesBackend
from kvxfer.scheduler.scaling.policy_file import KubernetesConfig, parse_scaling_file
from kvxfer.web.tokens import parse_tokens
from tests.deploy.chart import ROOT, Container, Rendered, vllm_transfer

# Variables that Kubernetes and LeaderWorkerSet add to a container, as far as the chart uses them.
_INJECTED = {"LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": "kvxfer-prefill-0.kvxfer-prefill"}
_LEADER = "kvxfer-decode-0"
_FIELDS = {
    "status.podIP": "fd00::7",
    "spec.nodeName": "node-1",
    "metadata.annotations['leaderworkerset.sigs.k8s.io/leader-name']": _LEADER,
}
_LISTENS = ("--host", "--port")
# vLLM's command. Only its transfer config is checked here; tests/vllm runs vLLM's parser.
_VLLM = ["python3", "-m", "vllm.entrypoints.cli.main", "serve"]


def problems(container: Container) -> Iterator[str]:
    command, arguments = container.spec["command"], expanded(container, container.arguments)
    unresolved = [a for a in arguments if "$(" in a]
    if unresolved:
        yield f"no value for the variables of {unresolved}"
    if command[0] == "kvxfer":
        yield from _parse([*command[1:], *arguments], container)
    elif command == _VLLM:
        yield from _transfer_config(container)
    for hook in container.spec.get("lifecycle", {}).values():
        if hook["exec"]["command"][0] == "kvxfer":
            yield from _parse(hook["exec"]["command"][1:], container)
    for name in container.environment:
        if name.startswith("KVXFER_") and f'"{name}"' not in sources():
            yield f"nothing reads {name}"


def _parse(words: list[str], container: Container) -> Iterator[str]:
    """Yields the error of `kvxfer`'s parser on a command line and its environment, if any."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    if words[0] not in commands:
        yield f"there is no `kvxfer {words[0]}`"
        return
    try:
        with patch.dict("os.environ", variables(container)):
            commands[words[0]].make_context(words[0], words[1:])
    except Exception as error:
        yield f"`kvxfer {' '.join(words)}`: {error}"


def variables(container: Container) -> dict[str, str]:
    """Returns the environment that a container would have."""
    found = dict(_INJECTED)
    own = f"{_LEADER}-1" if container.component.endswith("-rank") else _LEADER
    fields = {**_FIELDS, "metadata.name": own}
    for name, entry in container.environment.items():
        field = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        found[name] = fields[field] if field else _expand(entry.get("value", "secret"), found)
    return found


def expanded(container: Container, texts: list[str]) -> list[str]:
    environment = variables(container)
    return [_expand(text, environment) for text in texts]


def _expand(text: str, environment: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: environment.get(found[1], found[0]), text)


def _transfer_config(container: Container) -> Iterator[str]:
    transfer = vllm_transfer(container)
    extra = {**transfer["kv_connector_extra_config"], "cluster_key_file": None}
    environment = variables(container)
    if "KVXFER_CONTROL_PLANE" not in environment:
        yield "vLLM's connector has no control plane"
    with patch.dict("os.environ", {**environment, "KVXFER_CLUSTER_KEY": "0123456789abcdef"}):
        try:
            settings = ConnectorSettings.read(
                extra, role=transfer["kv_role"], engine_id="", model="m"
            )
        except InvalidArgument as error:
            yield str(error)
            return
    if _expand(settings.instance_id, environment) != _LEADER:
        yield f"a rank of {_LEADER} has the instance id {settings.instance_id}"
    listens, port = (_option(expanded(container, container.arguments), name) for name in _LISTENS)
    address = f"http://{host_and_port(listens, int(port))}"
    if (settings.http_address, settings.host) != (address, listens):
        yield f"vLLM listens at {address} but announces {settings.http_address}"
    if settings.role is not Role(container.component.removesuffix("-rank")):
        yield f"vLLM has the role {settings.role}"


@functools.cache
def sources() -> str:
    folders = ("kvxfer", "api", "scheduler")
    return "\n".join(f.read_text() for folder in folders for f in (ROOT / folder).rglob("*.py"))


@functools.cache
def _routes(program: str) -> frozenset[str]:
    match program:
        case "serve":
            schema = json.loads((ROOT / "docs" / "openapi.json").read_text())
            return frozenset(path for path, item in schema["paths"].items() if "get" in item)
        case "router":
            from kvxfer.client import ControlPlaneClient
            from kvxfer.router.app import create_app
            from kvxfer.router.settings import RouterSettings

            made = create_app(RouterSettings(), ControlPlaneClient())
        case "worker":
            from kvxfer.reference.worker.app import make_app

            made = make_app(None)  # type: ignore[arg-type] # no request is served
        case _:
            return frozenset({"/health", "/metrics"})  # vLLM's; tests/vllm checks them
    return frozenset(getattr(route, "path", "") for route in made.routes)


def routes(container: Container) -> frozenset[str]:
    """Returns the paths that a container answers GET at."""
    return _routes(container.spec["command"][1] if container.spec["command"][0] == "kvxfer" else "")


def stop_seconds(container: Container) -> float:
    """Returns the most seconds that a container takes to end after it is told to stop."""
    hook = container.spec.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
    waits = 0.0
    if hook[:1] == ["sleep"]:
        waits = float(hook[1])
    elif hook:
        # `kvxfer drain` waits this much longer than the worker's deadline.
        from kvxfer.cli.drain import _GRACE_SECONDS

        waits = _GRACE_SECONDS + float(_option(hook, "--deadline"))
    stops = _option(container.arguments, "--stop-seconds", "--shutdown-timeout")
    # The control plane and the reference worker give running requests 5 s.
    return waits + float(stops or 5)


def _option(words: list[str], *names: str) -> str:
    pairs = [word.partition("=") for word in words]
    return next((value for name, _, value in pairs if name in names), "")


def policy_problems(release: Rendered) -> Iterator[str]:
    for one in release.of("ConfigMap"):
        for file, parse in (
            ("scaling.yaml", parse_scaling_file),
            ("pairing.yaml", parse_pairing_file),
        ):
            if file in one["data"]:
                try:
                    parse(file, yaml.safe_load(one["data"][file]))
                except InvalidArgument as error:
                    yield str(error)
    for one in release.of("Secret"):
        data = release.secret(one["metadata"]["name"])
        try:
            if "url" in data:
                RedisUrl.parse(data["url"])
            if "tokens" in data:
                tokens = parse_tokens(data["tokens"].encode())
                for name in ("worker", "router", "admin", "monitor"):
                    caller = tokens.caller(data[f"{name}-token"])
                    if caller is None or name not in caller.scopes:
                        yield f"the token of the {name} lacks the scope for its work"
                parse_api_keys(data["api-keys"].encode())
        except InvalidArgument as error:
            yield f"Secret {one['metadata']['name']}: {error}"
    for container in release.containers():
        if "KVXFER_REGISTRY" in container.environment:
            url = variables(container)["KVXFER_REGISTRY"]
            if url != "secret":
                RedisUrl.parse(url)


def kubernetes_calls(release: Rendered) -> set[tuple[str, str, str, str]]:
    """Returns group, resource, name and verb of each call of the autoscaler to Kubernetes.

    The autoscaler's backend runs against the scale subresource of the tests.
    """
    for one in release.of("ConfigMap"):
        if "scaling.yaml" in one["data"]:
            policy = parse_scaling_file("", yaml.safe_load(one["data"]["scaling.yaml"]))
            if isinstance(policy.backend, KubernetesConfig):
                return asyncio.run(_calls(policy.backend))
    return set()


async def _calls(config: KubernetesConfig) -> set[tuple[str, str, str, str]]:
    from kubernetes_asyncio.client import Configuration

    from tests.scheduler.scaling.kubernetes_api import TOKEN, KubernetesApi, running

    async def leads() -> None:
        """Permits every step."""

    api = KubernetesApi()
    called: set[tuple[str, str, str, str]] = set()
    for target in (config.prefill, config.decode):
        api.add(target.name, 1, kind=(target.group, target.version, target.plural))

    @api.app.middleware("http")
    async def note(request: Any, call_next: Any) -> Any:
        answer = await call_next(request)
        assert answer.status_code == 200, (request.url.path, answer.status_code)
        group, _, _, _, plural, name, _ = request.url.path.removeprefix("/apis/").split("/")
        verb = {"GET": "get", "PUT": "update"}[request.method]
        called.add((group, f"{plural}/scale", name, verb))
        return answer

    async with running(api):
        cluster = Configuration(host=api.url)
        cluster.api_key["BearerToken"] = f"Bearer {TOKEN}"
        backend = KubernetesBackend(cluster, config, namespace=config.namespace or "")
        for role in (Role.PREFILL, Role.DECODE):
            await backend.requested(role)
            await backend.scale(role, 3, leads)
        await backend.close()
    return called
