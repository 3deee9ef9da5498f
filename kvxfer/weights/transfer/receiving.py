"""The arrival of one update in the arena of one inference rank."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from kvxfer.errors import (
    DeadlineExceeded,
    DigestMismatch,
    KvxferError,
    ProtocolError,
)
from kvxfer.weights.transfer.endings import first_error, loss_of, told_of_loss, until_ended
from kvxfer.weights.transfer.messages import Grant, Message, Prepare, Sent
from kvxfer.weights.transfer.runs import Stretch, target_digest

if TYPE_CHECKING:
    from kvxfer.engine import Counter, Engine, Peer
    from kvxfer.engine.memory import MemoryRegion

_MODULUS = 1 << 64


class Senders(Protocol):
    """The training ranks that have sent HELLO."""

    async def get(self, plan_id: str, number: int) -> Peer:
        """Waits for the connection of a training rank, and returns it."""


class Receiving:
    """The receipt of one update: grants the arena to the senders of a plan, and awaits their
    writes. Event loop only."""

    def __init__(
        self,
        engine: Engine,
        arena: MemoryRegion,
        prepare: Prepare,
        expected: Mapping[int, tuple[Stretch, ...]],
        senders: Senders,
        send: Callable[[Peer, Message], bool],
    ) -> None:
        self._engine = engine
        self._arena = arena
        self._prepare = prepare
        self._expected = expected
        self._senders = senders
        self._send = send
        self._sent: dict[int, asyncio.Future[Sent]] = {}
        """The awaited SENT of each sender, by id of the peer."""
        self._counters: list[Counter] = []

    async def run(self) -> int | None:
        """Waits for all bytes, and returns their digest; None without digests.

        Raises the loss of a sender, DeadlineExceeded, DigestMismatch. However it ends, no write of
        any sender lands in the arena afterwards.
        """
        update = f"update {self._prepare.update_id}"
        try:
            async with asyncio.timeout(self._prepare.seconds), asyncio.TaskGroup() as group:
                parts = [group.create_task(self._from(number)) for number in self._expected]
        except TimeoutError:
            raise DeadlineExceeded(
                f"{update} has not arrived within {self._prepare.seconds:g} s"
            ) from None
        except BaseExceptionGroup as failed:
            raise first_error(failed) from None
        finally:
            await until_ended(*map(_revoked, self._counters))
        if not self._prepare.digests:
            return None
        return sum(part.result() for part in parts) % _MODULUS

    def take(self, peer: Peer, message: Sent) -> None:
        """Takes the message of a sender that it has written everything."""
        future = self._sent.get(peer.id)
        if future is None:
            raise ProtocolError(f"{peer.name!r} says that it has written without a grant")
        if not future.done():
            future.set_result(message)

    async def _from(self, number: int) -> int:
        """Waits for what one training rank writes, and returns its digest."""
        peer = await self._senders.get(self._prepare.plan_id, number)
        sent = self._sent[peer.id] = asyncio.get_running_loop().create_future()
        counter = self._engine.counter(peer)
        self._counters.append(counter)

        who = f"training rank {number}"
        with told_of_loss(peer, sent, who):
            (descriptor,) = counter.grant([(self._arena, 0, self._arena.nbytes)])
            self._send(peer, Grant(self._prepare.update_id, counter.imm, descriptor))
            message = await sent
        await self._counted(counter, message.immediates, peer, who)
        if not self._prepare.digests:
            return 0
        reading = asyncio.ensure_future(
            asyncio.to_thread(target_digest, self._expected[number], self._arena)
        )
        await until_ended(reading)  # the thread reads the arena, which may be freed after this
        found = reading.result()
        if found != message.digest:
            there = "none" if message.digest is None else f"{message.digest:016x}"
            raise DigestMismatch(
                f"what training rank {number} wrote for update {self._prepare.update_id} has the "
                f"digest {found:016x} here and {there} there; it is not used. Either the rank "
                "changed its parameters before they had been read, or memory, a NIC or a driver "
                "on the way damages data"
            )
        return found

    async def _counted(self, counter: Counter, total: int, peer: Peer, who: str) -> None:
        """Waits for `total` immediates. Raises the loss of the peer."""

        def lost(_: Peer) -> None:
            counter.release()

        peer.on_lost(lost)
        try:
            await counter.wait(total)
        except KvxferError:
            if not peer.alive:
                raise loss_of(peer, who) from None
            raise
        finally:
            peer.forget_on_lost(lost)


async def _revoked(counter: Counter) -> None:
    revoked = asyncio.Event()
    counter.revoke(revoked.set)
    await revoked.wait()
