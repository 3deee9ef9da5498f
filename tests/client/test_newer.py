"""A newer control plane sends words that this client does not know."""

from __future__ import annotations

import httpx2
import msgspec
import pytest

from kvxfer.client import ControlPlaneClient, Registration, calls
from kvxfer.client.watch import WatchReader
from kvxfer.instances import Instance, InstanceState, Lease, Reserved, Role, Snapshot
from kvxfer.record import lenient
from kvxfer.weight_updates import Decision
from verify.processes.control_plane import worker

LEASE = msgspec.json.encode(
    Lease(
        instance_id="p",
        epoch=1,
        state=InstanceState.READY,
        lease_seconds=6.0,
        heartbeat_interval=2.0,
        role=Role.PREFILL,
        reserved=Reserved(),
    )
)
NEWER = LEASE.replace(b'"ready"', b'"suspended"').replace(b'"prefill"', b'"encode"')


def test_unknown_word_is_read_as_unknown():
    lease = lenient(NEWER, Lease)
    assert (str(lease.state), str(lease.role)) == ("unknown", "unknown")
    assert not (lease.state.known or lease.role.known)
    assert not lease.role.serves(Role.DECODE)
    assert InstanceState.READY.advanced_to(lease.state) is InstanceState.READY
    assert b'"state":"unknown"' in msgspec.json.encode(lease)


def test_unknown_words_are_refused_outside_of_answers():
    assert lenient(LEASE, Lease).state.known
    with pytest.raises(msgspec.ValidationError, match="'suspended'"):
        msgspec.json.decode(NEWER, type=Lease)
    with pytest.raises(ValueError, match="'encode'"):
        Role("encode")


async def test_unknown_words_do_not_take_a_worker_out_of_the_fleet():
    beats = 0

    def answer(request: httpx2.Request) -> httpx2.Response:
        nonlocal beats
        beats += request.method == "PUT"
        return httpx2.Response(201 if request.method == "POST" else 200, content=NEWER)

    transport = httpx2.MockTransport(answer)
    async with ControlPlaneClient("http://cp:1", deadline=0, transport=transport) as client:
        roles: list[Role] = []
        async with Registration(client, worker("p"), on_role=roles.append) as me:
            await me.heartbeat()
            assert (me.registered, me.state, me.role) == (True, InstanceState.READY, Role.PREFILL)
    assert beats >= 1
    assert not roles


def test_unknown_words_do_not_end_a_watch():
    instance = Instance.of(
        worker("p"), epoch=1, state=InstanceState.READY, registered_at=0.0, heartbeat_at=0.0
    )
    data = msgspec.json.encode(Snapshot(id=1, instances=(instance,))).replace(b"ready", b"asleep")
    (item,) = WatchReader("http://cp:1", None).feed(b"event: snapshot\ndata: " + data + b"\n\n")
    assert isinstance(item, Snapshot)
    assert not item.instances[0].state.known


def test_unknown_decision_is_refused():
    call = calls.decide_weight_update("u", Decision.ABORT)
    with pytest.raises(msgspec.ValidationError):
        call.read(b'{"update_id": "u", "version": 1, "decision": "later"}')
