"""Opening a transfer: choose a pair and reserve it; choose again if another request was faster."""

from __future__ import annotations

import secrets
from typing import Final

from kvxfer.clock import Clock
from kvxfer.errors import NoCapacity, StaleEpoch
from kvxfer.scheduler import refusals
from kvxfer.scheduler.pairing import Pair
from kvxfer.scheduler.registry import Registry
from kvxfer.transfers import Party, Transfer, TransferRequest

_ATTEMPTS: Final = 8


async def open_transfer(
    registry: Registry, request: TransferRequest, *, seconds: float, clock: Clock
) -> Transfer:
    """Reserves the best pair for `seconds`, or returns the transfer open under the request's id.

    Raises NoCapacity, PromptTooLong, and TransferExists if another request has the id.
    """
    for _ in range(_ATTEMPTS):
        try:
            pair = await registry.choose(request)
        except NoCapacity:
            opened = await already_open(registry, request)
            if opened is None:
                raise
            return opened
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
    """Opens as open_transfer does; returns None if nothing that is known here has room."""
    for _ in range(_ATTEMPTS):
        pair = registry.find(request)
        if pair is None:
            return None
        transfer = await _reserved(registry, request, pair, seconds, clock)
        if transfer is not None:
            return transfer
    return None


async def already_open(registry: Registry, request: TransferRequest) -> Transfer | None:
    """Returns the transfer that is open under the request's id. Raises TransferExists if it is of
    another request."""
    if request.transfer_id is None:
        return None
    opened = await registry.opened(request.transfer_id)
    return None if opened is None else _of(request, opened, opened.model)


async def _reserved(
    registry: Registry, request: TransferRequest, pair: Pair, seconds: float, clock: Clock
) -> Transfer | None:
    """Reserves a pair. Returns None if the fleet has changed since the pair was chosen."""
    now = clock.unix()
    transfer_id = request.transfer_id or secrets.token_hex(16)
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
        alone_because=pair.alone_because,
        score=pair.score,
    )
    try:
        opened = await registry.reserve(
            transfer, seconds=seconds, prefix_hashes=request.prefix_hashes
        )
    except (StaleEpoch, NoCapacity):
        return None
    return opened if opened is transfer else _of(request, opened, transfer.model)


def _of(request: TransferRequest, opened: Transfer, model: str) -> Transfer:
    """Returns the transfer if `request` opened it before; `model` is the model of its pairs.

    Raises TransferExists otherwise.
    """
    same = (
        opened.request_id == (request.request_id or opened.transfer_id)
        and opened.prompt_tokens == request.prompt_tokens
        and (request.model is None or opened.model == model)
        and (request.or_aggregated or opened.aggregated == request.aggregated)
    )
    if not same:
        raise refusals.transfer_exists(opened)
    return opened
