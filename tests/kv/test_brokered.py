"""The brokered handshake over real engines and a real control plane."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from kvxfer.client import ControlPlaneClient
from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.errors import (
    BlockPoolExhausted,
    ControlPlaneUnavailable,
    EngineClosed,
    InvalidArgument,
    KvxferError,
    LayoutMismatch,
    LeaseExpired,
    PeerError,
    PeerLost,
    TicketInvalid,
    TransferCancelled,
)
from kvxfer.instances import Role
from kvxfer.kv.block_table import BlockTable
from kvxfer.kv.decode_session import DecodeSession
from kvxfer.kv.prefill_session import PrefillSession
from kvxfer.kv.session_state import DecodeState, PrefillState
from kvxfer.ticket import sign_ticket, verify_ticket
from verify.polling import PATIENCE, eventually, turns
from verify.processes.block_tables import block_table
from verify.processes.control_plane import CLUSTER_KEY, RunningControlPlane

from .brokered_pair import BrokeredPair, transfer_of
from .workers import LAYOUT, NUM_BLOCKS, early_offers, make_ticket, worker

pytestmark = pytest.mark.native


@pytest_asyncio.fixture
async def fleet(fabric: str) -> AsyncIterator[BrokeredPair]:
    with RunningControlPlane(lease_seconds=60, transfer_seconds=120) as server:
        async with (
            ControlPlaneClient(server.url) as client,
            worker("p", fabric, ticket_key=CLUSTER_KEY, control_plane=client) as prefill,
            worker("d", fabric, ticket_key=CLUSTER_KEY, control_plane=client) as decode,
        ):
            fleet = BrokeredPair(prefill, decode, client, server)
            await fleet.register(prefill, Role.PREFILL)
            await fleet.register(decode, Role.DECODE)
            yield fleet


async def waits(fleet: BrokeredPair, side: str, ticket: str) -> None:
    """Waits until this side has come, and waits for the other."""
    expectations = fleet.decode.endpoint._expected_offers
    if side == "prefill":
        await eventually(lambda: transfer_of(ticket) in expectations._expected)
    else:
        await eventually(lambda: len(expectations) == 1)


async def met(session: PrefillSession) -> None:
    """Waits until prefill knows its decode worker, and therefore asks for the table."""
    await eventually(lambda: bool(session._met))


@pytest_asyncio.fixture
async def ask(fleet: BrokeredPair, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[asyncio.Event]:
    """An event: prefill expects offers, but asks the control plane for them only once it is set."""
    event = asyncio.Event()
    brokered = fleet.prefill.endpoint._brokered
    really = brokered._ask

    async def later(session: PrefillSession) -> BlockTable:
        await event.wait()
        return await really(session)

    monkeypatch.setattr(brokered, "_ask", later)
    yield event
    event.set()


async def told(session: PrefillSession | DecodeSession) -> KvxferError:
    """Returns the error of a session, which ends soon."""
    with pytest.raises(KvxferError) as caught:
        await asyncio.wait_for(session.wait(), PATIENCE)
    return caught.value


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_the_cache_arrives_whichever_side_comes_first(
    fleet: BrokeredPair, rng: random.Random, first: str
) -> None:
    for _ in range(3):  # first unconnected, then connected
        ticket = await fleet.ticket()
        steps = [fleet.send(ticket, rng, 5), fleet.receive(ticket, 5)]
        if first == "decode":
            steps.reverse()
        begun = asyncio.create_task(steps[0])
        await waits(fleet, first, ticket)
        assert await steps[1] == await begun
        assert fleet.all_free()
        assert len(fleet.decode.engine.peers) == 1


async def test_prefill_dials_and_decode_does_not(
    fleet: BrokeredPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet.decode.engine, "connect", None)
    ticket = await fleet.ticket()
    decoding = asyncio.create_task(fleet.begin_decode(ticket))
    await waits(fleet, "decode", ticket)
    assert not decoding.done()
    assert not fleet.decode.engine.peers
    assert fleet.decode.pool.num_free == NUM_BLOCKS
    sender = await fleet.begin_prefill(ticket)
    receiver = await decoding
    await eventually(lambda: receiver.state is DecodeState.RECEIVING)
    table = await fleet.client.block_table(transfer_of(ticket))
    assert table.offer.ticket == ticket
    assert (table.decode_id, table.decode_epoch) == ("d", fleet.decode.endpoint.epoch)
    await sender.cancel("seen enough")
    assert isinstance(await told(receiver), TransferCancelled)


async def test_many_transfers_at_once_get_their_own_blocks(
    fleet: BrokeredPair, rng: random.Random
) -> None:
    tickets = [await fleet.ticket() for _ in range(8)]
    sides = [fleet.send(ticket, rng, 2) for ticket in tickets]
    sides += [fleet.receive(ticket, 2) for ticket in tickets]
    results = await asyncio.gather(*sides)
    assert results[:8] == results[8:]


# --- one side gives up -----------------------------------------------------------------------


async def test_decode_that_is_aborted_while_it_waits_for_prefill_leaves_nothing(
    fleet: BrokeredPair, rng: random.Random
) -> None:
    ticket = await fleet.ticket()
    decoding = asyncio.create_task(fleet.begin_decode(ticket))
    await waits(fleet, "decode", ticket)
    decoding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await decoding
    assert fleet.all_free()
    assert not len(fleet.decode.endpoint._expected_offers)
    # The ticket is still valid.
    sent, received = await asyncio.gather(fleet.send(ticket, rng), fleet.receive(ticket))
    assert sent == received


async def test_prefill_that_is_aborted_while_it_waits_for_the_table_leaves_nothing(
    fleet: BrokeredPair,
) -> None:
    ticket = await fleet.ticket()
    sender = await fleet.begin_prefill(ticket)
    await met(sender)
    await eventually(lambda: bool(fleet.server.registry._arrivals._waiting))
    await sender.cancel("changed my mind")
    assert sender.state is PrefillState.CANCELLED
    assert fleet.all_free()
    await eventually(lambda: not fleet.server.registry._arrivals._waiting)
    assert not fleet.prefill.endpoint._brokered._tasks
    # Decode, which comes later, learns of it at once, and takes no block.
    expected = fleet.decode.endpoint._expected_offers._expected[transfer_of(ticket)]
    await eventually(lambda: expected.error is not None)
    with pytest.raises(TransferCancelled, match="cancelled by prefill worker 'p': changed my mind"):
        await asyncio.wait_for(fleet.begin_decode(ticket), PATIENCE)
    assert fleet.all_free()


@pytest.mark.usefixtures("ask")
async def test_decode_that_gives_up_before_prefill_has_the_table_tells_it(
    fleet: BrokeredPair,
) -> None:
    ticket = await fleet.ticket()
    sender = await fleet.begin_prefill(ticket)
    receiver = await fleet.begin_decode(ticket)
    await receiver.cancel("out of patience")
    assert "cancelled by decode worker 'd': out of patience" in str(await told(sender))
    await eventually(lambda: receiver.state is DecodeState.CANCELLED)  # prefill has answered
    assert fleet.all_free()


@pytest.mark.parametrize("waits", ["for the connection", "for the table"])
async def test_a_lease_ends_the_wait(fleet: BrokeredPair, waits: str) -> None:
    ticket = await fleet.ticket()
    if waits == "for the connection":
        with pytest.raises(LeaseExpired, match=r"'p' did not ask for an offer within 0.1 s"):
            await fleet.begin_decode(ticket, lease_seconds=0.1)
    else:
        sender = await fleet.begin_prefill(ticket)
        asked_for = fleet.server.registry._arrivals._waiting
        await eventually(lambda: asked_for)
        sender._lease.renew(0.01)
        error = await told(sender)
        assert isinstance(error, LeaseExpired)
        assert "decode worker 'd' made no offer within 0.01 s" in str(error)
        await eventually(lambda: not asked_for)
    assert fleet.all_free()


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_transfer_that_is_released_ends_both_sides(
    fleet: BrokeredPair, ask: asyncio.Event, side: str
) -> None:
    if side == "prefill":
        ask.set()
    ticket = await fleet.ticket()
    sender = await fleet.begin_prefill(ticket)
    await met(sender)
    await fleet.release(ticket)
    if side == "decode":
        error = await told(await fleet.begin_decode(ticket))
        assert isinstance(await told(sender), TransferCancelled)
    else:
        error = await told(sender)
    assert isinstance(error, TransferCancelled)
    assert "it has ended at the control plane" in str(error)
    assert fleet.all_free()


# --- one side dies ---------------------------------------------------------------------------


async def test_prefill_fails_when_decode_dies_while_it_waits_for_the_table(
    fleet: BrokeredPair,
) -> None:
    sender = await fleet.begin_prefill(await fleet.ticket())
    await met(sender)
    await fleet.decode.engine.close()
    assert isinstance(await told(sender), PeerLost)
    assert fleet.all_free()


@pytest.mark.usefixtures("ask")
async def test_decode_fails_when_prefill_dies_before_it_took_the_offer(
    fleet: BrokeredPair,
) -> None:
    ticket = await fleet.ticket()
    sender = await fleet.begin_prefill(ticket)
    receiver = await fleet.begin_decode(ticket)
    await fleet.prefill.engine.close()
    assert isinstance(await told(receiver), PeerLost)
    assert isinstance(await told(sender), KvxferError)
    assert fleet.all_free()


async def test_decode_that_comes_after_prefill_has_died_fails_at_once(
    fleet: BrokeredPair,
) -> None:
    ticket = await fleet.ticket()
    sender = await fleet.begin_prefill(ticket)
    await eventually(
        lambda: transfer_of(ticket) in fleet.decode.endpoint._expected_offers._expected
    )
    await fleet.prefill.engine.close()
    assert isinstance(await told(sender), KvxferError)
    await eventually(lambda: not fleet.decode.engine.peers)
    with pytest.raises(PeerLost):
        await asyncio.wait_for(fleet.begin_decode(ticket), PATIENCE)


async def test_prefill_fails_if_decode_has_ended_before_it_comes(
    fleet: BrokeredPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvxfer.kv.prefill_session._CAUSE_SECONDS", 0)
    ticket = await fleet.ticket()
    await fleet.decode.engine.close()
    assert isinstance(await told(await fleet.begin_prefill(ticket)), PeerError)
    assert fleet.all_free()


async def test_an_endpoint_that_closes_ends_every_wait(fleet: BrokeredPair) -> None:
    ticket = await fleet.ticket()
    waiting = asyncio.create_task(fleet.begin_decode(ticket))
    await waits(fleet, "decode", ticket)
    await fleet.decode.endpoint.close()
    with pytest.raises(EngineClosed, match="instance 'd' closes"):
        await asyncio.wait_for(waiting, PATIENCE)


async def test_decode_fails_when_the_endpoint_of_prefill_closes(fleet: BrokeredPair) -> None:
    ticket = await fleet.ticket()
    sender = await fleet.begin_prefill(ticket)
    await met(sender)
    await fleet.prefill.endpoint.close()
    assert "instance 'p' closes" in str(await told(sender))
    with pytest.raises(TransferCancelled, match="instance 'p' closes"):
        # If CANCEL has not arrived yet, there is a session, which then receives it.
        await asyncio.wait_for((await fleet.begin_decode(ticket)).wait(), PATIENCE)


# --- sides that do not fit together ----------------------------------------------------------


@pytest.mark.parametrize("altered", ["imm", "blocks", "another transfer"])
async def test_a_table_that_was_altered_at_the_control_plane_is_refused(
    fleet: BrokeredPair, ask: asyncio.Event, altered: str
) -> None:
    ticket = await fleet.ticket()
    sender = await fleet.begin_prefill(ticket)
    receiver = await fleet.begin_decode(ticket)
    transfer_id = transfer_of(ticket)
    table = await eventually(lambda: fleet.client.block_table(transfer_id))
    match altered:
        case "imm":
            offer = msgspec.structs.replace(table.offer, imm=table.offer.imm + 1)
            table = msgspec.structs.replace(table, offer=offer)
        case "blocks":
            offer = msgspec.structs.replace(table.offer, blocks=table.offer.blocks[:8])
            table = msgspec.structs.replace(table, offer=offer)
        case _:
            other = verify_ticket(await fleet.ticket(), CLUSTER_KEY, now=SYSTEM_CLOCK.unix())
            table = block_table(other)
    fleet.server.registry._tables[transfer_id] = table
    ask.set()
    error = await told(sender)
    assert isinstance(error, TicketInvalid)
    assert isinstance(await told(receiver), TransferCancelled)
    assert fleet.all_free()


async def test_prefill_that_is_sent_to_another_decode_worker_does_not_ask(
    fleet: BrokeredPair, fabric: str
) -> None:
    async with worker("e", fabric) as other:
        with fleet.prefill.pool.hold(1) as hold:
            sender = await fleet.prefill.endpoint.prefill_session(
                await fleet.ticket(), hold, decode_address=other.engine.address
            )
            error = await told(sender)
    assert isinstance(error, TicketInvalid)
    assert "names decode worker 'd'" in str(error)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"decode_id": "e"}, "names decode worker 'e' of epoch"),
        ({"decode_epoch": 1}, "names decode worker 'd' of epoch 1, this is 'd'"),
        ({"prefill_epoch": 1}, "names prefill worker 'p' of epoch 1, an offer is expected by 'p'"),
        ({"expires_at": 1.0}, "expired"),
    ],
    ids=lambda change: next(iter(change)) if isinstance(change, dict) else "",
)
async def test_decode_refuses_a_prefill_worker_whose_ticket_is_not_for_both(
    fleet: BrokeredPair, change: dict[str, Any], said: str
) -> None:
    good = await fleet.ticket()
    ticket = verify_ticket(good, CLUSTER_KEY, now=SYSTEM_CLOCK.unix())
    bad = replace(ticket, token=sign_ticket(replace(ticket, **change), CLUSTER_KEY))
    brokered = fleet.prefill.endpoint._brokered
    sender = await fleet.begin_prefill(good)
    brokered.ended(sender)
    brokered.fetch(sender, bad, fleet.decode.engine.address)
    error = await told(sender)
    assert isinstance(error, TransferCancelled)
    assert said in str(error)
    assert not fleet.decode.endpoint._expected_offers._expected.get(transfer_of(good))


async def test_a_second_decode_request_with_one_ticket_is_refused(fleet: BrokeredPair) -> None:
    ticket = await fleet.ticket()
    first = asyncio.create_task(fleet.begin_decode(ticket))
    await waits(fleet, "decode", ticket)
    with pytest.raises(TicketInvalid, match="another decode request waits"):
        await fleet.begin_decode(ticket)
    sender = await fleet.begin_prefill(ticket)
    receiver = await first
    await sender.cancel("seen enough")
    assert isinstance(await told(receiver), TransferCancelled)


async def dial_at_once(fleet: BrokeredPair) -> None:
    """Connects both twice. Dials again if one dial was so fast that there is one connection."""
    prefill, decode = fleet.prefill.engine, fleet.decode.engine

    def apart() -> bool:
        for peer in [*prefill.peers, *decode.peers]:
            peer.fence()
        return not prefill.peers and not decode.peers

    while True:
        await asyncio.gather(
            prefill.connect(decode.address, timeout=PATIENCE),
            decode.connect(prefill.address, timeout=PATIENCE),
        )
        # The dialed side may see a connection a little later than the side that dialed.
        with contextlib.suppress(TimeoutError):
            await eventually(
                lambda: len(prefill.peers) == len(decode.peers) == 2, 0.02, pause=0.001
            )
            return
        await eventually(apart)


async def test_transfers_use_the_right_one_of_two_connections(
    fleet: BrokeredPair, rng: random.Random
) -> None:
    await dial_at_once(fleet)
    for _ in range(3):
        await fleet.connect(rng)


async def test_tables_of_unequal_length_are_an_error_of_both_sides(
    fleet: BrokeredPair, rng: random.Random
) -> None:
    ticket = await fleet.ticket()
    sender = await fleet.begin_prefill(ticket, 2)
    receiver = await fleet.begin_decode(ticket, 3)
    text = "offers 3 blocks for the 2 blocks of prefill"
    assert text in str(await told(sender))
    assert text in str(await told(receiver))
    assert fleet.all_free()


async def test_layouts_that_differ_are_refused_before_a_block_is_taken(
    fleet: BrokeredPair, fabric: str
) -> None:
    other = replace(LAYOUT, dtype="bfloat16")
    async with worker(
        "d", fabric, layout=other, ticket_key=CLUSTER_KEY, control_plane=fleet.client
    ) as decode:
        decode.endpoint.set_epoch(fleet.decode.endpoint.epoch)
        fleet.decode = decode
        ticket = await fleet.ticket()
        sender = await fleet.begin_prefill(ticket)
        with pytest.raises(LayoutMismatch):
            await fleet.begin_decode(ticket)
        await sender.cancel("the router heard of it")


async def test_a_pool_without_room_leaves_the_ticket_good(
    fleet: BrokeredPair, rng: random.Random
) -> None:
    ticket = await fleet.ticket()
    sending = asyncio.create_task(fleet.send(ticket, rng))
    with fleet.decode.pool.hold(NUM_BLOCKS), pytest.raises(BlockPoolExhausted):
        await fleet.begin_decode(ticket)
    assert await fleet.receive(ticket) == await sending


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_a_prefill_worker_that_expects_a_brokered_offer_takes_a_direct_one(
    fleet: BrokeredPair, rng: random.Random, first: str
) -> None:
    address = fleet.prefill.engine.address

    async def receive(ticket: str) -> list[bytes]:
        async with fleet.decode.endpoint.decode_session(ticket, address, 3) as receiver:
            await receiver.wait()
            with receiver.take() as hold:
                return fleet.decode.contents(hold.ids.tolist())

    await dial_at_once(fleet)
    for _ in range(3):
        ticket = await fleet.ticket()
        steps = [fleet.send(ticket, rng), receive(ticket)]
        if first == "decode":
            steps.reverse()
        begun = asyncio.create_task(steps[0])
        if first == "decode":
            await eventually(lambda: early_offers(fleet.prefill) == 1)
        else:
            await waits(fleet, first, ticket)
        assert await steps[1] == await begun
    assert not fleet.prefill.endpoint._brokered._tasks
    assert not fleet.prefill.endpoint._prefill_side.sessions


async def test_an_endpoint_without_a_control_plane_says_so(fabric: str) -> None:
    async with worker("p", fabric) as prefill, worker("d", fabric) as decode:
        ticket = make_ticket(prefill, decode)
        with pytest.raises(InvalidArgument, match="'d' has no control plane"):
            await decode.endpoint.decode_session(ticket, None, 1)
        with (
            prefill.pool.hold(1) as hold,
            pytest.raises(InvalidArgument, match="'p' has no control plane"),
        ):
            await prefill.endpoint.prefill_session(ticket, hold, decode_address="kvx://h:1/a")


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_an_unavailable_control_plane_is_the_error(
    fleet: BrokeredPair, rng: random.Random, side: str
) -> None:
    await fleet.connect(rng)
    ticket = await fleet.ticket()
    await asyncio.to_thread(fleet.server.stop)
    sender = await fleet.begin_prefill(ticket, lease_seconds=0.5 if side == "prefill" else None)
    if side == "prefill":
        error = await told(sender)
    else:
        await waits(fleet, "prefill", ticket)
        error = await told(await fleet.begin_decode(ticket, lease_seconds=0.5))
        assert isinstance(await told(sender), TransferCancelled)
    assert fleet.all_free()
    # Prefill and decode retry until the lease ends, which may come first by a moment.
    assert isinstance(error, ControlPlaneUnavailable | LeaseExpired)


# --- random ends -----------------------------------------------------------------------------


async def test_no_block_stays_in_use_whichever_side_gives_up_and_when(
    fleet: BrokeredPair, rng: random.Random
) -> None:
    outcomes = set()

    async def side(step: Callable[[], Awaitable[object]]) -> object:
        await turns(rng, 200)
        try:
            return await step()
        except KvxferError as error:
            return error.code

    for _ in range(60):
        ticket = await fleet.ticket()
        tasks = [
            asyncio.create_task(side(partial(fleet.send, ticket, rng))),
            asyncio.create_task(side(partial(fleet.receive, ticket))),
        ]
        await turns(rng, 500)
        match rng.randrange(4):
            case 0:
                if rng.choice(tasks).cancel():  # unless it has ended already
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    await turns(rng, 1000)
                    # A side that lost the other before they met learns nothing; a router cancels
                    # it.
                    for task in tasks:
                        task.cancel()
            case 1:
                await fleet.release(ticket)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        if all(isinstance(result, list) for result in results):
            assert results[0] == results[1]
        outcomes |= {r if isinstance(r, str) else type(r).__name__ for r in results}
        await eventually(fleet.all_free)
        fleet.prefill.pool.check()
        fleet.decode.pool.check()
    assert {"list", "CancelledError"} <= outcomes, outcomes
    await eventually(lambda: not fleet.server.registry._arrivals._waiting)
    for each in (fleet.prefill, fleet.decode):
        assert not each.endpoint._brokered._tasks
        assert not len(each.endpoint._expected_offers)
