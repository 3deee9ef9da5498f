"""The prefill side of one request: waits for decode's offer, then sends page by page."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Sequence
from typing import Any, Final

from kvxfer.connectors.engine_blocks import EngineBlocks
from kvxfer.connectors.sglang.agent import Agent
from kvxfer.connectors.sglang.pools import Metadata
from kvxfer.connectors.sglang.progress import Progress
from kvxfer.connectors.sglang.rooms import Room
from kvxfer.connectors.sglang.tables import Tables
from kvxfer.errors import InvalidArgument, KvxferError, TransferCancelled
from kvxfer.kv.prefill_session import PrefillSession

logger = logging.getLogger(__name__)

# A session is cancelled within milliseconds, or within the peer timeout if decode is frozen.
_CANCEL_SECONDS: Final = 10.0


class Outgoing:
    """The prefill side of one request. SGLang's scheduler calls it; its coroutines run on the
    agent's loop."""

    def __init__(self, agent: Agent, metadata: Metadata, tables: Tables) -> None:
        self._agent = agent
        self._metadata = metadata
        self._tables = tables
        self._blocks = EngineBlocks(0)
        self._pages: list[int] = []
        self._task: asyncio.Task[None] | None = None  # loop only
        self._session: PrefillSession | None = None
        self._begun = False
        self._finishing = False
        self._sent = False
        self.error: KvxferError | None = None
        """The error with which the request has failed, or None."""

    @property
    def progress(self) -> Progress:
        if self.error is not None:
            return Progress.FAILED
        if self._sent:
            return Progress.SUCCESS
        if self._pages or self._finishing:
            return Progress.TRANSFERRING
        return Progress.BOOTSTRAPPING if self._session is None else Progress.WAITING

    @property
    def nbytes(self) -> int:
        return 0 if self._session is None else self._session.nbytes

    def begin(self, room: Room, num_pages: int) -> None:
        """Begins the request, whose prompt takes `num_pages` pages."""
        self._begun = True
        self._blocks = EngineBlocks(num_pages, self._tables.groups)
        self._agent.spawn(self._run(room))

    def fail(self, error: KvxferError) -> None:
        """Fails the request before it begins."""
        self.error = error

    def send(
        self, pages: Sequence[int], metadata_row: int, states: Sequence[Any] | None = None
    ) -> None:
        """Sends the prompt's next pages, which are computed. Its last pages come with the metadata
        row and the states, as SGLang lists them."""
        session = self._session
        if session is None or self.error is not None:
            return  # the request has failed, and SGLang's next poll reports it
        self._pages += pages
        until, whole = len(self._pages), len(self._blocks)
        try:
            if until > whole:
                raise InvalidArgument(
                    f"page {until} of a prompt of {whole} pages is sent: pass the same prompt to "
                    "both sides"
                )
            last = until == whole and (states is not None or not self._tables.state_layers)
            if pages:
                self._blocks.fill(self._tables.of_pages(self._pages))
                for layer in self._tables.kv_layers:
                    session.write_layer(layer, until)
            if last and not self._finishing:
                self._blocks.fill(self._tables.of_prompt(self._pages, states))
                for layer in self._tables.state_layers:
                    session.write_layer(layer, until)
        except InvalidArgument as error:
            logger.error("room %s: %s", session.request_id, error)
            self._agent.spawn(self._abort(str(error)))
        except KvxferError:
            pass  # the session's wait() raises it
        else:
            if last and not self._finishing:
                self._finishing = True
                self._agent.spawn(_finish(session, self._metadata.read(metadata_row)))

    def abort(self, reason: str) -> None:
        """Aborts the request. Nothing reads its pages any more when this returns. Any number of
        times."""
        if not self._begun or self.error is not None or self._sent:
            self.error = self.error or TransferCancelled(reason)
            return
        try:
            self._agent.run(self._abort(reason), _CANCEL_SECONDS)
        except concurrent.futures.TimeoutError:
            logger.error(
                "a transfer was not cancelled within %g s: the event loop of this server's "
                "transfer engine hangs; restart it",
                _CANCEL_SECONDS,
            )
            raise

    async def _abort(self, reason: str) -> None:
        if self._session is not None:
            await self._session.cancel(reason)
        elif self._task is not None:
            self._task.cancel(reason)
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self, room: Room) -> None:
        self._task = asyncio.current_task()
        try:
            ticket = await self._agent.rooms.ticket_for(room)
            self._session = await self._agent.endpoint.prefill_session(ticket, self._blocks)
            await self._session.wait()
            self._sent = True
        except asyncio.CancelledError:
            self.error = TransferCancelled(f"room {room.number}: aborted on prefill")
        except KvxferError as error:
            self.error = error
        except Exception as error:
            logger.exception("room %s is not sent", room.number)
            self.error = KvxferError(f"room {room.number} is not sent: {error!r}")


async def _finish(session: PrefillSession, tail: bytes) -> None:
    with contextlib.suppress(KvxferError):  # the session's wait() raises it
        await session.finish(tail)
