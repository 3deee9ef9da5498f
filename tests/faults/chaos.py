"""Kills and freezes real worker processes in mid-transfer, and measures what the other one sees."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

from kvxfer.ticket import Ticket, sign_ticket

from .worker import KEY, NUM_BLOCKS

Role: TypeAlias = Literal["prefill", "decode"]
# kill: SIGKILL. freeze: SIGSTOP until the other has given it up. stall: SIGSTOP for a moment that
# heartbeats forgive, in which the other cancels and reuses its blocks.
Act: TypeAlias = Literal["kill", "freeze", "stall"]
Fabric: TypeAlias = Literal["local", "tcp"]

FAULTS: Final = tuple((act, role) for act in get_args(Act) for role in get_args(Role))
FABRICS: Final[tuple[Fabric, ...]] = get_args(Fabric)
# How long anything in a round may take; far more than a healthy one needs.
_PATIENCE = 20.0
# How long the survivor's pages are watched after the frozen sender woke up.
_WATCH_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Round:
    """What one round found.

    `detection` is the seconds from the signal (of a stall: from SIGCONT) until the other side
    (of a stall: the stalled one) had its error; None where the transfer finished before.
    """

    act: Act
    victim: Role
    fabric: Fabric
    seed: int
    detection: float | None
    error: str | None
    wrong_bytes: int
    leaked_blocks: int


@dataclass(frozen=True, slots=True)
class _Reports:
    """What the workers said of a round."""

    survivor: dict[str, Any]
    victim: dict[str, Any] | None  # None: killed
    reuse: dict[str, Any]
    woken_at: float


class WorkerProcess:
    """One worker process: commands go in, events come out."""

    def __init__(self, process: asyncio.subprocess.Process, instance: Role, epoch: int) -> None:
        self._process = process
        self.instance: Role = instance
        self.epoch = epoch
        self.address = ""

    @classmethod
    async def start(cls, instance: Role, epoch: int, fabric: Fabric) -> WorkerProcess:
        tests = Path(__file__).parent.parent
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "faults.worker",
            instance,
            str(epoch),
            fabric,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), *sys.path])},
        )
        worker = cls(process, instance, epoch)
        worker.address = str((await worker.event("ready"))["address"])
        return worker

    def tell(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")

    async def event(self, name: str) -> dict[str, Any]:
        """The next event of this name; others are passed over."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(_PATIENCE):
                while line := await self._process.stdout.readline():
                    event: dict[str, Any] = json.loads(line)
                    if event["event"] == name:
                        return event
        except TimeoutError:
            raise TimeoutError(
                f"{self.instance} did not report {name!r} in {_PATIENCE} s"
            ) from None
        raise EOFError(f"{self.instance} ended before it reported {name!r}")

    def signal(self, number: int) -> float:
        """Sends a signal; returns the CLOCK_MONOTONIC time just before."""
        at = time.monotonic()
        self._process.send_signal(number)
        return at

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class Arena:
    """A prefill and a decode worker of one fabric; whoever is killed starts again."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric: Fabric = fabric
        self.workers: dict[Role, WorkerProcess] = {}

    async def start(self, role: Role) -> None:
        old = self.workers.get(role)
        epoch = 1
        if old is not None:
            await old.end()
            epoch = old.epoch + 1
        self.workers[role] = await WorkerProcess.start(role, epoch, self.fabric)

    async def end(self) -> None:
        await asyncio.gather(*(worker.end() for worker in self.workers.values()))

    def ticket(self) -> str:
        prefill, decode = self.workers["prefill"], self.workers["decode"]
        return sign_ticket(
            Ticket(
                transfer_id=uuid.uuid4().hex,
                request_id="chaos",
                prefill_id=prefill.instance,
                prefill_epoch=prefill.epoch,
                decode_id=decode.instance,
                decode_epoch=decode.epoch,
                expires_at=time.time() + 60,
            ),
            KEY,
        )

    async def round(self, act: Act, victim: Role, seed: int) -> Round:
        """One transfer, one fault at a random moment of it, and what became of everything."""
        rng = random.Random(seed)
        # Small ones fit into the window of writes under way, large ones do not.
        blocks = rng.choice([rng.randint(4, 32), rng.randint(32, NUM_BLOCKS)])
        # A frozen receiver may find whole transfers, posted and announced, when it wakes up.
        asleep = (act, victim) == ("freeze", "decode") and rng.random() < 0.4
        # Mostly the transfer is kept from ending before the fault; sometimes it may win.
        hold_back = not asleep and rng.random() < 0.75
        pause = rng.choice([0.0, 0.0, 0.001, 0.01])
        ticket = self.ticket()
        await self._offer(ticket, seed, blocks)
        if not asleep:
            await self._send(ticket, seed, blocks, pause, hold_back)
        await asyncio.sleep(rng.uniform(0.01, 0.05) if asleep else rng.uniform(0, 0.05))
        at = self.workers[victim].signal(signal.SIGKILL if act == "kill" else signal.SIGSTOP)
        if asleep:
            await self._send(ticket, seed, blocks, pause, hold_back)
        if act == "stall":
            reports = await self._stall(victim, rng.uniform(0, 0.2))
            at, heard = reports.woken_at, reports.victim
        else:
            reports = await self._outlive(act, victim)
            heard = reports.survivor
        if act == "kill":
            await self.start(victim)
        ends = [report for report in (reports.survivor, reports.victim, reports.reuse) if report]
        assert heard is not None
        return Round(
            act=act,
            victim=victim,
            fabric=self.fabric,
            seed=seed,
            detection=float(heard["at"]) - at if heard["error"] else None,
            error=heard["error"],
            wrong_bytes=sum(int(end["wrong"]) for end in ends),
            leaked_blocks=sum(NUM_BLOCKS - int(end["free"]) for end in ends),
        )

    async def _outlive(self, act: Act, victim: Role) -> _Reports:
        """The survivor gives the broken worker up and reuses its blocks; only then it may wake."""
        broken, survivor = self._sides(victim)
        ended = await survivor.event("ended")
        survivor.tell({"do": "reuse"})
        await survivor.event("reused")
        woken, at = None, 0.0
        if act == "freeze":
            at = broken.signal(signal.SIGCONT)
            woken = await broken.event("ended")
        return _Reports(ended, woken, await self._watch(survivor), at)

    async def _stall(self, victim: Role, seconds: float) -> _Reports:
        """The other worker cancels; decode reuses its blocks before a stalled prefill wakes up."""
        stalled, other = self._sides(victim)
        other.tell({"do": "cancel"})
        if victim == "prefill":
            ended = await other.event("ended")
            other.tell({"do": "reuse"})
            await other.event("reused")
            at = stalled.signal(signal.SIGCONT)
        else:
            # Prefill's blocks are not free before decode has taken or refused what is under way.
            await asyncio.sleep(seconds)
            at = stalled.signal(signal.SIGCONT)
            ended = await other.event("ended")
            other.tell({"do": "reuse"})
            await other.event("reused")
        woken = await stalled.event("ended")
        return _Reports(ended, woken, await self._watch(other), at)

    async def _watch(self, survivor: WorkerProcess) -> dict[str, Any]:
        await asyncio.sleep(_WATCH_SECONDS)
        survivor.tell({"do": "check"})
        return await survivor.event("checked")

    def _sides(self, victim: Role) -> tuple[WorkerProcess, WorkerProcess]:
        return self.workers[victim], self.workers["decode" if victim == "prefill" else "prefill"]

    async def _offer(self, ticket: str, seed: int, blocks: int) -> None:
        prefill, decode = self.workers["prefill"], self.workers["decode"]
        decode.tell(
            {
                "do": "decode",
                "ticket": ticket,
                "address": prefill.address,
                "seed": seed,
                "blocks": blocks,
            }
        )
        await decode.event("offered")

    async def _send(
        self, ticket: str, seed: int, blocks: int, pause: float, hold_back: bool
    ) -> None:
        prefill = self.workers["prefill"]
        prefill.tell(
            {
                "do": "prefill",
                "ticket": ticket,
                "seed": seed,
                "blocks": blocks,
                "pause": pause,
                "hold_back": hold_back,
            }
        )
        await prefill.event("ready-to-send")


@contextlib.asynccontextmanager
async def arena(fabric: Fabric) -> AsyncIterator[Arena]:
    """Both workers of a fabric, started; no process is left behind."""
    made = Arena(fabric)
    try:
        await asyncio.gather(*(made.start(role) for role in get_args(Role)))
        yield made
    finally:
        await made.end()


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
