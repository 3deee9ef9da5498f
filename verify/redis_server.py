"""A Redis server of a test's own, and the Sentinels that watch over several: real processes."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from verify.certificates import Certificates

_START_SECONDS = 20


class RedisServer:
    """`redis-server` on a free port, with a folder of its own and nothing kept on disk."""

    def __init__(
        self,
        *options: str,
        password: str | None = None,
        certificates: Certificates | None = None,
        sentinel_of: RedisServer | None = None,
    ) -> None:
        self.port = free_port()
        self.tls_port = 0 if certificates is None else free_port()
        self._certificates = certificates
        self._password = password
        self._options = options
        self._folder = Path(tempfile.mkdtemp(prefix="kvxfer-redis-"))
        self._sentinel_of = sentinel_of
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> Redis:
        return Redis(port=self.port, password=self._password, socket_timeout=_START_SECONDS)

    def start(self) -> None:
        """Starts it on the same port as before, with what it had if it was stopped, else empty."""
        program = shutil.which("redis-server")
        assert program, "redis-server is missing: run `scripts/setup test`"
        self._process = subprocess.Popen(
            [program, *self._arguments()],
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        give_up = time.monotonic() + _START_SECONDS
        with self.client() as client:
            while True:
                try:
                    client.ping()
                    return
                except RedisConnectionError:
                    assert self._process.poll() is None, f"redis-server on {self.port} ended"
                    assert time.monotonic() < give_up, f"redis-server on {self.port} is silent"
                    time.sleep(0.02)

    def kill(self) -> None:
        """Ends it at once: its data is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            (self._folder / "dump.rdb").unlink(missing_ok=True)

    def stop(self) -> None:
        """Ends it with its data written down."""
        assert self._process is not None
        with self.client() as client:
            client.shutdown(save=True)
        self._process.wait()
        self._process = None

    def pause(self) -> None:
        """It accepts connections (the kernel does) and says nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._folder)

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _arguments(self) -> list[str]:
        common = ["--port", str(self.port), "--bind", "127.0.0.1", *self._options]
        if self._password is not None:
            common += ["--requirepass", self._password]
        if made := self._certificates:
            common += ["--tls-port", str(self.tls_port), "--tls-ca-cert-file", str(made.ca_file)]
            common += ["--tls-cert-file", str(made.server_cert)]
            common += ["--tls-key-file", str(made.server_key), "--tls-replication", "yes"]
        if self._sentinel_of is None:
            return [*common, "--save", "", "--appendonly", "no"]
        word = self._sentinel_of._password
        port = self._sentinel_of.tls_port or self._sentinel_of.port
        configuration = self._folder / "sentinel.conf"
        configuration.write_text(
            f"sentinel monitor fleet 127.0.0.1 {port} 1\n"
            "sentinel down-after-milliseconds fleet 3000\n"
            "sentinel failover-timeout fleet 5000\n"
            + (f"sentinel auth-pass fleet {word}\n" if word else "")
        )
        return [str(configuration), *common, "--sentinel"]


@dataclass(frozen=True)
class Watched:
    """A master, its replica, and the Sentinel that puts the one in the other's place."""

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
        _wait_for_replica(master, sentinel)
        yield Watched(master, standby, sentinel)


def _wait_for_replica(master: RedisServer, sentinel: RedisServer) -> None:
    """Until the replica has the master's data and the Sentinel knows of it."""
    give_up = time.monotonic() + _START_SECONDS
    with master.client() as data, sentinel.client() as watcher:
        while True:
            replicas = []
            try:
                replicas = watcher.sentinel_slaves("fleet")
                synchronised = data.info("replication").get("slave0", {}).get("state") == "online"
            except RedisError:
                synchronised = False
            if replicas and synchronised:
                return
            assert time.monotonic() < give_up, "the replica did not come up"
            time.sleep(0.05)


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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
