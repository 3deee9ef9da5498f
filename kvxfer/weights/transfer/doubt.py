"""Termination without the coordinator: an instance that voted for an update learns its outcome.

The coordinator of a two-phase commit may be lost after the votes. Then the leaders ask each other
(the cooperative termination of Bernstein, Hadzilacos and Goodman, Concurrency Control and Recovery
in Database Systems, 1987, 7.4). If none of those that answer has committed, and none has a
coordinator that still may, the update is aborted. A leader that did commit, but that a network
partition separates from all others, then serves another version, and reports
that version.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from kvxfer.errors import KvxferError
from kvxfer.weights.transfer.links import Links, logger
from kvxfer.weights.transfer.messages import Ask, Tell

if TYPE_CHECKING:
    from kvxfer.engine import Peer

End: TypeAlias = Literal["committed", "aborted"]

_KEPT: Final = 256
_ASK_SECONDS: Final = 1.0
_AGAIN_SECONDS: Final = 0.1
_DOUBT_SECONDS: Final = 60.0


class Outcomes:
    """The outcomes of the last updates here, and the answers of other leaders. Event loop only."""

    def __init__(self) -> None:
        self._ends: OrderedDict[str, End] = OrderedDict()
        self._asked: dict[tuple[int, str], asyncio.Future[Tell]] = {}

    def add(self, update_id: str, end: End) -> None:
        self._ends.setdefault(update_id, end)
        while len(self._ends) > _KEPT:
            self._ends.popitem(last=False)

    def of(self, update_id: str) -> End | None:
        return self._ends.get(update_id)

    def told(self, peer: Peer, message: Tell) -> None:
        waiting = self._asked.get((peer.id, message.update_id))
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    async def ask(self, links: Links, address: str, update_id: str) -> str:
        """Asks the leader at an address for the outcome; "gone" if it does not answer."""
        try:
            async with asyncio.timeout(2 * _ASK_SECONDS):
                peer = await links.engine.connect(address, timeout=_ASK_SECONDS)
                key = (peer.id, update_id)
                told: asyncio.Future[Tell] = asyncio.get_running_loop().create_future()
                self._asked[key] = told
                try:
                    links.send(peer, Ask(update_id))
                    return (await told).state
                finally:
                    self._asked.pop(key, None)
        except (KvxferError, TimeoutError) as error:
            logger.warning("the leader at %s does not report the outcome: %s", address, error)
            return "gone"


async def resolve(links: Links, outcomes: Outcomes, update_id: str, others: list[str]) -> End:
    """Asks until the outcome is clear; "aborted" after a minute, even if others still wait."""
    try:
        async with asyncio.timeout(_DOUBT_SECONDS):
            while True:
                answers = await asyncio.gather(
                    *(outcomes.ask(links, address, update_id) for address in others)
                )
                if "committed" in answers:
                    return "committed"
                if "aborted" in answers or "waiting" not in answers:
                    return "aborted"
                await asyncio.sleep(_AGAIN_SECONDS)
    except TimeoutError:
        return "aborted"


async def recorded(decided: Callable[[str], Awaitable[End | None]], update_id: str) -> End | None:
    """Returns the recorded decision; None if it is unknown, or no answer comes for a minute."""
    try:
        async with asyncio.timeout(_DOUBT_SECONDS):
            while True:
                try:
                    return await decided(update_id)
                except KvxferError as error:
                    logger.warning("the outcome of update %s is unknown: %s", update_id, error)
                await asyncio.sleep(_ASK_SECONDS)
    except TimeoutError:
        return None
