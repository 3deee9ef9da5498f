"""Opening a transfer: choose a pair, then reserve it, again if another one was faster."""

from __future__ import annotations

import secrets
from typing import Final

from kvxfer.clock import Clock
from kvxfer.errors import NoCapacity, StaleEpoch
from kvxfer.scheduler.registry import Registry
from kvxfer.transfers import Party, Transfer, TransferRequest

_ATTEMPTS: Final = 8


async def open_transfer(
    registry: Registry, request: TransferRequest, *, seconds: float, clock: Clock
) -> Transfer:
    """Reserves the best pair for `seconds`. Raises NoCapacity or PromptTooLong."""
    transfer_id = secrets.token_hex(16)
    for _ in range(_ATTEMPTS):
        pair = await registry.choose(request)
        now = clock.unix()
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
            score=pair.score,
        )
        try:
            await registry.reserve(transfer, seconds=seconds)
        except (StaleEpoch, NoCapacity):
            continue  # the fleet changed between the look at it and the reservation
        return transfer
    raise NoCapacity(
        "the fleet changes faster than a pair can be reserved; retry",
        reasons=[f"{_ATTEMPTS} pairs in a row were taken by other requests"],
    )
