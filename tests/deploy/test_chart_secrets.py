"""The chart's secrets over upgrades: they are kept, and an exchange of tokens refuses no caller."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvxfer.cluster_key import as_cluster_key
from kvxfer.router.api_keys import parse_api_keys
from kvxfer.web.tokens import parse_tokens
from tests.deploy.chart import render
from tests.deploy.cluster import KUBECONFIG, Cluster, running_cluster

pytestmark = pytest.mark.native


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        yield cluster


def test_upgrade_keeps_every_secret(cluster: Cluster) -> None:
    values: dict[str, Any] = {
        "registry": {"kind": "bundled"},
        "tls": {"enabled": True},
    }
    before = cluster.upgrade(**values)
    after = cluster.upgrade(**values, router={"replicas": 3})
    for name in ("kvxfer", "kvxfer-registry", "kvxfer-tls"):
        assert after.secret(name) == before.secret(name)


def test_no_secret_is_in_an_argument() -> None:
    release = render({"registry": {"kind": "bundled"}})
    words = [
        word
        for container in release.containers()
        for word in (*container.spec.get("command", []), *container.arguments)
    ]
    password = release.secret("kvxfer-registry")["password"]
    assert release.secret("kvxfer-registry")["auth.conf"] == f"requirepass {password}\n"
    assert not [word for word in words if password in word or "$(REDIS" in word]


def test_two_releases_share_no_secret(cluster: Cluster) -> None:
    first, second = render().secret("kvxfer"), render().secret("kvxfer")
    assert {name for name in first if first[name] == second[name]} == set()
    as_cluster_key(first["cluster-key"])


def test_tokens_before_and_after_an_exchange_are_accepted_by_both_lists(cluster: Cluster) -> None:
    """A pod may have its new token long before the control plane has the new list, or after."""
    history = [cluster.upgrade(auth={"generation": n}).secret("kvxfer") for n in (1, 1, 2, 3)]
    first, same, second, third = history
    assert same == first
    for before, after in ((first, second), (second, third)):
        assert before["cluster-key"] == after["cluster-key"]
        for who in ("worker", "router", "admin", "monitor"):
            old, new = before[f"{who}-token"], after[f"{who}-token"]
            assert old != new
            for listed in (before, after):
                tokens = parse_tokens(listed["tokens"].encode())
                for token in (old, new):
                    caller = tokens.caller(token)
                    assert caller is not None
                    assert (caller.name, who in caller.scopes) == (who, True)
        assert before["api-key"] != after["api-key"]
        for listed in (before, after):
            keys = parse_api_keys(listed["api-keys"].encode())
            assert keys.caller(before["api-key"]) and keys.caller(after["api-key"])
    assert cluster.upgrade(auth={"generation": 1}).secret("kvxfer") == third
    assert cluster.upgrade(auth={"generation": 3}).secret("kvxfer") == third
    leaked = first["worker-token"]
    assert parse_tokens(second["tokens"].encode()).caller(leaked) is not None
    assert parse_tokens(third["tokens"].encode()).caller(leaked) is None
    assert len(third["tokens"].splitlines()) == 15


def test_removed_cluster_key_is_made_again(cluster: Cluster) -> None:
    before = cluster.upgrade().secret("kvxfer")
    del cluster.objects["Secret", "kvxfer"]["data"]["cluster-key"]
    after = cluster.upgrade().secret("kvxfer")
    assert {name for name in before if before[name] != after[name]} == {"cluster-key"}


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
@pytest.mark.parametrize("generated", [True, False])
def test_commands_of_the_notes_read_the_secrets(
    cluster: Cluster, tmp_path: Path, generated: bool
) -> None:
    """Runs the commands with kubectl against the secrets of the release."""
    release = cluster.upgrade(tls={"enabled": True})
    secret = release.secret("kvxfer")
    if not generated:
        release = cluster.upgrade(
            tls={"enabled": True, "existingSecret": "kvxfer-tls"},
            auth={"existingSecret": "kvxfer"},
        )
    (tmp_path / "kubeconfig").write_text(KUBECONFIG.format(url=cluster.url))
    lines = [line.strip() for line in release.notes.splitlines() if "get secret" in line]
    script = "\n".join([*lines, 'echo "$key $KVXFER_TOKEN"'])
    ended = subprocess.run(
        ["bash", "-euc", script],
        cwd=tmp_path,
        env={**os.environ, "KUBECONFIG": str(tmp_path / "kubeconfig"), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [secret["api-key"], secret["admin-token"]]
    assert (tmp_path / "ca.crt").read_text() == release_ca(cluster)


def release_ca(cluster: Cluster) -> str:
    return base64.b64decode(cluster.objects["Secret", "kvxfer-tls"]["data"]["ca.crt"]).decode()


def test_secret_of_the_operator_is_left_alone() -> None:
    release = render({"auth": {"existingSecret": "mine"}})
    assert release.of("Secret") == []


def test_notes_say_how_to_reach_the_release_and_show_no_secret() -> None:
    release = render({"tls": {"enabled": True}})
    for command in ("helm test kvxfer -n llm", "kvxfer instances", "svc/kvxfer-router 8000"):
        assert command in release.notes
    for name, value in release.secret("kvxfer").items():
        assert value not in release.notes, name
