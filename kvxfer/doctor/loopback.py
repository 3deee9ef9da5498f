"""Bytes sent through one NIC, or one fabric, or from and to a GPU, from this process to itself."""

from __future__ import annotations

import asyncio
import importlib
import secrets
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.doctor.finding import Area, Finding, Status
from kvxfer.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    EngineError,
    FabricUnavailable,
    KvxferError,
    NotBuilt,
    OutOfMemory,
    PermissionDenied,
)

if TYPE_CHECKING:
    from kvxfer.engine import Engine, MemoryRegion, Peer

DEADLINE_SECONDS = 15.0
_WRITE_BYTES = (16 << 10, 4 << 20)
_REFUSALS = (FabricUnavailable, PermissionDenied, OutOfMemory, NotBuilt)


class Verdict(StrEnum):
    OK = "ok"
    FAILED = "failed"
    REFUSED = "refused"  # this process may not, or the host lacks what it needs


@dataclass(frozen=True, slots=True)
class Sent:
    """A write whose bytes have arrived. `seconds` run from its submission until it is counted.
    `way` names the direction if a GPU is tried."""

    nbytes: int
    writes: int
    seconds: float
    way: str | None = None


@dataclass(frozen=True, slots=True)
class Loopback:
    """The result of a loopback. `nic` is None for a fabric without NICs, `gpu` for host memory;
    `code` and `error` are those of a KvxferError, None if all is well. `gpu_by`: the means by which
    the NIC reaches memory of the GPU (`MemoryRegion.nics`)."""

    fabric: str
    nic: str | None
    verdict: Verdict
    sent: tuple[Sent, ...]
    code: str | None = None
    error: str | None = None
    gpu: int | None = None
    gpu_by: str | None = None

    @property
    def name(self) -> str:
        way = self.fabric if self.nic is None else f"{self.fabric} {self.nic}"
        return way if self.gpu is None else f"{way}, GPU {self.gpu}"


@dataclass(slots=True)
class _Attempt:
    """A loopback while it runs. Its thread writes to this, the thread that waits for it reads."""

    fabric: str
    nic: str | None
    gpu: int | None
    deadline_seconds: float
    clock: Clock
    stage: str = "loading the engine"
    sent: list[Sent] = field(default_factory=list)
    gpu_by: str | None = None
    failed: KvxferError | None = None  # set before the engines are closed

    @property
    def step_seconds(self) -> float:
        """The limit for connecting and for each write: their errors say more than a deadline's."""
        writes = len(_WRITE_BYTES) * (1 if self.gpu is None else 3)
        return self.deadline_seconds / (writes + 1)

    def ended(self, error: KvxferError | None) -> Loopback:
        if error is None:
            sent = tuple(self.sent)
            return Loopback(
                self.fabric, self.nic, Verdict.OK, sent, gpu=self.gpu, gpu_by=self.gpu_by
            )
        verdict = Verdict.REFUSED if isinstance(error, _REFUSALS) else Verdict.FAILED
        why = f"{self.stage}: {error}"
        return Loopback(self.fabric, self.nic, verdict, tuple(self.sent), error.code, why, self.gpu)


def loopback(
    fabric: str,
    nic: str | None = None,
    gpu: int | None = None,
    *,
    deadline_seconds: float = DEADLINE_SECONDS,
    clock: Clock = SYSTEM_CLOCK,
) -> Loopback:
    """Sends some KiB and some MiB between two engines of this process over `fabric`, through `nic`
    alone if that is given, and compares every byte. With `gpu` the bytes go from the host to that
    GPU, between two places there, and back. Never raises a KvxferError.

    A call into a driver that does not return costs only a thread of this process: after twice
    `deadline_seconds` it is reported and abandoned.
    """
    attempt = _Attempt(fabric, nic, gpu, deadline_seconds, clock)
    try:
        # Loaded before the deadline runs: on a busy host that takes longer than any write.
        for module in ("kvxfer.engine", "numpy"):
            importlib.import_module(module)
    except KvxferError as error:
        return attempt.ended(error)
    outcome: Future[Loopback] = Future()
    # A daemon: the process can end while a driver has the thread.
    threading.Thread(target=_run, args=(attempt, outcome), daemon=True, name="loopback").start()
    try:
        return outcome.result(2 * deadline_seconds)
    except TimeoutError:
        hung = (
            f"no end after {2 * deadline_seconds:g} s: a call into the driver or its library does "
            "not return"
        )
        before = "" if attempt.failed is None else f"; before that: {attempt.failed}"
        return attempt.ended(DeadlineExceeded(hung + before))


