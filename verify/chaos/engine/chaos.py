"""Breaks real worker processes, or the network between them, in mid-transfer, and measures the
effect on each side."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import signal
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, get_args

from kvxfer.ticket import Ticket, sign_ticket
from verify.chaos.link import Damage, Link, link
from verify.processes.worker import Event, WorkerProcess

from .catalogue import CLOCK, PAUSE, Fabric, Fault, Role
from .rdma_ports import RdmaPorts
from .worker import KEY, NUM_BLOCKS

# The time to watch the survivor's pages after the frozen sender wakes up.
_WATCH_SECONDS: Final = 0.2
_CLOCK_JUMP_SECONDS: Final = 3600
_FAKETIME: Final = "/usr/$LIB/faketime/libfaketime.so.1"


@dataclass(frozen=True, slots=True)
class Round:
    """The result of one round.

    `detection` is the time in seconds until the last side that could learn of the fault had its
    error; after a stall, until the stalled side had it. It counts from the fault; after a stall,
    from SIGCONT; for a transfer to a frozen worker, from the start of the transfer. None if the
    transfer finished before the fault or in spite of it.
    """

    fault: str
    fabric: str
    seed: int
    detection: float | None
    error: str | None
    texts: tuple[str, ...] = ()
    """The error text of each side that had an error."""
    wrong_bytes: int = 0
    leaked_blocks: int = 0
    hung: str = ""
    """The side that could not begin, or that had not ended long after every deadline of the
    transfer."""


@dataclass(frozen=True, slots=True)
class _Transfer:
    ticket: str
    seed: int
    blocks: int
    pause: float
    hold_back: bool
    """Prefill holds back the last layer, so that the transfer cannot end before the fault."""


@dataclass(frozen=True, slots=True)
class _Found:
    """The reports of a round's workers."""

    at: float
    heard: list[Event]
    """The ends of the sides that could learn of the fault."""
    checks: list[Event]
    """Other reports that may name wrong bytes and leaked blocks."""


class _NotOffered(Exception):
    """A transfer could not begin, though nothing was broken."""


