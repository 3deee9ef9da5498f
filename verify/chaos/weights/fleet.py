"""The processes of one training job and its instances, and the commands to them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, TypeAlias

from kvxfer.weights.transfer.settings import Mode
from verify.polling import PATIENCE, eventually
from verify.processes.process import ROOT, Process

from .content import INSTANCES, TRAINERS

_Answer: TypeAlias = dict[str, Any]
_ANY_ENGINE: Final = "0" * 32


class Control:
    """The socket to one process."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[_Answer]] = {}
        self.broken_at: float | None = None
        self.closed = asyncio.Event()

    def take(self, answer: dict[str, Any]) -> None:
        if "broken_at" in answer:
            self.broken_at = answer["broken_at"]
        elif (future := self._waiting.pop(answer["id"], None)) is not None and not future.done():
            future.set_result(answer)

    def close(self) -> None:
        self.closed.set()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionError("the process has ended"))

    async def ask(self, seconds: float = PATIENCE, **command: Any) -> dict[str, Any]:
        """Sends a command and returns the answer. Raises ConnectionError if the process ends,
        TimeoutError after `seconds`."""
        if self.closed.is_set():
            raise ConnectionError("the process has ended")
        ident = next(self._ids)
        future = self._waiting[ident] = asyncio.get_running_loop().create_future()
        with contextlib.suppress(ConnectionError):
            self._writer.write(json.dumps({"id": ident, **command}).encode() + b"\n")
        async with asyncio.timeout(seconds):
            answer: _Answer = await future
        return answer


class Fleet:
    """The processes of a training job and its instances. Loop only."""

    def __init__(self, fabric: str, mode: Mode, defect: str, folder: Path) -> None:
        self._common = {"fabric": fabric, "mode": mode, "defect": defect}
        self._folder = folder
        self._processes: dict[str, Process] = {}
        self._controls: dict[str, Control] = {}
        self._said: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._ports = {
            f"{instance}-{rank}": _free_port()
            for instance, ranks in INSTANCES.items()
            for rank in range(ranks)
        }
        self.served = 0
        """The version that all instances serve."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Starts all processes; they end with the block."""
        server = await asyncio.start_unix_server(self._accept, self._path)
        try:
            for instance in INSTANCES:
                await self.start_instance(instance)
            await self.start_trainers()
            yield
        finally:
            server.close()
            for process in self._processes.values():
                process.close()

    @property
    def _path(self) -> str:
        return str(self._folder / "control")

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        control = Control(writer)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            hello = json.loads(await reader.readline() or b"{}")
            if "name" not in hello:
                return
            self._controls[hello["name"]] = control
            self._said[hello["name"]].set_result(hello)
            while line := await reader.readline():
                control.take(json.loads(line))
        control.close()
        writer.close()

    async def _start(self, name: str, **options: Any) -> dict[str, Any]:
        before = self._processes.pop(name, None)
        if before is not None:
            before.close()
        said = self._said[name] = asyncio.get_running_loop().create_future()
        process = self._processes[name] = Process(
            name,
            sys.executable,
            "-m",
            "verify.chaos.weights.member",
            name,
            self._path,
            json.dumps({**self._common, **options}),
            folder=self._folder / "logs",
            environment={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )

        def began() -> bool:
            process.check()
            return said.done()

        await eventually(began, 4 * PATIENCE)
        answer: _Answer = await said
        return answer

    async def start_instance(self, instance: str) -> None:
        """Starts all ranks of an instance, with the version that all instances serve."""
        await asyncio.gather(
            *(
                self._start(
                    f"{instance}-{rank}",
                    ranks=INSTANCES[instance],
                    port=self._ports[f"{instance}-{rank}"],
                    version=self.served,
                    follower=str(self._folder / f"{instance}-{os.urandom(3).hex()}")
                    if INSTANCES[instance] == 1
                    else self._follower(instance),
                )
                for rank in range(INSTANCES[instance])
            )
        )

    def _follower(self, instance: str) -> str:
        path = self._folder / f"{instance}.follower"
        path.unlink(missing_ok=True)
        return str(path)

    async def start_trainers(self) -> None:
        """Starts a training job with a new coordinator. Ends the previous job."""
        receivers = [f"kvx://127.0.0.1:{port}/{_ANY_ENGINE}" for port in self._ports.values()]
        for rank in range(TRAINERS):
            self._end(f"trainer-{rank}")
        lead = await self._start("trainer-0", receivers=receivers)
        await asyncio.gather(
            *(
                self._start(f"trainer-{rank}", coordinator=lead["coordinator"])
                for rank in range(1, TRAINERS)
            )
        )

    def _end(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is not None:
            process.close()

    def runs(self, name: str) -> bool:
        return name in self._processes and self._processes[name].exit_code is None

    def resume(self, name: str) -> None:
        self._processes[name].resume()

    def control(self, name: str) -> Control:
        return self._controls[name]

    def log(self, name: str) -> str:
        return self._processes[name].tail()

    async def joined(self) -> None:
        """Waits until the coordinator knows every member."""
        await self.control("trainer-0").ask(2 * PATIENCE, do="wait", instances=len(INSTANCES))

    async def rejoin(self) -> None:
        """Makes one training rank join again, so that the next update has a planning phase."""
        await self.control(f"trainer-{TRAINERS - 1}").ask(do="rejoin")
        await self.joined()

    async def state(self, name: str) -> dict[str, Any] | None:
        """Returns the state of an inference rank; None if its process has ended."""
        try:
            return await self.control(name).ask(do="state")
        except ConnectionError:
            return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def fleet(fabric: str, mode: Mode = "atomic", defect: str = "") -> AsyncIterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="kvxfer-weights-") as folder:
        made = Fleet(fabric, mode, defect, Path(folder))
        async with made.running():
            yield made
