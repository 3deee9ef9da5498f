"""Redis servers for tests, and Sentinels that watch them, as real processes."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from verify.certificates import Certificates
from verify.polling import PATIENCE, wait_until
from verify.processes.process import Process
from verify.processes.programs import free_port


class RedisServer(Process):
    """`redis-server` on a free port, with nothing kept on disk."""

    def __init__(
        self,
        *options: str,
        password: str | None = None,
        certificates: Certificates | None = None,
        sentinel_of: RedisServer | None = None,
    ) -> None:
        program = shutil.which("redis-server")
        assert program, "redis-server is missing: run `scripts/setup test`"
        self.port = free_port()
        self.tls_port = 0 if certificates is None else free_port()
        self._password = password
        common = ["--port", str(self.port), "--bind", "127.0.0.1", *options]
        if password is not None:
            common += ["--requirepass", password]
        if certificates is not None:
            common += ["--tls-port", str(self.tls_port), "--tls-replication", "yes"]
            common += ["--tls-ca-cert-file", str(certificates.ca_file)]
            common += ["--tls-cert-file", str(certificates.server_cert)]
            common += ["--tls-key-file", str(certificates.server_key)]
        self._watches = sentinel_of
        kind = ["sentinel.conf", *common, "--sentinel"] if sentinel_of else [*common, "--save", ""]
        super().__init__("redis", program, *kind)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> Redis:
        return Redis(port=self.port, password=self._password, socket_timeout=PATIENCE)

    def start(self) -> None:
        """Starts it on the same port, with its data after stop(), empty after kill()."""
        if self._watches is not None:
            self._configure(self._watches)
        super().start()
        self.ready(self._answers)

    def kill(self) -> None:
        """Kills it; its data is lost."""
        super().kill()
        (self.folder / "dump.rdb").unlink(missing_ok=True)

    def stop(self) -> None:  # type: ignore[override]
        """Ends it after it has saved its data."""
        with self.client() as client:
            client.shutdown(save=True)
        self.ends()

    def _answers(self) -> bool:
        with self.client() as client, contextlib.suppress(RedisConnectionError):
            return bool(client.ping())
        return False

    def _configure(self, master: RedisServer) -> None:
        port, word = master.tls_port or master.port, master._password
        (self.folder / "sentinel.conf").write_text(
            f"sentinel monitor fleet 127.0.0.1 {port} 1\n"
            "sentinel down-after-milliseconds fleet 3000\n"
            "sentinel failover-timeout fleet 5000\n"
            + (f"sentinel auth-pass fleet {word}\n" if word else "")
        )


@dataclass(frozen=True)
class Watched:
    """A master, its replica, and the Sentinel that fails over between them."""

    master: RedisServer
    standby: RedisServer
    sentinel: RedisServer

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.sentinel.port}/fleet/0"


@contextmanager
def watched() -> Iterator[Watched]:
    with (
        RedisServer() as master,
        RedisServer("--replicaof", "127.0.0.1", str(master.port)) as standby,
        RedisServer(sentinel_of=master) as sentinel,
    ):
        wait_until(lambda: _replica_is_known(master, sentinel))
        yield Watched(master, standby, sentinel)


def _replica_is_known(master: RedisServer, sentinel: RedisServer) -> bool:
    """Whether the replica has the master's data, and the Sentinel knows of it."""
    with master.client() as data, sentinel.client() as watcher, contextlib.suppress(RedisError):
        synchronised = data.info("replication").get("slave0", {}).get("state") == "online"
        return bool(watcher.sentinel_slaves("fleet")) and synchronised
    return False


def audit(server: RedisServer) -> Counter[str]:
    """The open transfers of each instance, after checking that Redis counts them right."""
    with server.client() as client:
        members = {
            name.decode(): msgspec.msgpack.decode(member)["reserved"]
            for name, member in client.hgetall("kvxfer:instances").items()
        }
        transfers = [msgspec.msgpack.decode(t) for t in client.hvals("kvxfer:transfers")]
        held = {name: client.scard(f"kvxfer:held:{name}") for name in members}
    opened: Counter[str] = Counter()
    blocks: Counter[str] = Counter()
    for transfer in transfers:
        for side in ("prefill", "decode"):
            opened[transfer[side]["instance_id"]] += 1
            blocks[transfer[side]["instance_id"]] += transfer[f"{side}_blocks"]
    for name, reserved in members.items():
        assert reserved == {"transfers": opened[name], "blocks": blocks[name]}
        assert held[name] == opened[name]
    return opened