class Arena:
    """A prefill and a decode worker of one fabric. A worker that was killed is started again."""

    def __init__(
        self, fabric: Fabric, cable: Link | None, folder: Path, environment: Mapping[str, str]
    ) -> None:
        self.fabric = fabric
        self._environment = environment
        self._folder = folder
        self.workers: dict[Role, WorkerProcess] = {}
        self.epochs: dict[Role, int] = dict.fromkeys(get_args(Role), 0)
        self._cable = cable
        self._network: Link | RdmaPorts = cable or RdmaPorts()
        self._clocks = {role: folder / role for role in get_args(Role)}

    async def start(self, role: Role) -> None:
        if role in self.workers:
            await asyncio.to_thread(self.workers[role].close)
        self.epochs[role] += 1
        address, inside = "127.0.0.1", ()
        if self._cable is not None:
            host = self._cable.hosts[get_args(Role).index(role)]
            address, inside = host.address, host.command()
        self._set_clock(role, 0)
        clock = {
            "LD_PRELOAD": _FAKETIME,
            "FAKETIME_TIMESTAMP_FILE": str(self._clocks[role]),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        faked = any(fault.act == "clock" for fault in self.fabric.faults)
        self.workers[role] = WorkerProcess(
            *(
                "verify.chaos.engine.worker",
                role,
                str(self.epochs[role]),
                self.fabric.engine,
                address,
            ),
            inside=inside,
            environment={**self._environment, **(clock if faked else {})},
            folder=self._folder,
        )
        await self.workers[role].started()

    async def end(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(w.close) for w in self.workers.values()))

    async def round(self, fault: Fault, seed: int) -> Round:
        """Runs one transfer with one fault at a random moment. Returns the outcome."""
        try:
            return await self._round(fault, seed)
        except (TimeoutError, _NotOffered) as error:
            await asyncio.gather(*map(self.start, get_args(Role)))
            return Round(str(fault), self.fabric.name, seed, None, None, hung=str(error))

    async def _round(self, fault: Fault, seed: int) -> Round:
        rng = random.Random(seed)
        may_end_well = fault in (*CLOCK, *PAUSE, Fault("loss"))
        # When a frozen receiver wakes up, it may find whole transfers, posted and announced.
        asleep = str(fault) == "freeze decode" and rng.random() < 0.4
        transfer = _Transfer(
            ticket=self._ticket(),
            seed=seed,
            # Small transfers fit into the window of unacknowledged writes, large ones do not.
            blocks=rng.choice([rng.randint(4, 32), rng.randint(32, self.fabric.most_blocks)]),
            pause=rng.choice([0.0, 0.0, 0.001, 0.01]),
            # In most rounds the transfer cannot end before the fault; in some it may.
            hold_back=not (asleep or may_end_well) and rng.random() < 0.75,
        )
        await self._offer(transfer)
        if not asleep:
            await self._send(transfer)
        await asyncio.sleep(rng.uniform(0.01, 0.05) if asleep else rng.uniform(0, 0.05))
        found = await self._strike(fault, rng, transfer if asleep else None)
        errors = [end for end in found.heard if end["error"]]
        ends = found.heard + found.checks
        return Round(
            fault=str(fault),
            fabric=self.fabric.name,
            seed=seed,
            detection=(
                max(float(end["at"]) - found.at for end in errors)
                if errors and not may_end_well
                else None
            ),
            error=str(errors[0]["error"]) if errors else None,
            texts=tuple(f"{end['role']}: {end['text']}" for end in errors),
            wrong_bytes=sum(int(end["wrong"]) for end in ends),
            leaked_blocks=sum(NUM_BLOCKS - int(end["free"]) for end in ends),
        )

    async def _strike(self, fault: Fault, rng: random.Random, asleep: _Transfer | None) -> _Found:
        victim = fault.victim
        if victim is None:
            how: Damage = fault.act  # type: ignore[assignment]
            return await (self._lose(how) if how == "loss" else self._sever(how))
        match fault.act:
            case "kill":
                return await self._kill(victim)
            case "freeze":
                return await self._freeze(victim, asleep)
            case "stall":
                return await self._stall(victim, rng.uniform(0, 0.2))
            case "pause":
                return await self._pause(victim, rng.uniform(0.1, 0.4))
            case "half-open":
                return await self._half_open(victim)
            case "clock":
                return await self._jump(victim, rng.choice([-1, 1]) * _CLOCK_JUMP_SECONDS)
        assert fault.act == "no memory"
        return await self._exhaust(victim)

    async def _kill(self, victim: Role) -> _Found:
        broken, survivor = self._sides(victim)
        at = time.monotonic()
        broken.send(signal.SIGKILL)
        ended = await self._reuse(survivor)
        checked = await self._watch(survivor)
        await self.start(victim)
        return _Found(at, [ended], [checked])

    async def _freeze(self, victim: Role, asleep: _Transfer | None) -> _Found:
        """Freezes the victim until the survivor has given it up and reused its blocks."""
        broken, survivor = self._sides(victim)
        at = time.monotonic()
        broken.freeze()
        if asleep is not None:
            await self._send(asleep)
            at = time.monotonic()
        ended = await self._reuse(survivor)
        broken.resume()
        woken = await broken.said("ended")
        return _Found(at, [ended], [woken, await self._watch(survivor)])

    async def _stall(self, victim: Role, seconds: float) -> _Found:
        """Stalls the victim; the other worker cancels. A stalled prefill wakes up only after decode
        has reused its blocks."""
        stalled, other = self._sides(victim)
        stalled.freeze()
        other.tell("cancel")
        if victim == "prefill":
            ended = await self._reuse(other)
            at = time.monotonic()
            stalled.resume()
        else:
            # Prefill's blocks are free only after decode has taken or refused the writes under way.
            await asyncio.sleep(seconds)
            at = time.monotonic()
            stalled.resume()
            ended = await self._reuse(other)
        woken = await stalled.said("ended")
        found = _Found(at, [woken], [ended, await self._watch(other)])
        await self._forget_lateness(victim)
        return found

    async def _pause(self, victim: Role, seconds: float) -> _Found:
        paused, _ = self._sides(victim)
        paused.freeze()
        await asyncio.sleep(seconds)
        at = time.monotonic()
        paused.resume()
        found = await self._both(at)
        await self._forget_lateness(victim)
        return found

    async def _forget_lateness(self, of: Role) -> None:
        """Replaces the process. For a minute its peer would allow it more time, as it was late
        (patience.hpp), and other rounds measure how soon a death is detected."""
        await self.start(of)

    async def _sever(self, how: Damage) -> _Found:
        """Breaks the network until both sides have given each other up and reused their blocks."""
        at = await self._network.damage(how)
        try:
            ended = await asyncio.gather(*map(self._reuse, self.workers.values()))
        finally:
            await self._network.mend()
        checked = await asyncio.gather(*map(self._watch, self.workers.values()))
        if not all(end["error"] for end in ended):
            # The transfer had ended before the damage. The connection may have outlived it, after a
            # silence of up to a peer timeout.
            await self._forget_lateness("prefill")
        return _Found(at, ended, checked)

    async def _lose(self, how: Damage) -> _Found:
        at = await self._network.damage(how)
        try:
            found = await self._both(at)
        finally:
            await self._network.mend()
        await self._forget_lateness("prefill")  # for both sides: they connect anew
        return found

    async def _half_open(self, victim: Role) -> _Found:
        """Kills a process while its peer can get no packet."""
        broken, survivor = self._sides(victim)
        at = await self._network.damage("cut")
        broken.send(signal.SIGKILL)
        try:
            ended = await self._reuse(survivor)
        finally:
            await self._network.mend()
        checked = await self._watch(survivor)
        await self.start(victim)
        return _Found(at, [ended], [checked])

    async def _jump(self, victim: Role, seconds: int) -> _Found:
        self._set_clock(victim, seconds)
        try:
            return await self._both(time.monotonic())
        finally:
            self._set_clock(victim, 0)

    async def _exhaust(self, victim: Role) -> _Found:
        """Takes the victim's memory; the other worker cancels. The victim has to clean up, or dies,
        as Python may. A new process replaces it."""
        broken, survivor = self._sides(victim)
        _take_memory(broken.pid)
        broken.tell("hog")
        own = await _said(broken, "hogged", "ended")
        at = time.monotonic()
        survivor.tell("cancel")
        if own and own["event"] == "hogged":
            own = await _said(broken, "ended")
        ended = await self._reuse(survivor)
        checked = await self._watch(survivor)
        await self.start(victim)
        return _Found(at, [own, ended] if own else [ended], [checked])

    async def _both(self, at: float) -> _Found:
        """Waits until both sides end and have their blocks back. Neither side has to fail."""
        ended = await asyncio.gather(*map(self._reuse, self.workers.values()))
        checked = await asyncio.gather(*map(self._watch, self.workers.values()))
        return _Found(at, ended, checked)

    async def _reuse(self, worker: WorkerProcess) -> Event:
        """Waits for the end of a worker's transfer, and returns its report. The worker then gives
        the blocks to another request."""
        ended = await worker.said("ended")
        worker.tell("reuse")
        await worker.said("reused")
        return ended

    async def _watch(self, survivor: WorkerProcess) -> Event:
        await asyncio.sleep(_WATCH_SECONDS)
        survivor.tell("check")
        return await survivor.said("checked")

    def _sides(self, victim: Role) -> tuple[WorkerProcess, WorkerProcess]:
        return self.workers[victim], self.workers["decode" if victim == "prefill" else "prefill"]

    def _set_clock(self, role: Role, seconds: int) -> None:
        made = self._clocks[role].with_suffix(".new")
        made.write_text(f"{seconds:+d}\n")
        made.rename(self._clocks[role])

    def _ticket(self) -> str:
        return sign_ticket(
            Ticket(
                transfer_id=uuid.uuid4().hex,
                request_id="chaos",
                prefill_id="prefill",
                prefill_epoch=self.epochs["prefill"],
                decode_id="decode",
                decode_epoch=self.epochs["decode"],
                expires_at=time.time() + 60,
            ),
            KEY,
        )

    async def _offer(self, transfer: _Transfer) -> None:
        prefill, decode = self.workers["prefill"], self.workers["decode"]
        decode.tell(
            "decode",
            ticket=transfer.ticket,
            address=prefill.address,
            seed=transfer.seed,
            blocks=transfer.blocks,
        )
        told = await decode.said("offered", "ended")
        if told["event"] == "ended":
            raise _NotOffered(f"decode could not offer: {told['text']}")

    async def _send(self, transfer: _Transfer) -> None:
        prefill = self.workers["prefill"]
        prefill.tell("prefill", **asdict(transfer))
        await prefill.said("ready-to-send")


def _take_memory(pid: int) -> None:
    """Keeps the process from getting more memory from the system."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    most = pages * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


async def _said(worker: WorkerProcess, *names: str) -> Event | None:
    """Returns the next event with one of these names; None if the process has ended."""
    try:
        return await worker.said(*names)
    except EOFError:
        return None


@contextlib.asynccontextmanager
async def arena(
    fabric: Fabric, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Arena]:
    """Starts both workers of a fabric, and ends them; no process is left behind."""
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvxfer-chaos-"))
        cable = None
        if fabric.linked:
            cable = await stack.enter_async_context(link(small_buffers=fabric.small_buffers))
        made = Arena(fabric, cable, Path(folder), environment or {})
        stack.push_async_callback(made.end)
        await asyncio.gather(*(made.start(role) for role in get_args(Role)))
        yield made
