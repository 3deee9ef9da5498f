"""Opening a transfer: choose a pair, then reserve it, again if another one was faster."""

from __future__ import annotations

import secrets
from typing import Final

from kvxfer.clock import Clock
from kvxfer.errors import NoCapacity, StaleEpoch
from kvxfer.scheduler.pairing import Pair
from kvxfer.scheduler.registry import Registry
from kvxfer.transfers import Party, Transfer, TransferRequest

_ATTEMPTS: Final = 8


async def open_transfer(
    registry: Registry, request: TransferRequest, *, seconds: float, clock: Clock
) -> Transfer:
    """Reserves the best pair for `seconds`. Raises NoCapacity or PromptTooLong."""
    for _ in range(_ATTEMPTS):
        pair = await registry.choose(request)
        transfer = await _reserved(registry, request, pair, seconds, clock)
        if transfer is not None:
            return transfer
    raise NoCapacity(
        "the fleet changes faster than a pair can be reserved; retry",
        reasons=[f"{_ATTEMPTS} pairs in a row were taken by other requests"],
    )


async def try_transfer(
    registry: Registry, request: TransferRequest, *, seconds: float, clock: Clock
) -> Transfer | None:
    """As open_transfer, with None where what is known here has no room."""
    for _ in range(_ATTEMPTS):
        pair = registry.find(request)
        if pair is None:
            return None
        transfer = await _reserved(registry, request, pair, seconds, clock)
        if transfer is not None:
            return transfer
    return None


async def _reserved(
    registry: Registry, request: TransferRequest, pair: Pair, seconds: float, clock: Clock
) -> Transfer | None:
    """None where the fleet has changed between the look at it and the reservation."""
    now = clock.unix()
    transfer_id = secrets.token_hex(16)
    transfer = Transfer(
        transfer_id=transfer_id,
        request_id=request.request_id or transfer_id,
        model=pair.prefill.model,
        prompt_tokens=request.prompt_tokens,
        prefill=Party.of(pair.prefill),
        decode=Party.of(pair.decode),
        prefill_blocks=pair.prefill_blocks,
        decode_blocks=pair.decode_blocks,
        created_at=now,
        expires_at=now + seconds,
        cached_tokens=pair.cached_tokens,
        score=pair.score,
    )
    try:
        await registry.reserve(transfer, seconds=seconds)
    except (StaleEpoch, NoCapacity):
        return None
    return transfer
