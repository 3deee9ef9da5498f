"""The programs of the project that a harness starts, and what they answer."""

from __future__ import annotations

import contextlib
import os
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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def kvxfer(*arguments: str | Path) -> list[str]:
    """The command line of a `kvxfer` command."""
    return [sys.executable, "-m", "kvxfer.cli", *map(str, arguments)]


def clean_environment(**variables: str) -> dict[str, str]:
    """This process's environment with `variables` as the only ones that kvxfer reads."""
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
        """Without `url`, it is told in the first line of output, as with `--json`."""
        self._address = url
        super().__init__(name, *command, folder=folder, environment=environment, grace=grace)

    @property
    def url(self) -> str:
        """Waits until the program tells it."""
        if self._address:
            return self._address
        told = self.ready()
        return str(told.get("http_address") or told["url"])

    def serves(self, path: str) -> None:
        """Returns when GET succeeds."""

        def answers() -> bool:
            with contextlib.suppress(httpx2.HTTPError):
                return http().get(self.url + path, timeout=2.0).is_success
            return False

        self.ready(answers)

    def get(self, path: str) -> httpx2.Response:
        return http().get(self.url + path)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over its labels; with `labels`, over those that have them, if any."""
        text = self.get("/metrics").text
        found = re.findall(rf"^{re.escape(name)}({{.*}})? (\S+)$", text, re.MULTILINE)
        assert found or labels, f"{self.name} has no metric {name}"
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(value) for has, value in found if all(each in has for each in wanted))


@cache
def http() -> httpx2.Client:
    """One for all: making one takes tens of milliseconds, for certificates that nobody needs."""
    return httpx2.Client(trust_env=False, timeout=30.0)
