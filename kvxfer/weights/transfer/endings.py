"""The end of an update's concurrent parts: waits for all of them, and raises one error."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Generator
from typing import TYPE_CHECKING, Any

from kvxfer.errors import EngineError, KvxferError, PeerLost

if TYPE_CHECKING:
    from kvxfer.engine import Peer


def first_error(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the first of kvxfer's errors: the others follow from it."""
    leaves = list(_leaves(failed))
    return next((each for each in leaves if isinstance(each, KvxferError)), leaves[0])


def _leaves(failed: BaseExceptionGroup[BaseException]) -> Generator[BaseException, None, None]:
    for error in failed.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def loss_of(peer: Peer, who: str) -> EngineError:
    """Returns the error of a lost peer, with the name `who`."""
    error = peer.error or PeerLost("the connection ended")
    return type(error)(f"{who} was lost: {error}")


async def until_ended(*works: Awaitable[Any]) -> None:
    """Waits until all have succeeded or failed, even if this task is cancelled meanwhile."""
    whole = asyncio.gather(*works, return_exceptions=True)
    cancelled = False
    while not whole.done():
        try:
            await asyncio.shield(whole)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


@contextlib.contextmanager
def told_of_loss(peer: Peer, future: asyncio.Future[Any], who: str) -> Generator[None, None, None]:
    """Fails the future with the loss of a peer, if that comes first."""

    def lost(peer: Peer) -> None:
        if not future.done():
            future.set_exception(loss_of(peer, who))

    peer.on_lost(lost)
    try:
        yield
    finally:
        peer.forget_on_lost(lost)
