"""The Helm chart: the objects of each value set fit Kubernetes, the programs and each other."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest

from kvxfer.api.settings import Settings
from kvxfer.router.settings import RouterSettings
from kvxfer.scheduler.keyspace import Keyspace
from kvxfer.settings import fields
from kvxfer.web.listener import ConnectionLimits
from tests.deploy.chart import CHART, VALUE_SETS, Rendered, render, value_set
from tests.deploy.checks import CHECKS
from tests.deploy.programs import variables, vllm_transfer

SETS = {path.stem: path for path in VALUE_SETS}


@functools.cache
def rendered(name: str) -> Rendered:
    return render(value_set(SETS[name]) if name in SETS else {}, name=name)


@pytest.mark.parametrize("path", VALUE_SETS, ids=lambda path: path.stem)
def test_helm_lint_finds_nothing(path: Path) -> None:
    report = helm_python.lint(CHART, value_set(path), strict=True, namespace="llm")
    findings = [one for one in report["messages"] if one["severity"] > 1]
    assert (report["errors"], findings) == ([], [])


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", ["defaults", *SETS])
def test_value_set(name: str, check: str) -> None:
    assert list(CHECKS[check](rendered(name))) == []


def test_value_sets_are_those_that_the_documentation_names() -> None:
    text = (CHART.parents[2] / "docs" / "deploy-kubernetes.md").read_text()
    assert [name for name in SETS if f"`{name}.yaml`" not in text] == []


IDENTITIES = {"runAsUser", "runAsGroup", "fsGroup", "supplementalGroups"}


def members(value: Any) -> Iterator[tuple[str, Any]]:
    """All members of all objects below a value."""
    for name, below in value.items() if isinstance(value, dict) else ():
        yield name, below
    for below in value.values() if isinstance(value, dict) else value:
        if isinstance(below, dict | list):
            yield from members(below)


@pytest.mark.parametrize("name", ["openshift", "vllm", "leaderworkerset", "bundled-redis-tls"])
def test_the_platform_may_choose_the_users_of_all_pods(name: str) -> None:
    """OpenShift's restricted-v2 refuses pods that ask for a user."""
    values = {"platformUsers": True, **value_set(SETS[name])}
    values["workers"] = {
        **values.get("workers", {}),
        "rdma": {"resource": "a.b/c", "asRoot": False},
    }
    release = render(values)
    everything = [*members(release.objects)]
    assert {member for member, _ in everything} & IDENTITIES == set()
    # A pod is then in no group that is known, so every user may read the files of secrets.
    assert {mode for member, mode in everything if member == "defaultMode"} == {0o444}
    for container in release.containers():
        assert container.pod["spec"]["securityContext"] == {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        security = container.spec["securityContext"]
        assert (security["capabilities"], security["allowPrivilegeEscalation"]) == (
            {"drop": ["ALL"]},
            False,
        )


def test_homes_and_caches_of_workers_are_on_volumes_of_their_pods() -> None:
    for values in ({}, {"workers": {"engine": "vllm", "model": "m"}}):
        for container in render(values).containers():
            if container.component in ("prefill", "decode"):
                there = variables(container)
                volumes = {volume["name"]: volume for volume in container.pod["spec"]["volumes"]}
                writable = {
                    mount["mountPath"]
                    for mount in container.spec["volumeMounts"]
                    if "emptyDir" in volumes[mount["name"]]
                }
                assert {there[n] for n in ("HOME", "XDG_CACHE_HOME")} == writable
                assert there["HF_HOME"].startswith(there["XDG_CACHE_HOME"])
                # Without USER, Python's getpass, which torch uses, looks up the UID's name.
                assert there["USER"]


OPTIONS = {
    "exclude_nics": ["mlx5_8", "mlx5_bond*"],
    "peer_timeout": 2.5,
    "traffic_class": 106,
    "tuning": {"memory_windows": False, "window_bytes": 1 << 30},
}


def test_options_of_the_transfer_engine_reach_the_workers() -> None:
    reference = render({"workers": {"transferEngine": OPTIONS}})
    vllm = {"engine": "vllm", "model": "m", "connector": {"lease_seconds": 60}}
    of_vllm = render({"workers": {**vllm, "transferEngine": OPTIONS}})
    workers = [each for each in reference.containers() if each.component == "prefill"]
    assert [
        argument
        for argument in workers[0].arguments
        if argument.startswith(("--engine-option", "--peer-timeout"))
    ] == [
        "--engine-option=exclude_nics=mlx5_8,mlx5_bond*",
        "--peer-timeout=2.5",
        "--engine-option=traffic_class=106",
        "--engine-option=tuning.memory_windows=false",
        "--engine-option=tuning.window_bytes=1073741824",
    ]
    for container in of_vllm.containers():
        if container.component in ("prefill", "decode"):
            extra = vllm_transfer(container)["kv_connector_extra_config"]
            assert OPTIONS.items() <= extra.items()
            assert extra["lease_seconds"] == 60
    for release in (reference, of_vllm):
        for check in CHECKS.values():
            assert list(check(release)) == []


def test_the_chart_s_redis_refuses_steps_before_its_pod_is_killed() -> None:
    release = render({"registry": {"kind": "bundled"}})
    [redis] = [one for one in release.containers() if one.component == "registry"]
    _, *options = redis.arguments
    told = dict(zip(options[::2], options[1::2], strict=True))
    assert told["--maxmemory-policy"] == "noeviction"
    assert int(told["--maxmemory"].removesuffix("mb")) < int(
        redis.spec["resources"]["limits"]["memory"].removesuffix("Mi")
    )


def test_limits_in_the_values_are_those_of_the_programs() -> None:
    values = render().values
    compared = set()
    for part, kinds in (
        ("controlPlane", (Settings, ConnectionLimits)),
        ("router", (RouterSettings, ConnectionLimits)),
    ):
        for field in (field for kind in kinds for field in fields(kind)):
            head, *words = field.name.split("_")
            name = head + "".join(word.title() for word in words)
            if name in values[part] and name != "stopSeconds":  # pods may take longer
                assert values[part][name] == field.default, (part, name)
                compared.add((part, name))
    assert {("controlPlane", "maxWaiting"), ("router", "maxHeldBytes")} <= compared
    assert len(compared) == 15
    keyspace = Keyspace()
    assert values["registry"]["prefix"] == keyspace.registry_prefix
    assert values["registry"]["logBytes"] == keyspace.registry_log_bytes
