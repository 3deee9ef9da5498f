"""How the ranks of an instance learn its epoch: from the HELLOs of its first rank, which registers
it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvxfer.errors import DeadlineExceeded, InvalidArgument
from kvxfer.kv.messages import Hello

if TYPE_CHECKING:
    from kvxfer.engine import Peer
    from kvxfer.kv.identity import Identity
    from kvxfer.kv.pairs import Pairs

_REGISTRATION_SECONDS: Final = 60.0


async def follow_first_rank(
    pairs: Pairs, identity: Identity, address: str, set_epoch: Callable[[int], None]
) -> Peer:
    """Takes the epoch of the first rank, whose engine is at `address`, and each later one while the
    connection lasts. Returns when it has one.

    Raises as Pairs.meet(), InvalidArgument where another instance is there, and DeadlineExceeded
    where the first rank is not registered within a minute.
    """
    pair = await pairs.meet(address)
    if pair.hello.instance_id != identity.instance_id:
        raise InvalidArgument(
            f"the engine at {address} is of instance {pair.hello.instance_id!r}, not of "
            f"{identity.instance_id!r}; pass the address of this instance's first rank"
        )
    known = asyncio.Event()

    def take(hello: Hello) -> None:
        if hello.epoch:
            known.set()
        if hello.epoch > identity.epoch:
            set_epoch(hello.epoch)

    pair.on_hello = take
    take(pair.hello)
    pair.peer.on_lost(lambda _: known.set())
    try:
        async with asyncio.timeout(_REGISTRATION_SECONDS):
            await known.wait()
    except TimeoutError:
        raise DeadlineExceeded(
            f"the first rank of {identity.instance_id!r}, at {address}, was not registered within "
            f"{_REGISTRATION_SECONDS:g} s"
        ) from None
    if pair.peer.error is not None:
        raise pair.peer.error
    return pair.peer
