"""The Kubernetes backend against an HTTP server that speaks the scale subresource."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from kubernetes_asyncio.client import Configuration

from kvxfer.errors import InvalidArgument, NotLeader, ScalingFailed
from kvxfer.instances import Role
from kvxfer.scheduler.scaling import kubernetes
from kvxfer.scheduler.scaling.kubernetes import KubernetesBackend, find_cluster
from kvxfer.scheduler.scaling.policy_file import KubernetesConfig, ScaleTarget

from .kubernetes_api import TOKEN, KubernetesApi, running

pytestmark = pytest.mark.native

LWS = ("leaderworkerset.x-k8s.io", "v1", "leaderworkersets")
CONFIG = KubernetesConfig(
    prefill=ScaleTarget(name="prefill"),
    decode=ScaleTarget(name="decode", group=LWS[0], version=LWS[1], plural=LWS[2]),
)


async def leads() -> None:
    """Permits every step."""


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    api = KubernetesApi()
    api.add("prefill", 2)
    api.add("decode", 3, kind=LWS)
    async with running(api):
        yield api


@pytest.fixture
async def backend(api: KubernetesApi) -> AsyncIterator[KubernetesBackend]:
    cluster = Configuration(host=api.url)
    cluster.api_key["BearerToken"] = f"Bearer {TOKEN}"
    backend = KubernetesBackend(cluster, CONFIG, namespace="llm")
    yield backend
    await backend.close()


async def test_each_role_has_its_own_object(backend, api):
    assert await backend.requested(Role.PREFILL) == 2
    assert await backend.requested(Role.DECODE) == 3
    await backend.scale(Role.PREFILL, 5, leads)
    await backend.scale(Role.DECODE, 1, leads)
    assert api.writes == [("prefill", 5), ("decode", 1)]
    assert await backend.requested(Role.PREFILL) == 5


async def test_stateful_set(api):
    api.add("sts", 1, kind=("apps", "v1", "statefulsets"))
    cluster = Configuration(host=api.url)
    cluster.api_key["BearerToken"] = f"Bearer {TOKEN}"
    target = ScaleTarget(name="sts", plural="statefulsets")
    backend = KubernetesBackend(
        cluster, KubernetesConfig(prefill=target, decode=target), namespace="llm"
    )
    await backend.scale(Role.PREFILL, 4, leads)
    await backend.close()
    assert api.replicas("sts") == 4


async def test_unchanged_count_is_not_written(backend, api):
    await backend.scale(Role.PREFILL, 2, leads)
    assert api.writes == []


async def test_zero_replicas_are_left_out_by_the_api(backend, api):
    api.add("prefill", 0)
    assert await backend.requested(Role.PREFILL) == 0
    await backend.scale(Role.PREFILL, 1, leads)
    assert api.writes == [("prefill", 1)]


async def test_object_that_changed_meanwhile_is_read_again(backend, api):
    fences = 0

    async def change_twice() -> None:
        nonlocal fences
        fences += 1
        if fences <= 2:
            api.touch("prefill")

    await backend.scale(Role.PREFILL, 4, change_twice)
    assert (api.writes, api.conflicts, fences) == ([("prefill", 4)], 2, 3)


async def test_endless_conflicts_are_an_error(backend, api):
    async def change() -> None:
        api.touch("prefill")

    with pytest.raises(ScalingFailed, match="another autoscaler"):
        await backend.scale(Role.PREFILL, 4, change)
    assert api.writes == []


async def test_deposed_leader_writes_nothing(backend, api):
    async def deposed() -> None:
        raise NotLeader("token 1 no longer leads")

    with pytest.raises(NotLeader):
        await backend.scale(Role.PREFILL, 9, deposed)
    assert api.writes == []


async def test_write_of_a_successor_is_never_overwritten(backend, api):
    """The deposed leader has read and passed its fence when its successor writes."""
    passed = 0

    async def successor_writes_in_between() -> None:
        nonlocal passed
        passed += 1
        if passed > 1:
            raise NotLeader("token 1 no longer leads")
        await backend.scale(Role.PREFILL, 7, leads)

    with pytest.raises(NotLeader):
        await backend.scale(Role.PREFILL, 1, successor_writes_in_between)
    assert (api.writes, api.conflicts) == ([("prefill", 7)], 1)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (401, "HTTP 401 .*token is not accepted"),
        (403, "HTTP 403 .*get and update on its /scale"),
        (404, "HTTP 404 .*check namespace, name"),
        (500, "HTTP 500"),
    ],
)
async def test_refusals_name_object_and_remedy(backend, api, code, words):
    api.fail_with = code
    with pytest.raises(ScalingFailed, match=f"did not read deployments.apps llm/prefill: {words}"):
        await backend.requested(Role.PREFILL)


async def test_api_that_does_not_answer():
    backend = KubernetesBackend(Configuration(host="http://127.0.0.1:1"), CONFIG, namespace="llm")
    with pytest.raises(ScalingFailed, match=r"did not read deployments\.apps llm/prefill"):
        await backend.requested(Role.PREFILL)
    await backend.close()


# --- finding the cluster ---------------------------------------------------------------------


def kubeconfig(folder: Path, server: str) -> Path:
    file = folder / "config"
    file.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "contexts": [
                    {"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "llm"}}
                ],
                "clusters": [{"name": "k", "cluster": {"server": server}}],
                "users": [{"name": "u", "user": {"token": TOKEN}}],
            }
        )
    )
    return file


def outside_of_pods(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    from kubernetes_asyncio.config import kube_config

    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(file))


def test_cluster_and_namespace_of_the_kubeconfig(monkeypatch, tmp_path):
    import asyncio

    outside_of_pods(monkeypatch, kubeconfig(tmp_path, "http://127.0.0.1:1"))
    backend = find_cluster(CONFIG)

    async def scale() -> int:
        async with running(KubernetesApi()) as api:
            api.add("prefill", 6)
            backend._cluster.host = api.url
            try:
                return await backend.requested(Role.PREFILL)
            finally:
                await backend.close()

    assert asyncio.run(scale()) == 6


def test_no_cluster_is_one_clear_error(monkeypatch, tmp_path):
    outside_of_pods(monkeypatch, tmp_path / "nowhere")
    with pytest.raises(InvalidArgument, match=r"no Kubernetes cluster was found .*KUBECONFIG"):
        find_cluster(CONFIG)


def test_missing_client_names_its_install_command(monkeypatch):
    import sys

    from kvxfer.errors import NotBuilt

    monkeypatch.setitem(sys.modules, "kubernetes_asyncio", None)
    with pytest.raises(NotBuilt, match=r"pip install 'kvxfer\[kubernetes\]'"):
        kubernetes.find_cluster(CONFIG)
