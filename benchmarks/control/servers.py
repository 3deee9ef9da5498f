"""The servers that are measured, each one process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

_STOP_SECONDS: Final = 10
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class Server:
    """A process that prints `{"url": …}` once it serves. Leaving its context ends it."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self._command = [sys.executable, "-m", *arguments]
        self._environment = {**os.environ, **(environment or {})}
        self.port = 0
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self._command)} exited with {self._process.wait()}")
        self.port = urlsplit(json.loads(line)["url"]).port or 0

    def restart(self) -> None:
        """Kills it, and with it all that is only in its memory; it may get another port."""
        self._process.kill()
        self._process.wait()
        self._start()

    @property
    def resident_bytes(self) -> int:
        statm = Path(f"/proc/{self._process.pid}/statm").read_text()
        return int(statm.split()[1]) * _PAGE_BYTES

    @property
    def cpu_seconds(self) -> float:
        stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        fields = re.sub(r"^.*\) ", "", stat, flags=re.DOTALL).split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def empty_server() -> Server:
    return Server("benchmarks.control.empty")


def control_plane(registry: str, cluster_key: str) -> Server:
    """`kvxfer serve` whose leases outlast the run: nothing renews most of the fleet."""
    options = ["--port", "0", "--json", "--registry", registry, "--lease-seconds", "3600"]
    environment = {"KVXFER_CLUSTER_KEY": cluster_key, "KVXFER_TOKENS_FILE": ""}
    return Server("kvxfer.cli", "serve", *options, environment=environment)
