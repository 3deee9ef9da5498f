"""Every form of a registry's URL, each with a real server of that configuration."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvxfer.errors import ControlPlaneUnavailable
from kvxfer.instances import InstanceState
from verify.polling import eventually, wait_until
from verify.processes.certificates import make_certificates
from verify.processes.control_plane import worker
from verify.processes.redis_server import RedisServer

from .redis_replica import replica

pytestmark = pytest.mark.native

PREFIX = "{kvxfer}"
WORD, OTHER = "word-of-the-server", "word-of-the-sentinel"


async def serves(url: str, prefix: str = "kvxfer") -> None:
    """Checks that a worker registers there and that its lease is renewed."""
    async with replica(url, prefix=prefix) as registry:
        lease = await registry.register(worker("p"), state=InstanceState.READY)
        assert (await registry.heartbeat("p", lease.epoch)).epoch == lease.epoch
        assert [each.instance_id for each in await registry.instances()] == ["p"]


async def refused(url: str, *secrets: str, telling: str = "", prefix: str = "kvxfer") -> str:
    """Returns the error of a registry that cannot be reached, and of several, the one that contains
    `telling`; it contains none of `secrets`."""
    async with replica(url, timeout=5, there=False, prefix=prefix) as registry:

        async def said() -> str:
            with pytest.raises(ControlPlaneUnavailable) as refusal:
                await registry.register(worker("p"))
            words = str(refusal.value)
            return words if telling in words and "not connected yet" not in words else ""

        words = await eventually(said)
    assert not any(secret in words for secret in secrets)
    return words


async def test_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with RedisServer("--unixsocket", str(path)) as server:
        async with replica(f"unix://{path}?db=2") as registry:
            await registry.register(worker("p"))
            with server.client() as client:
                ours = [c for c in client.client_list() if c["name"] == "kvxfer"]
                assert ours
                assert {(c["addr"], c["db"]) for c in ours} == {(f"{path}:0", "2")}
        await serves(f"unix://{path}")
    assert "gone.sock" in await refused(f"unix://{tmp_path}/gone.sock")


async def test_password() -> None:
    with RedisServer(password=WORD) as server:
        where = f"127.0.0.1:{server.port}"
        await serves(f"redis://:{WORD}@{where}/0")
        await serves(f"redis://default:{WORD}@{where}/1")
        said = await refused(f"redis://:{OTHER}@{where}", OTHER)
        assert where in said
        assert "invalid username-password pair" in said
        assert "Authentication required" in await refused(f"redis://{where}")


async def test_tls_with_a_private_ca_and_client_certificates(tmp_path: Path) -> None:
    made, others = make_certificates(tmp_path / "ours"), make_certificates(tmp_path / "theirs")
    with RedisServer(certificates=made) as server:
        where = f"rediss://127.0.0.1:{server.tls_port}/0"
        ca = f"ssl_ca_certs={made.ca_file}"
        known = f"ssl_certfile={made.client_cert}&ssl_keyfile={made.client_key}"
        await serves(f"{where}?{ca}&{known}")
        for unknown in ("", f"?ssl_ca_certs={others.ca_file}&{known}"):
            assert "CERTIFICATE_VERIFY_FAILED" in await refused(where + unknown)
        # In TLS 1.3 the alert comes after the handshake, and the reset may overtake it.
        await refused(f"{where}?{ca}", telling="certificate required")
        with server.client() as client:
            client.config_set("tls-auth-clients", "no")
            client.flushall()
        await serves(f"{where}?{ca}")


async def test_sentinels_and_servers_with_passwords() -> None:
    with (
        RedisServer(password=WORD) as server,
        RedisServer(password=OTHER, sentinel_of=server) as sentinel,
    ):
        where = f"127.0.0.1:{sentinel.port}/fleet"
        await serves(f"redis+sentinel://:{WORD}@{where}/0?sentinel_password={OTHER}")
        with server.client() as client:
            assert set(client.info("keyspace")) == {"db0"}
        unknown_here = "No master found for 'fleet' : auth:AuthenticationError; retry"
        for credentials, words in (
            (f":{WORD}@{where}", unknown_here),
            (f":{WORD}@{where}?sentinel_password={WORD}", unknown_here),
            (f":{OTHER}@{where}?sentinel_password={OTHER}", "invalid username-password pair"),
        ):
            assert words in await refused(f"redis+sentinel://{credentials}", WORD, OTHER)


async def test_sentinels_and_servers_with_tls(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    with (
        RedisServer(certificates=made) as server,
        RedisServer(certificates=made, sentinel_of=server) as sentinel,
    ):
        where = f"rediss+sentinel://127.0.0.1:{sentinel.tls_port}/fleet"
        ca, known = made.ca_file, f"ssl_certfile={made.client_cert}&ssl_keyfile={made.client_key}"
        await serves(f"{where}?ssl_ca_certs={ca}&{known}")
        assert "network:ConnectionError" in await refused(f"{where}?{known}")


def one_node(tmp_path: Path, **options: Any) -> RedisServer:
    """Starts a cluster of one node."""
    clustered = ("--cluster-enabled", "yes", "--cluster-config-file", str(tmp_path / "nodes.conf"))
    tls = ("--tls-cluster", "yes") if "certificates" in options else ()
    server = RedisServer(*clustered, *tls, **options)
    with server.client() as client:
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        wait_until(lambda: b"state:ok" in client.execute_command("CLUSTER", "INFO"))
    return server


async def test_nodes_of_a_cluster_with_a_password(tmp_path: Path) -> None:
    with one_node(tmp_path, password=WORD) as server:
        where = f"127.0.0.1:{server.port}"
        await serves(f"redis+cluster://:{WORD}@{where}", PREFIX)
        said = await refused(f"redis+cluster://:{OTHER}@{where}", WORD, OTHER, prefix=PREFIX)
        assert "invalid username-password pair" in said


async def test_nodes_of_a_cluster_with_tls(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    with one_node(tmp_path, certificates=made) as server:
        where = f"rediss+cluster://127.0.0.1:{server.tls_port}"
        ca, known = made.ca_file, f"ssl_certfile={made.client_cert}&ssl_keyfile={made.client_key}"
        await serves(f"{where}?ssl_ca_certs={ca}&{known}", PREFIX)
        said = await refused(f"{where}?{known}", telling="certificate", prefix=PREFIX)
        assert "verify failed" in said


async def test_a_server_that_is_no_node_of_a_cluster_is_named() -> None:
    with RedisServer() as server:
        where = f"127.0.0.1:{server.port}"
        said = await refused(f"redis+cluster://{where}", prefix=PREFIX)
        assert f"{where}: This instance has cluster support disabled" in said


async def test_an_unavailable_cluster_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The node that is asked first differs from time to time."""
    asked: Counter[int] = Counter()

    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked[writer.get_extra_info("sockname")[1]] += 1
        writer.close()

    async with contextlib.AsyncExitStack() as stack:
        nodes = []
        for _ in range(3):
            server = await stack.enter_async_context(
                await asyncio.start_server(refuse, "127.0.0.1", 0)
            )
            nodes.append(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")

        async def asked_often() -> bool:
            return len(asked) == len(nodes) and min(asked.values()) > 3

        async with replica(f"redis+cluster://{','.join(nodes)}", there=False, prefix=PREFIX):
            await eventually(asked_often)
    warned = [record.getMessage() for record in caplog.records if "cannot be used" in record.msg]
    assert len(warned) == 1
    assert all(node in warned[0] for node in nodes)
