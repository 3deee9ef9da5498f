"""The brokered handshake: prefill connects to decode, and the block table goes through the control
plane.

It is for a decode worker that cannot connect to prefill. The OFFER is the same, and once prefill
has it the transfer continues over the engines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from kvxfer.clock import Clock
from kvxfer.errors import (
    InvalidArgument,
    KvxferError,
    TicketInvalid,
    TransferCancelled,
    UnknownBlockTable,
    UnknownTransfer,
)
from kvxfer.instances import Role
from kvxfer.kv.admission import require_peer
from kvxfer.kv.block_table import BlockTable, BlockTables, sign_block_table, verify_block_table
from kvxfer.kv.messages import Expect

if TYPE_CHECKING:
    from kvxfer.kv.admission import CurrentIdentity
    from kvxfer.kv.connections import Connections
    from kvxfer.kv.decode_session import DecodeSession
    from kvxfer.kv.prefill_session import PrefillSession
    from kvxfer.kv.prefill_side import PrefillSide
    from kvxfer.ticket import Ticket

logger = logging.getLogger(__name__)

# The wait of one request for a block table; short enough for every proxy in between.
_POLL_SECONDS: Final = 10.0
# The least time from one request to the next, also if the control plane or a proxy does not wait.
_PAUSE_SECONDS: Final = 0.1
# The share of a session's remaining time that publishing may take.
_PATIENCE: Final = 0.9


class Brokered:
    """The block tables that an endpoint's sessions publish at the control plane or fetch there,
    each in a task. Loop only.

    A task ends with its session, whose lease is its deadline. Publishing ends a little before, so
    that the session fails with the task's error.
    """

    def __init__(
        self,
        control_plane: BlockTables | None,
        identity: CurrentIdentity,
        connections: Connections,
        prefill_side: PrefillSide,
        clock: Clock,
    ) -> None:
        self._control_plane = control_plane
        self._identity = identity
        self._connections = connections
        self._prefill_side = prefill_side
        self._clock = clock
        self._tasks: dict[PrefillSession | DecodeSession, asyncio.Task[None]] = {}

    def require(self) -> BlockTables:
        """Returns the control plane. Raises InvalidArgument if the endpoint has none."""
        if self._control_plane is None:
            raise InvalidArgument(
                f"the KV endpoint of instance {self._identity.instance_id!r} has no control plane "
                "for a brokered handshake; pass KvOptions(control_plane=…), or use the direct one"
            )
        return self._control_plane

    def publish(self, session: DecodeSession, ticket: Ticket) -> None:
        """Publishes the session's block table at the control plane."""
        self._start(session, partial(self._publish, session, ticket))

    def fetch(self, session: PrefillSession, ticket: Ticket, decode_address: str) -> None:
        """Connects to decode, and takes its OFFER as soon as it is at the control plane."""
        self._start(session, partial(self._fetch, session, ticket, decode_address))

    def ended(self, session: PrefillSession | DecodeSession) -> None:
        """Cancels the session's task."""
        task = self._tasks.pop(session, None)
        if task is not None:
            task.cancel()

    def _start(
        self, session: PrefillSession | DecodeSession, work: Callable[[], Awaitable[None]]
    ) -> None:
        task = asyncio.get_running_loop().create_task(self._run(session, work))
        self._tasks[session] = task
        task.add_done_callback(lambda _: self._tasks.pop(session, None))

    async def _run(
        self, session: PrefillSession | DecodeSession, work: Callable[[], Awaitable[None]]
    ) -> None:
        try:
            await work()
        except UnknownTransfer as ended:
            session._fail(
                TransferCancelled(
                    f"transfer {session.transfer_id}: it has ended at the control plane: {ended}"
                )
            )
        except KvxferError as error:
            session._fail(error)

    async def _publish(self, session: DecodeSession, ticket: Ticket) -> None:
        table = sign_block_table(session._message(), ticket, self._identity.keys)
        deadline = _PATIENCE * session.lease_remaining
        await self.require().put_block_table(table, deadline=deadline)

    async def _fetch(self, session: PrefillSession, ticket: Ticket, decode_address: str) -> None:
        connection = await self._connections.meet(decode_address)
        require_peer(ticket, Role.DECODE, connection.hello, f"at {decode_address} is")
        if session._met:
            return  # decode has sent its OFFER itself
        session._meet(connection)
        connection.send(Expect(ticket.transfer_id, ticket.token))
        table = await self._ask(session)
        made_under = verify_block_table(table, self._identity.keys, now=self._clock.unix())
        if made_under != ticket:
            raise TicketInvalid(
                f"the block table of transfer {ticket.transfer_id} is not for the ticket of the "
                "prefill request; give both sides the same ticket"
            )
        self._prefill_side.offer(connection, table.offer, ticket)

    async def _ask(self, session: PrefillSession) -> BlockTable:
        while True:
            asked, left = self._clock.monotonic(), session.lease_remaining
            try:
                return await self.require().block_table(
                    session.transfer_id, wait_seconds=min(_POLL_SECONDS, left), deadline=left
                )
            except UnknownBlockTable:
                await asyncio.sleep(asked + _PAUSE_SECONDS - self._clock.monotonic())
