"""A worker of the fault tests as its driver sees it: commands go in, events come out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

Role: TypeAlias = Literal["prefill", "decode"]

# How long anything in a round may take; far more than a healthy one needs.
PATIENCE: Final = 20.0
# For a process to be ready, on an emulated machine too.
_START_SECONDS: Final = 240.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker runs, and how."""

    fabric: str
    host: str = "127.0.0.1"
    inside: Sequence[str] = ()
    """The command that runs another one in a network namespace."""


class WorkerProcess:
    def __init__(self, process: asyncio.subprocess.Process, instance: str, epoch: int) -> None:
        self._process = process
        self.instance = instance
        self.epoch = epoch
        self.address = ""

    @classmethod
    async def start(
        cls,
        instance: str,
        epoch: int,
        place: Place,
        environment: Mapping[str, str] | None = None,
        *,
        module: str = "verify.faults.worker",
        quiet: bool = False,
    ) -> WorkerProcess:
        root = Path(__file__).parents[2]
        command = [sys.executable, "-m", module, instance, str(epoch)]
        process = await asyncio.create_subprocess_exec(
            *place.inside,
            *command,
            place.fabric,
            place.host,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL if quiet else None,
            env=os.environ
            | dict(environment or {})
            | {"PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)])},
        )
        worker = cls(process, instance, epoch)
        worker.address = str((await worker.event("ready", patience=_START_SECONDS))["address"])
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")

    async def event(self, *names: str, patience: float = PATIENCE) -> dict[str, Any]:
        """The next event of one of these names; others are passed over. Raises EOFError where the
        process has ended."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(patience):
                while line := await self._process.stdout.readline():
                    event: dict[str, Any] = json.loads(line)
                    if event["event"] in names:
                        return event
        except TimeoutError:
            raise TimeoutError(
                f"{self.instance} did not report {' or '.join(names)!r} in {patience:g} s"
            ) from None
        raise EOFError(f"{self.instance} ended before it reported {' or '.join(names)!r}")

    async def any_event(self) -> dict[str, Any]:
        """The next event, whenever it comes. Raises EOFError as event() does."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise EOFError(f"{self.instance} has ended")
        return dict(json.loads(line))

    def signal(self, number: int) -> float:
        """Sends a signal; returns the CLOCK_MONOTONIC time just before."""
        at = time.monotonic()
        self._process.send_signal(number)
        return at

    def take_memory(self) -> None:
        """From now on the process gets no more memory from the system."""
        status = Path(f"/proc/{self.pid}/statm").read_text()
        size = int(status.split()[0]) * resource.getpagesize()
        resource.prlimit(self.pid, resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
