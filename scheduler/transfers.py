"""Opening a transfer: choose a pair, then reserve it, again if another one was faster."""

from __future__ import annotations

import secrets
from typing import Final

from kvxfer.clock import Clock
from kvxfer.errors import NoCapacity, StaleEpoch
from kvxfer.scheduler import refusals
from kvxfer.scheduler.registry import Registry
from kvxfer.transfers import Party, Transfer, TransferRequest

_ATTEMPTS: Final = 8


async def open_transfer(
    registry: Registry, request: TransferRequest, *, seconds: float, clock: Clock
) -> Transfer:
    """Reserves the best pair for `seconds`, or returns what is open under the request's id.

    Raises NoCapacity, PromptTooLong, and TransferExists where another request has the id.
    """
    transfer_id = request.transfer_id or secrets.token_hex(16)
    for _ in range(_ATTEMPTS):
        try:
            pair = await registry.choose(request)
        except NoCapacity:
            opened = await registry.opened(transfer_id)
            if opened is None:
                raise
            return _of(request, opened, opened.model)
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
            opened = await registry.reserve(transfer, seconds=seconds)
        except (StaleEpoch, NoCapacity):
            continue  # the fleet changed between the look at it and the reservation
        return opened if opened is transfer else _of(request, opened, transfer.model)
    raise NoCapacity(
        "the fleet changes faster than a pair can be reserved; retry",
        reasons=[f"{_ATTEMPTS} pairs in a row were taken by other requests"],
    )


def _of(request: TransferRequest, opened: Transfer, model: str) -> Transfer:
    """The transfer, if it is what `request` opened before; `model` is that of its pairs."""
    same = (
        opened.request_id == (request.request_id or opened.transfer_id)
        and opened.prompt_tokens == request.prompt_tokens
        and (request.model is None or opened.model == model)
        and (len(opened.sides) == 1) == request.aggregated
    )
    if not same:
        raise refusals.transfer_exists(opened)
    return opened
