"""The decode side of one request: offers its pages to prefill and waits until they are complete."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from kvxfer.connectors.engine_blocks import EngineBlocks
from kvxfer.connectors.sglang.agent import Agent
from kvxfer.connectors.sglang.bootstrap import Introductions
from kvxfer.connectors.sglang.introduction import Introduction
from kvxfer.connectors.sglang.pools import Metadata
from kvxfer.connectors.sglang.progress import Progress
from kvxfer.connectors.sglang.rooms import Room
from kvxfer.connectors.sglang.tables import Tables
from kvxfer.errors import (
    DeadlineExceeded,
    InvalidArgument,
    KvxferError,
    PeerError,
    TicketInvalid,
    TransferCancelled,
)
from kvxfer.kv.decode_session import DecodeSession
from kvxfer.ticket import Ticket, sign_ticket

logger = logging.getLogger(__name__)


class Incoming:
    """The decode side of one request. SGLang's scheduler calls it; its coroutines run on the
    agent's loop.

    `address` is that of prefill's bootstrap server, from the client. `check` raises if the prefill
    instance there does not match this one.
    """

    def __init__(
        self,
        agent: Agent,
        introductions: Introductions,
        metadata: Metadata,
        tables: Tables,
        address: str,
        check: Callable[[Introduction], None],
    ) -> None:
        self._agent = agent
        self._introductions = introductions
        self._metadata = metadata
        self._tables = tables
        self._address = address
        self._check = check
        self._created = agent.clock.monotonic()
        self._task: asyncio.Task[None] | None = None  # loop only
        self._known = False
        self._begun = False
        self._aborted = False
        self._received = False
        self._error: KvxferError | None = None

    @property
    def error(self) -> KvxferError | None:
        """The error with which the request has failed, or None."""
        if self._error is None and not self._known:
            self._error = self._introductions.problem(self._address, self._created)
        return self._error

    @property
    def progress(self) -> Progress:
        if self.error is not None:
            return Progress.FAILED
        if self._received:
            return Progress.SUCCESS
        if self._begun:
            return Progress.TRANSFERRING
        return Progress.WAITING if self._known else Progress.BOOTSTRAPPING

    def introduced(self) -> None:
        """Notes that the prefill instance at the address is known."""
        self._known = True

    def fail(self, error: KvxferError) -> None:
        """Fails the request before it begins."""
        self._error = error

    def receive(
        self,
        room: Room,
        pages: Sequence[int],
        metadata_row: int,
        states: Sequence[Any] | None = None,
    ) -> None:
        """Offers the pages of the whole prompt, and the states as SGLang lists them. The metadata
        row is filled once all of these have arrived."""
        if self.error is not None:
            return
        try:
            blocks = EngineBlocks(self._tables.of_prompt(pages, states))
        except InvalidArgument as error:
            self.fail(error)
        else:
            self._begun = True
            self._agent.spawn(self._run(room, blocks, metadata_row))

    def abort(self, reason: str) -> None:
        """Fails the request as soon as nothing can land in its pages any more."""
        self._aborted = True
        if not self._begun:
            self._error = self.error or TransferCancelled(reason)
        else:
            self._agent.spawn(self._cancel())

    async def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self, room: Room, blocks: EngineBlocks, metadata_row: int) -> None:
        self._task = asyncio.current_task()
        try:
            await self._receive(room, blocks, metadata_row)
            self._received = True
        except asyncio.CancelledError:
            self._error = TransferCancelled(f"room {room.number}: aborted on decode")
        except KvxferError as error:
            self._error = error
        except Exception as error:
            logger.exception("room %s is not received", room.number)
            self._error = KvxferError(f"room {room.number} is not received: {error!r}")

    async def _receive(self, room: Room, blocks: EngineBlocks, metadata_row: int) -> None:
        if self._aborted:
            raise asyncio.CancelledError
        opening = asyncio.ensure_future(self._open(room, blocks))
        try:
            session = await asyncio.shield(opening)
        except asyncio.CancelledError:
            # Prefill learns of the abort only once it has the OFFER, and then need not wait for it.
            with contextlib.suppress(KvxferError):
                await (await opening).cancel("its request was aborted")
            raise
        async with session:
            tail = await session.wait()
            self._metadata.write(metadata_row, tail)
            session.take()

    async def _open(self, room: Room, blocks: EngineBlocks) -> DecodeSession:
        prefill = self._introductions.known.get(self._address)
        if prefill is not None:
            try:
                return await self._offer(prefill, room, blocks)
            except (PeerError, TicketInvalid, DeadlineExceeded) as error:
                logger.info("asking prefill at %s again: %s", self._address, error)
                again = await self._introductions.ask(self._address)
                if again == prefill:
                    raise
                prefill = again  # prefill was restarted
        else:
            prefill = await self._introductions.ask(self._address)
        return await self._offer(prefill, room, blocks)

    async def _offer(
        self, prefill: Introduction, room: Room, blocks: EngineBlocks
    ) -> DecodeSession:
        self._check(prefill)
        settings, now = self._agent.settings, self._agent.clock.unix()
        ticket = Ticket(
            transfer_id=room.transfer_id,
            request_id=str(room.number),
            prefill_id=prefill.instance_id,
            prefill_epoch=prefill.epoch,
            decode_id=self._agent.instance_id,
            decode_epoch=self._agent.epoch,
            expires_at=now + settings.lease_seconds,
            issued_at=now,
        )
        return await self._agent.endpoint.decode_session(
            sign_ticket(ticket, settings.keys), prefill.engine_address, blocks
        )
