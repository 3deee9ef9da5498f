"""The ends of transfers that one side, the ticket or the control plane leaves waiting."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import pytest

from kvxfer.clock import CLOCK_LEEWAY
from kvxfer.errors import (
    ControlPlaneUnavailable,
    LeaseExpired,
    TicketExpired,
    TransferCancelled,
    UnknownBlockTable,
)
from kvxfer.kv.block_table import BlockTable
from kvxfer.kv.prefill_session import PrefillSession
from kvxfer.kv.session_state import DecodeState
from kvxfer.ticket import Ticket, sign_ticket
from tests.virtual_time import loop_clock, passes

from .pair import KEY, POOL, Pair


def now() -> float:
    return loop_clock().monotonic()


async def prefill_session(pair: Pair, lease_seconds: float, **more: Any) -> PrefillSession:
    with pair.prefill.pool.hold(1) as hold:  # the session pins it
        return await pair.prefill.endpoint.prefill_session(
            pair.token, hold, lease_seconds=lease_seconds, **more
        )


async def test_decode_fails_at_once_when_its_ticket_has_expired_at_prefill() -> None:
    """Decode does not wait for its own lease, as no request can come with that ticket any more."""
    pair = Pair(seconds=3.0 - CLOCK_LEEWAY)
    async with pair.prefill.endpoint, pair.decode.endpoint:
        pair.meet()
        receiver = await pair.decode.endpoint.decode_session(pair.token, "kvx://prefill", 2)
        await pair.settle()
        await passes(2.9)
        await pair.settle()
        assert (receiver.state, receiver.error) == (DecodeState.OFFERED, None)
        await passes(0.1)
        await pair.settle()
        with pytest.raises(TicketExpired, match=r"refused by prefill worker .*before its ticket"):
            await receiver.wait()
        assert pair.decode.pool.num_free == POOL


async def test_prefill_waits_for_no_offer_longer_than_its_ticket_is_good() -> None:
    pair = Pair(seconds=3.0 - CLOCK_LEEWAY)
    async with pair.prefill.endpoint:
        begun = now()
        session = await prefill_session(pair, lease_seconds=20.0)
        with pytest.raises(LeaseExpired, match="made no offer"):
            await session.wait()
        assert now() - begun == 3.0


async def test_nothing_is_kept_for_longer_than_the_ticket_is_good() -> None:
    pair = Pair()
    good_until = loop_clock().unix() + 6.0
    ticket = Ticket("t", "r", "prefill", 1, "", 0, good_until - CLOCK_LEEWAY)
    pair.token = sign_ticket(ticket, KEY)
    async with pair.prefill.endpoint, pair.decode.endpoint:
        pair.meet()
        kept = await prefill_session(pair, lease_seconds=3.0)
        await passes(2.0)
        await pair.decode.endpoint.keep(pair.token, "kvx://prefill")
        await pair.settle()
        assert kept.lease_remaining == 4.0
        with pytest.raises(LeaseExpired, match="made no offer within"):
            await kept.wait()
        assert loop_clock().unix() == good_until
        assert pair.prefill.pool.num_free == POOL
        with pytest.raises(TicketExpired):
            await pair.decode.endpoint.keep(pair.token, "kvx://prefill")


class ControlPlane:
    """A control plane without block tables. It answers at once, or fails just before the
    deadline."""

    def __init__(self, *, answers: bool) -> None:
        self.answers = answers
        self.asked: list[float] = []

    async def put_block_table(self, table: BlockTable, *, deadline: float) -> None:
        await self._answer(deadline)

    async def block_table(
        self, transfer_id: str, *, wait_seconds: float, deadline: float
    ) -> BlockTable:
        return await self._answer(deadline)

    async def _answer(self, deadline: float) -> NoReturn:
        self.asked.append(now())
        if self.answers:
            raise UnknownBlockTable("not yet")
        await passes(0.99 * deadline)
        raise ControlPlaneUnavailable("it does not answer")


async def test_a_control_plane_that_does_not_wait_is_not_asked_without_a_pause() -> None:
    control_plane = ControlPlane(answers=True)
    pair = Pair(control_plane=control_plane)
    async with pair.prefill.endpoint, pair.decode.endpoint:
        pair.meet()
        session = await prefill_session(pair, 1.05, decode_address="kvx://decode")
        with pytest.raises(LeaseExpired):
            await session.wait()
    assert len(control_plane.asked) == 11
    assert np.diff(control_plane.asked) == pytest.approx(0.1)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_control_plane_that_does_not_answer_is_the_error(side: str) -> None:
    pair = Pair(control_plane=ControlPlane(answers=False))
    async with pair.prefill.endpoint, pair.decode.endpoint:
        pair.meet()
        sender = await prefill_session(
            pair, 10.0 if side == "prefill" else 20.0, decode_address="kvx://decode"
        )
        if side == "prefill":
            with pytest.raises(ControlPlaneUnavailable):
                await sender.wait()
            return
        await pair.settle()
        receiver = await pair.decode.endpoint.decode_session(
            pair.token, None, 1, lease_seconds=10.0
        )
        with pytest.raises(ControlPlaneUnavailable):
            await receiver.wait()
        await pair.settle()
        with pytest.raises(TransferCancelled):
            await sender.wait()
