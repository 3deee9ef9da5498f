"""Redis servers for tests, and Sentinels that watch them, as real processes."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter

import msgspec
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from verify.polling import PATIENCE
from verify.processes.certificates import Certificates
from verify.processes.process import Process
from verify.processes.programs import free_port


class RedisServer(Process):
    """A `redis-server` on a free port. It saves its data only in stop()."""

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
        """Starts it on the same port: with its data after stop(), empty after kill()."""
        if self._watches is not None:
            self._configure(self._watches)
        super().start()
        self.ready(self._answers)

    def kill(self) -> None:
        """Kills it; its data is lost."""
        super().kill()
        (self.folder / "dump.rdb").unlink(missing_ok=True)

    def stop(self) -> None:  # type: ignore[override]
        """Saves its data, and ends it."""
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
            "sentinel down-after-milliseconds fleet 2000\n"
            "sentinel failover-timeout fleet 5000\n"
            + (f"sentinel auth-pass fleet {word}\n" if word else "")
        )


def audit(server: RedisServer, prefix: str = "kvxfer") -> Counter[str]:
    """Returns the number of open transfers of each instance. Checks that Redis counts them
    correctly."""
    with server.client() as client:
        members = {
            name.decode(): msgspec.msgpack.decode(member)["reserved"]
            for name, member in client.hgetall(f"{prefix}:instances").items()
        }
        transfers = [msgspec.msgpack.decode(t) for t in client.hvals(f"{prefix}:transfers")]
        held = {name: client.scard(f"{prefix}:held:{name}") for name in members}
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
