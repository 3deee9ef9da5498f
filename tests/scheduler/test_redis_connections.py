"""Every form of a registry's URL against a real server that was started so."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxfer.errors import ControlPlaneUnavailable
from kvxfer.instances import InstanceState
from verify.certificates import make_certificates
from verify.control_plane import worker
from verify.polling import eventually
from verify.redis_server import RedisServer

from .redis_replica import replica

pytestmark = pytest.mark.native

WORD, OTHER = "word-of-the-server", "word-of-the-sentinel"


async def serves(url: str) -> None:
    """A worker registers there, and its lease is renewed."""
    async with replica(url) as registry:
        lease = await registry.register(worker("p"), state=InstanceState.READY)
        assert (await registry.heartbeat("p", lease.epoch)).epoch == lease.epoch
        assert [each.instance_id for each in await registry.instances()] == ["p"]


async def refused(url: str, *secrets: str, telling: str = "") -> str:
    """What a registry says that cannot be reached; of several things the one that has `telling`."""
    async with replica(url, timeout=5, there=False) as registry:

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


async def test_tls_with_a_ca_and_client_certificates_of_ones_own(tmp_path: Path) -> None:
    made, others = make_certificates(tmp_path / "ours"), make_certificates(tmp_path / "theirs")
    with RedisServer(certificates=made) as server:
        where = f"rediss://127.0.0.1:{server.tls_port}/0"
        ca = f"ssl_ca_certs={made.ca_file}"
        known = f"ssl_certfile={made.client_cert}&ssl_keyfile={made.client_key}"
        await serves(f"{where}?{ca}&{known}")
        for unknown in ("", f"?ssl_ca_certs={others.ca_file}&{known}"):
            assert "CERTIFICATE_VERIFY_FAILED" in await refused(where + unknown)
        # Of TLS 1.3 the alert comes after the handshake, and the reset may overtake it.
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
