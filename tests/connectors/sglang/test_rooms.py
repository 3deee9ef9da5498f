"""Rooms whose request has ended without an offer are remembered for a lease, and no longer."""

from __future__ import annotations

import pytest

from kvxfer.connectors.sglang.rooms import Room, Rooms
from kvxfer.errors import LeaseExpired
from tests.virtual_time import VirtualClock


async def test_rooms_without_an_offer_do_not_pile_up() -> None:
    clock = VirtualClock()
    rooms = Rooms(lambda *_: None, 0.001, clock=clock)
    for number in range(20):
        with pytest.raises(LeaseExpired, match=f"room {number}: no decode server"):
            await rooms.ticket_for(Room(number, b"prompt"))
        clock.advance(1.0)
    assert len(rooms._left) == 1
