"""The measured servers, each in one process."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from verify.processes.programs import Server

_STOP_SECONDS: Final = 10
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class Measured(Server):
    """A Python module that prints `{"url": …}` once it serves. It ends with its context."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        super().__init__(
            *(arguments[0], sys.executable, "-m", *arguments),
            environment={**os.environ, **(environment or {})},
            grace=_STOP_SECONDS,
        )
        self.ready()

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0

    def restart(self) -> None:
        """Kills it and starts it again, without the data of its memory. Its port may change."""
        self.kill()
        self.start()

    @property
    def resident_bytes(self) -> int:
        statm = Path(f"/proc/{self.pid}/statm").read_text()
        return int(statm.split()[1]) * _PAGE_BYTES


def empty_server() -> Measured:
    return Measured("benchmarks.control.empty")


def control_plane(registry: str, cluster_key: str) -> Measured:
    """Starts `kvxfer serve` with leases that outlast the run: most of the fleet sends no
    heartbeats."""
    options = ["--port", "0", "--json", "--registry", registry, "--lease-seconds", "3600"]
    environment = {"KVXFER_CLUSTER_KEY": cluster_key, "KVXFER_TOKENS_FILE": ""}
    return Measured("kvxfer.cli", "serve", *options, environment=environment)
