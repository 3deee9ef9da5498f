"""The programs of the project that a harness starts, and their answers."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

import httpx2

from .process import Process

_PRIVATE: Final = ("KVXFER_", "OTEL_")
_FIRST_PORT: Final = 10_000
_LAST_PORT: Final = 65_000  # if nearly all ports are ephemeral
_marks: Final[list[socket.socket]] = []  # each reserves a port for this process


def free_port() -> int:
    """Returns a port of 127.0.0.1 for a program that is about to be started. It stays reserved
    while this process runs: Linux gives it to no connection, and free_port() to no other
    process."""
    ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    end = int(ephemeral[0]) if int(ephemeral[0]) > 2 * _FIRST_PORT else _LAST_PORT
    while True:
        port = random.randrange(_FIRST_PORT, end)
        mark = socket.socket(socket.AF_UNIX)
        try:
            mark.bind(f"\0kvxfer-port-{port}")
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            mark.close()
        else:
            _marks.append(mark)
            return port


def kvxfer(*arguments: str | Path) -> list[str]:
    """Returns the command line of a `kvxfer` command."""
    return [sys.executable, "-m", "kvxfer.cli", *map(str, arguments)]


def clean_environment(**variables: str) -> dict[str, str]:
    """Returns this process's environment without variables of kvxfer and OpenTelemetry, and with
    `variables`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_PRIVATE)}
    return {**kept, **variables}


class Server(Process):
    """A program that answers HTTP."""

    def __init__(
        self,
        name: str,
        *command: str | Path,
        url: str = "",
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        grace: float = 0.0,
    ) -> None:
        """Starts the program. Without `url`, the first JSON object of its output has the URL, as
        with `--json`."""
        self._address = url
        super().__init__(name, *command, folder=folder, environment=environment, grace=grace)

    @property
    def url(self) -> str:
        """The URL. Waits until the program prints it."""
        if self._address:
            return self._address
        told = self.ready()
        return str(told.get("http_address") or told["url"])

    def serves(self, path: str) -> None:
        """Waits until GET succeeds."""

        def answers() -> bool:
            with contextlib.suppress(httpx2.HTTPError):
                return http().get(self.url + path, timeout=2.0).is_success
            return False

        self.ready(answers)

    def get(self, path: str) -> httpx2.Response:
        return http().get(self.url + path)

    def metric(self, name: str, **labels: str) -> float:
        """Returns the sum of a metric over its series; with `labels`, over the series with these
        labels."""
        text = self.get("/metrics").text
        found = re.findall(rf"^{re.escape(name)}({{.*}})? (\S+)$", text, re.MULTILINE)
        assert found or labels, f"{self.name} has no metric {name}"
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(value) for has, value in found if all(each in has for each in wanted))


@cache
def http() -> httpx2.Client:
    """Returns one client for all callers: a client takes tens of milliseconds to load certificates
    that are not needed."""
    return httpx2.Client(trust_env=False, timeout=30.0)
