"""A cluster of processes with every protection on: mutual TLS, tokens, ticket keys. Its registry is
in Redis."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvxfer.client import ControlPlaneClient, Credentials
from kvxfer.demo.router import Router
from kvxfer.instances import Role
from verify.processes.certificates import Certificates, make_certificates
from verify.processes.programs import Server, kvxfer
from verify.processes.redis_server import RedisServer

from .test_worker import environment, model, started  # noqa: F401 (a fixture)

pytestmark = pytest.mark.native


@dataclass
class Cluster:
    folder: Path
    certificates: Certificates
    url: str
    workers: dict[str, Server]

    def token_file(self, name: str) -> Path:
        return self.folder / f"{name}.token"

    def credentials(self, name: str) -> Credentials:
        return Credentials(
            token_file=self.token_file(name),
            ca_file=self.certificates.ca_file,
            cert_file=self.certificates.client_cert,
            key_file=self.certificates.client_key,
        )

    def options(self, name: str) -> tuple[str, ...]:
        return (
            *("--control-plane", self.url, "--token-file", str(self.token_file(name))),
            *("--ca-file", str(self.certificates.ca_file)),
            *("--cert-file", str(self.certificates.client_cert)),
            *("--key-file", str(self.certificates.client_key)),
        )

    def kvxfer(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            kvxfer(*arguments, *self.options("admin")),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )


@pytest.fixture
def cluster(tmp_path: Path, model: Path, empty_redis: RedisServer) -> Iterator[Cluster]:  # noqa: F811
    certificates = make_certificates(tmp_path / "tls")
    names = ("worker", "router", "admin")
    (tmp_path / "tokens").write_text("".join(f"{n} {n} token-of-the-{n}\n" for n in names))
    (tmp_path / "ticket-keys").write_text("the-ticket-key-of-this-month\n")
    for name in names:
        (tmp_path / f"{name}.token").write_text(f"token-of-the-{name}\n")
    keys = ("--ticket-keys-file", tmp_path / "ticket-keys")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            started(
                *("serve", "--port", "0", "--tokens-file", tmp_path / "tokens", *keys),
                *("--tls-cert", certificates.server_cert, "--tls-key", certificates.server_key),
                *("--tls-client-ca", certificates.ca_file, "--lease-seconds", "6"),
                *("--registry", empty_redis.url),
            )
        )
        cluster = Cluster(tmp_path, certificates, server.url, {})
        for role in ("prefill", "decode"):
            cluster.workers[role] = stack.enter_context(
                started(
                    *("worker", "--role", role, "--model", model, "--instance-id", role, *keys),
                    *cluster.options("worker"),
                )
            )
        yield cluster


async def test_requests_run_roles_change_and_workers_leave_when_drained(cluster: Cluster) -> None:
    assert cluster.url.startswith("https://")
    async with (
        Router(cluster.url, credentials=cluster.credentials("router")) as router,
        ControlPlaneClient(cluster.url, credentials=cluster.credentials("router")) as client,
    ):
        prompt = list(range(1, 40))
        first = await router.complete(prompt, model="tiny-llama", max_tokens=4)
        turned = {"prefill": "decode", "decode": "prefill"}
        for name, role in turned.items():
            ended = await asyncio.to_thread(cluster.kvxfer, "role", name, role)
            assert ended.returncode == 0, ended.stderr
        assert {i.instance_id: i.role for i in await client.instances()} == {
            name: Role(role) for name, role in turned.items()
        }
        again = await router.complete(prompt, model="tiny-llama", max_tokens=4)
        assert again.decode.choices[0].token_ids == first.decode.choices[0].token_ids

        ended = await asyncio.to_thread(cluster.kvxfer, "drain", "prefill", "--json")
        assert ended.returncode == 0, ended.stderr
        assert json.loads(ended.stdout)["left"] is True
        await asyncio.to_thread(cluster.workers["prefill"].ends)
        assert [i.instance_id for i in await client.instances()] == ["decode"]


def test_a_worker_without_its_token_is_refused_by_name(cluster: Cluster, model: Path) -> None:  # noqa: F811
    (cluster.folder / "worker.token").write_text("some-other-token-there")
    ended = subprocess.run(
        kvxfer("worker", "--role", "prefill", "--model", model, *cluster.options("worker")),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "error [unauthenticated] the control plane does not know this token" in ended.stderr
    assert "some-other" not in ended.stderr
