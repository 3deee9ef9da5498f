from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from kvxfer.errors import NoCapacity, StaleEpoch
from kvxfer.instances import InstanceState, Role
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.transfers import open_transfer
from kvxfer.transfers import Transfer, TransferRequest
from tests.virtual_time import VirtualClock
from verify.processes.control_plane import worker


class Contended(EmbeddedRegistry):
    """A registry in which another caller is faster than the first `times` reservations."""

    def __init__(self, times: int) -> None:
        super().__init__(clock=VirtualClock())
        self.times = times

    async def reserve(self, transfer: Transfer, *, seconds: float, **_: object) -> Transfer:
        if self.times:
            self.times -= 1
            raise StaleEpoch("re-registered meanwhile") if self.times % 2 else NoCapacity("taken")
        return await super().reserve(transfer, seconds=seconds)


async def filled(registry: EmbeddedRegistry, *, decodes: int = 1) -> EmbeddedRegistry:
    await registry.register(worker("p", num_blocks=10_000), state=InstanceState.READY)
    for number in range(decodes):
        await registry.register(worker(f"d{number}", Role.DECODE), state=InstanceState.READY)
    return registry


async def test_opened_transfer_is_reserved_and_named():
    clock = VirtualClock()
    registry = await filled(EmbeddedRegistry(clock=clock))
    request = TransferRequest(request_id="cmpl-7", prompt_tokens=40)
    transfer = await open_transfer(registry, request, seconds=30, clock=clock)
    assert await registry.transfer(transfer.transfer_id) == transfer
    assert (transfer.request_id, transfer.prompt_tokens) == ("cmpl-7", 40)
    assert (transfer.prefill_blocks, transfer.decode_blocks) == (3, 3)
    assert (transfer.created_at, transfer.expires_at) == (clock.unix(), clock.unix() + 30)
    assert transfer.prefill.epoch == (await registry.instance("p")).epoch


async def test_request_without_an_id_takes_that_of_its_transfer():
    registry = await filled(EmbeddedRegistry())
    transfer = await open_transfer(registry, TransferRequest(), seconds=30, clock=VirtualClock())
    assert transfer.request_id == transfer.transfer_id


async def test_open_transfers_spread_over_equal_instances():
    registry = await filled(EmbeddedRegistry(), decodes=4)
    transfers = await asyncio.gather(
        *(
            open_transfer(registry, TransferRequest(), seconds=30, clock=VirtualClock())
            for _ in range(12)
        )
    )
    assert Counter(t.decode.instance_id for t in transfers) == dict.fromkeys(
        ("d0", "d1", "d2", "d3"), 3
    )


async def test_pair_is_chosen_again_if_it_was_taken_meanwhile():
    registry = await filled(Contended(times=3))
    transfer = await open_transfer(registry, TransferRequest(), seconds=30, clock=VirtualClock())
    assert registry.times == 0
    assert (await registry.instance("p")).reserved.transfers == 1
    assert transfer.decode.instance_id == "d0"


async def test_contention_without_end_is_no_capacity():
    registry = await filled(Contended(times=1000))
    with pytest.raises(NoCapacity, match="retry") as refusal:
        await open_transfer(registry, TransferRequest(), seconds=30, clock=VirtualClock())
    assert "taken by other requests" in str(refusal.value.details["reasons"])
