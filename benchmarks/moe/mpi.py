"""MPI_Alltoallv of Open MPI: alltoallv.cpp, started by mpirun."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np

from benchmarks.moe.cases import Routes
from benchmarks.moe.failure import RankFailed
from benchmarks.moe.way import Times, Way

_SECONDS: Final = 120.0
"""The most seconds to start, and for the rounds of one order."""
_LAUNCH: Final = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
_COMMON: Final = ("--mca", "mpi_yield_when_idle", "1", "--mca", "pml", "ob1", "--mca", "btl")
_TRANSPORT: Final = {
    Way.MPI: ("vader,self", "--mca", "btl_vader_single_copy_mechanism", "cma"),
    Way.MPI_TCP: ("tcp,self", "--mca", "btl_tcp_if_include", "lo"),
}


def settings(way: Way) -> str:
    """Returns the settings for mpirun."""
    return " ".join((*_LAUNCH, *_COMMON, *_TRANSPORT[way]))


def version() -> str:
    found = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True)
    return found.stdout.splitlines()[0]


class MpiRanks:
    """The ranks of one case under mpirun; they sleep between orders."""

    def __init__(self, way: Way, program: Path, routes: Routes) -> None:
        self._way, self._program, self._routes = way, program, routes
        self._ranks: list[socket.socket] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvxfer-mpi-")))
            plan = folder / "plan"
            rows = "\n".join(" ".join(map(str, each)) for each in self._routes.rows.tolist())
            plan.write_text(f"{self._routes.case.row_bytes}\n{rows}\n")
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(folder / "orders"))
            listener.listen(self._routes.case.ranks)
            self._log = stack.enter_context(tempfile.TemporaryFile())
            self._job = subprocess.Popen(
                [
                    *(*_LAUNCH, "-n", str(self._routes.case.ranks)),
                    *(*_COMMON, *_TRANSPORT[self._way]),
                    *(str(self._program), str(plan), str(folder / "orders")),
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )
            stack.callback(self._end)
            self._accept(listener)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def run(self, rounds: int) -> list[Times]:
        """Runs an order. Returns the times of each rank. Raises RankFailed."""
        try:
            for rank in self._ranks:
                rank.sendall(struct.pack("=I", rounds))
            return [self._times(rank, rounds) for rank in self._ranks]
        except OSError as error:
            raise self._failed() from error

    def _accept(self, listener: socket.socket) -> None:
        by_number: dict[int, socket.socket] = {}
        # If mpirun ends early, no process connects.
        listener.settimeout(0.5)
        while len(by_number) < self._routes.case.ranks:
            try:
                rank = listener.accept()[0]
            except TimeoutError:
                if self._job.poll() is not None:
                    raise self._failed() from None
                continue
            rank.settimeout(_SECONDS)
            by_number[struct.unpack("=i", rank.recv(4, socket.MSG_WAITALL))[0]] = rank
        self._ranks = [by_number[number] for number in range(len(by_number))]

    def _times(self, rank: socket.socket, rounds: int) -> Times:
        times = np.empty((rounds, 3), np.int64)
        left = memoryview(times).cast("B")
        while left:
            count = rank.recv_into(left)
            if not count:
                raise self._failed()
            left = left[count:]
        return times

    def _failed(self) -> RankFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._job.wait(1.0)
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip()
        return RankFailed(f"mpirun ({self._way}) has failed:\n{said}")

    def _end(self) -> None:
        for rank in self._ranks:
            rank.close()
        try:
            self._job.wait(5.0)
        except subprocess.TimeoutExpired:
            self._job.kill()
            self._job.wait()
