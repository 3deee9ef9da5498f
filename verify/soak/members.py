"""The workers of the soak, and the transfers between them."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvxfer.ticket import Ticket, sign_ticket
from verify.chaos.engine.worker import KEY
from verify.processes.worker import Event, WorkerProcess

from .worker import EPOCH, MAX_BLOCKS

KEEPERS: Final = 2
"""The number of workers of each role that live throughout."""
_PASSING: Final = 2
"""The most workers of each role that come and go."""
_FABRICS: Final = ("local,tcp", "tcp", "local,tcp")
_LEAVING_SECONDS: Final = 1.0
_END_SECONDS: Final = 30.0
# The time for a side to learn of the other side's end.
_HEAR_SECONDS: Final = 2.0
_CLIENT_LEAVES: Final = 0.1


@dataclass(slots=True)
class Counted:
    """The bytes of all transfers that succeeded on both sides, as each side reports them."""

    sent: int = 0
    received: int = 0
    checked: int = 0
    transfers: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """The ends of all other transfers, by error code; each side counts."""
    lost: int = 0
    """The number of sides that were killed before they could report."""


@dataclass(frozen=True, slots=True)
class Audit:
    """The bytes of some undisturbed transfers, as both sides and the counters of their engines
    report them: all five numbers must be equal."""

    sent: int
    received: int
    checked: int
    engines_sent: int
    engines_received: int

    @property
    def reconciled(self) -> bool:
        return self.sent > 0 and len({getattr(self, name) for name in self.__slots__}) == 1


class Member:
    """A worker and its role."""

    def __init__(self, role: str, instance: str, fabrics: str) -> None:
        self.role = role
        self.process = WorkerProcess("verify.soak.worker", instance, fabrics)
        self.leaving = False

    def begin(self, do: str, **arguments: Any) -> asyncio.Future[Event]:
        return asyncio.wrap_future(self.process.begin(do, **arguments))

    async def stats(self) -> Event:
        return await asyncio.wait_for(self.begin("stats"), _END_SECONDS)

    async def end(self) -> None:
        await asyncio.to_thread(self.process.close)


async def _end_of(side: asyncio.Future[Event]) -> Event:
    """Returns the report of one side of a transfer; "lost" if its worker was killed."""
    try:
        return await side
    except EOFError:
        return {"error": "lost"}


class Members:
    """All workers. Loop only."""

    def __init__(self, rng: random.Random) -> None:
        self.counted = Counted()
        self.joined = self.left = self.killed = 0
        self._rng = rng
        self._numbers = itertools.count()
        self._names = itertools.count()
        self.members: list[Member] = []
        self.keepers: dict[str, Member] = {}

    async def start(self) -> None:
        for role in ("prefill", "decode"):
            for number in range(KEEPERS):
                member = await self._join(role, f"{role}-{number}")
                self.keepers[f"{role}-{number}"] = member

    async def end(self) -> None:
        await asyncio.gather(*(member.end() for member in self.members))

    async def meet(self) -> None:
        """Connects the workers that live throughout with each other."""
        prefills, decodes = (
            [member for member in self.keepers.values() if member.role == role]
            for role in ("prefill", "decode")
        )
        for prefill, decode in itertools.product(prefills, decodes):
            await self.transfer([prefill, decode])

    async def part(self) -> None:
        """Ends the workers that come and go."""
        passing = [member for member in self.members if member not in self.keepers.values()]
        self.members = list(self.keepers.values())
        await asyncio.gather(*(member.end() for member in passing))

    async def churn(self) -> None:
        """Makes one worker join, closes one in good order, or kills one."""
        role = self._rng.choice(["prefill", "decode"])
        passing = [m for m in self.members if m.role == role and m not in self.keepers.values()]
        if not passing or (len(passing) < _PASSING and self._rng.random() < 0.5):
            await self._join(role, f"{role}-passing-{next(self._names)}")
            self.joined += 1
            return
        member = self._rng.choice(passing)
        member.leaving = True
        if self._rng.random() < 0.5:
            await asyncio.sleep(_LEAVING_SECONDS)  # for its transfers to end
            member.process.tell("close")
            self.left += 1
            await asyncio.sleep(_LEAVING_SECONDS)
        else:
            member.process.send(signal.SIGKILL)
            self.killed += 1
        self.members.remove(member)
        await member.end()

    async def audit(self, transfers: int) -> Audit:
        """Runs `transfers` transfers between the workers that lived throughout, after all
        others."""
        before, books = await self._engines(), replace(self.counted)
        for _ in range(transfers):
            await self.transfer(list(self.keepers.values()))
        after, counted = await self._engines(), self.counted
        return Audit(
            sent=counted.sent - books.sent,
            received=counted.received - books.received,
            checked=counted.checked - books.checked,
            engines_sent=after["bytes_sent"] - before["bytes_sent"],
            engines_received=after["bytes_received"] - before["bytes_received"],
        )

    async def _engines(self) -> Counter[str]:
        """Returns the sums of the counters of the workers that lived throughout."""
        total: Counter[str] = Counter()
        for member in self.keepers.values():
            stats = await member.stats()
            total.update({name: stats[name] for name in ("bytes_sent", "bytes_received")})
        return total

    async def transfer(self, among: list[Member] | None = None) -> None:
        """Runs one transfer between two random workers; its client may leave. With `among` it is
        between two of these, and the client stays."""
        rng, number = self._rng, next(self._numbers)
        prefill, decode = (self._one(role, among) for role in ("prefill", "decode"))
        blocks = rng.randint(1, MAX_BLOCKS)
        ticket = self._ticket(prefill, decode)
        patience = {"prefill": 0.0, "decode": 0.0}
        if among is None and rng.random() < _CLIENT_LEAVES:
            patience[rng.choice(["prefill", "decode"])] = rng.uniform(0.0001, 0.03)
        common = {"number": number, "ticket": ticket, "blocks": blocks}
        address = prefill.process.address
        received, sent = await self._both(
            number,
            {
                decode: decode.begin(
                    "decode", address=address, patience=patience["decode"], **common
                ),
                prefill: prefill.begin("prefill", patience=patience["prefill"], **common),
            },
        )
        counted = self.counted
        for side in (received, sent):
            if side["error"] == "lost":
                counted.lost += 1
            elif side["error"]:
                counted.errors[side["error"]] += 1
        if received["error"] is None and sent["error"] is None:
            counted.transfers += 1
            counted.sent += sent["sent"]
            counted.received += received["received"]
            counted.checked += received["checked"]

    async def _both(
        self, number: int, sides: dict[Member, asyncio.Future[Event]]
    ) -> tuple[Event, Event]:
        """Returns the report of each side. A side that does not learn of the other's failure is
        told to give up, as by a router: prefill may never have been connected to its decode
        worker."""
        ends = {member: asyncio.create_task(_end_of(side)) for member, side in sides.items()}
        async with asyncio.timeout(_END_SECONDS):
            ended, waiting = await asyncio.wait(ends.values(), return_when=asyncio.FIRST_COMPLETED)
            if waiting and any(end.result()["error"] for end in ended):
                _, waiting = await asyncio.wait(waiting, timeout=_HEAR_SECONDS)
                for member, end in ends.items():
                    if end in waiting:
                        member.process.tell("give up", number=number)
            received, sent = await asyncio.gather(*ends.values())
            return received, sent

    def _one(self, role: str, among: list[Member] | None) -> Member:
        members = self.members if among is None else among
        return self._rng.choice([m for m in members if m.role == role and not m.leaving])

    async def _join(self, role: str, instance: str) -> Member:
        member = Member(role, instance, self._rng.choice(_FABRICS))
        try:
            await member.process.started()
        except BaseException:
            await member.end()
            raise
        self.members.append(member)
        return member

    def _ticket(self, prefill: Member, decode: Member) -> str:
        return sign_ticket(
            Ticket(
                transfer_id=uuid.uuid4().hex,
                request_id="soak",
                prefill_id=prefill.process.name,
                prefill_epoch=EPOCH,
                decode_id=decode.process.name,
                decode_epoch=EPOCH,
                expires_at=time.time() + 60,
            ),
            KEY,
        )