def finding(found: Loopback) -> Finding:
    """Makes the finding of a loopback. Every other fabric falls back to tcp: without it the core
    does not work."""
    name = found.name
    if found.verdict is Verdict.OK:
        sent = ", ".join(
            f"{_amount(each.nbytes)}{f' {each.way}' if each.way else ''} in "
            f"{1e3 * each.seconds:.3g} ms"
            for each in found.sent
        )
        by = "" if found.gpu_by is None else f"; the NIC reaches the GPU by {found.gpu_by}"
        return Finding(Area.LOOPBACK, name, Status.OK, f"{sent}; every byte compared{by}")
    return Finding(
        Area.LOOPBACK,
        name,
        Status.BROKEN if found.fabric == "tcp" and found.gpu is None else Status.LIMITED,
        f"{found.verdict} [{found.code}] {found.error}",
        _remedy(found),
    )


def _remedy(found: Loopback) -> str:
    unreached = found.code == FabricUnavailable.code
    if found.gpu is not None and found.nic is not None and unreached:
        over = "memory of this GPU goes over tcp"
        if found.fabric != "verbs":
            return f"{over}, as with all NICs of {found.fabric}"
        return f"{over}; load nvidia-peermem, or use a kernel and a driver with dmabuf"
    if found.verdict is Verdict.REFUSED:
        return f"see the remedy in the line of {found.fabric} above, among the fabrics"
    if found.gpu is not None:
        return "check the lines of the GPUs above, and the kernel's log: dmesg | grep NVRM"
    if found.nic is not None:
        return (
            f"check the lines of {found.nic} above, its cable and switch, and the kernel's log: "
            "dmesg"
        )
    return "check the limits above, and what the sandbox or firewall of this process forbids"


def _run(attempt: _Attempt, outcome: Future[Loopback]) -> None:
    try:
        asyncio.run(_exchange(attempt))
        outcome.set_result(attempt.ended(None))
    except KvxferError as error:
        outcome.set_result(attempt.ended(error))
    except Exception as error:
        # A defect must not cost the rest of the report.
        outcome.set_result(attempt.ended(EngineError(f"{type(error).__name__}: {error}")))


async def _exchange(attempt: _Attempt) -> None:
    from kvxfer.engine import Engine

    key = secrets.token_bytes(32)

    def engine() -> Engine:
        return Engine(
            cluster_key=key,
            name="doctor",
            fabrics=(attempt.fabric,),
            nics=() if attempt.nic is None else (attempt.nic,),
            # Shorter than a step, so that the error names a lost NIC.
            peer_timeout=attempt.step_seconds / 2,
        )

    attempt.stage = "opening two engines"
    async with engine() as receiver, engine() as sender:
        try:
            async with asyncio.timeout(attempt.deadline_seconds):
                await _send(attempt, sender, receiver)
        except KvxferError as error:
            attempt.failed = error
            raise
        except TimeoutError:
            raise DeadlineExceeded(f"no end after {attempt.deadline_seconds:g} s") from None
        attempt.stage = "closing the engines"


async def _send(attempt: _Attempt, sender: Engine, receiver: Engine) -> None:
    attempt.stage = "connecting"
    peer = await sender.connect(receiver.address, attempt.step_seconds)
    for nbytes in _WRITE_BYTES:
        sent, arrived = secrets.token_bytes(nbytes), bytearray(nbytes)
        # Both kinds of memory: the engine's, and memory that others have allocated.
        source, destination = sender.alloc(nbytes), receiver.register(arrived)
        with memoryview(source) as view:
            view[:] = sent
        hops: list[tuple[str | None, MemoryRegion, MemoryRegion]] = [
            (None, source.region, destination)
        ]
        if attempt.gpu is not None:
            first, second = (receiver.alloc(nbytes, gpu=attempt.gpu) for _ in range(2))
            attempt.gpu_by = next(iter(first.region.nics), None)
            hops = [
                ("to the GPU", source.region, first.region),
                ("on the GPU", sender.register(first), second.region),
                ("from the GPU", sender.register(second), destination),
            ]
        for way, from_, to in hops:
            attempt.stage = f"writing {_amount(nbytes)}{f' {way}' if way else ''}"
            attempt.sent.append(await _write(attempt, peer, receiver, way, from_, to))
        for _, from_, to in hops:
            from_.close()
            to.close()
        if arrived != sent:
            wrong = sum(one != other for one, other in zip(arrived, sent, strict=True))
            raise ChecksumMismatch(f"{wrong} of {nbytes} bytes are not those that were sent")


async def _write(
    attempt: _Attempt,
    peer: Peer,
    receiver: Engine,
    way: str | None,
    source: MemoryRegion,
    destination: MemoryRegion,
) -> Sent:
    limit, nbytes = attempt.step_seconds, source.nbytes
    counter = receiver.counter()
    start = attempt.clock.monotonic()
    operation = peer.write(
        source, destination.descriptor, length=nbytes, imm=counter.imm, timeout=limit
    )
    await operation
    await counter.wait(operation.immediates, limit)
    seconds = attempt.clock.monotonic() - start
    counter.release()
    return Sent(nbytes, operation.writes, seconds, way)


def _amount(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
