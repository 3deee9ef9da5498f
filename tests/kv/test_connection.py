from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest

from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.errors import PeerLost, ProtocolError
from kvxfer.kv.admission import CurrentIdentity
from kvxfer.kv.cache import KvCache
from kvxfer.kv.connection import Connection, check_hello, grant_ranges, hello_from
from kvxfer.kv.messages import Hello, encode
from kvxfer.kv.options import KvIdentity
from kvxfer.kv.plan import plan_transfer
from kvxfer.layout import KvLayout

from .steered import Engine

KEY = b"0123456789abcdef0123456789abcdef"
LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_size=4, dtype="uint8", block_size=2)


def allocated(name: str, num_blocks: int, layout: KvLayout = LAYOUT) -> KvCache:
    engine: Any = Engine(name)
    return KvCache.allocate(engine, layout, num_blocks)


def hello(**changes: Any) -> Hello:
    made = hello_from(
        allocated("peer", 5), CurrentIdentity(KvIdentity("peer", KEY, 3), SYSTEM_CLOCK)
    )
    return msgspec.structs.replace(made, **changes)


def connection_with(cache: KvCache) -> Connection:
    peer: Any = Engine("peer")
    peer.engine_id = "0" * 32
    identity = CurrentIdentity(KvIdentity("this", KEY, 1), SYSTEM_CLOCK)
    return Connection(
        peer, cache, lambda connection, error: None, identity=identity, clock=SYSTEM_CLOCK
    )


def test_a_hello_describes_every_plane_and_gives_no_permission() -> None:
    made = hello()
    assert (made.instance_id, made.epoch, made.num_blocks) == ("peer", 3, 5)
    assert made.block_strides == ((8, 8), (8, 8))
    assert b"peer/0" not in encode(made)
    check_hello(made)


def test_a_grant_goes_from_the_lowest_block_to_the_end_of_the_highest() -> None:
    cache, plan = allocated("peer", 5), plan_transfer(LAYOUT, LAYOUT)
    region = cache.planes[0][0].region
    assert grant_ranges(cache, plan, np.array([3, 1], dtype=np.int32)) == [
        (region, plane * 40 + 8, 24) for plane in range(4)
    ]
    assert grant_ranges(cache, plan, np.array([4], dtype=np.int32))[3] == (region, 3 * 40 + 32, 8)


def test_only_layers_that_the_writer_has_are_granted() -> None:
    cache = allocated("peer", 5)
    stage = dataclasses.replace(LAYOUT, pp_size=2, pp_rank=1)
    blocks = np.array([0], dtype=np.int32)
    granted = grant_ranges(cache, plan_transfer(stage, LAYOUT), blocks)
    assert [offset for _, offset, _ in granted] == [2 * 40, 3 * 40]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"version": 99, "newest": 101}, "speaks versions 99 to 101 of the protocol"),
        ({"version": 6, "newest": 0}, "speaks versions 6 to 6 of the protocol"),
        ({"num_blocks": 0}, "its pool has 0 blocks"),
        ({"block_strides": ()}, "its planes are not those of its layout"),
        ({"block_strides": ((8,),) * 2}, "its planes are not those of its layout"),
        ({"block_strides": ((8, 8),)}, "its planes are not those of its layout"),
        ({"block_strides": ((8, 7),) * 2}, "the blocks of a plane overlap"),
    ],
)
def test_the_error_names_what_is_wrong_with_a_hello(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ProtocolError, match=named):
        check_hello(hello(**changes))


async def test_a_later_hello_may_change_the_epoch_only() -> None:
    connection = connection_with(allocated("p", 3))
    with pytest.raises(ProtocolError, match="before its HELLO"):
        _ = connection.hello
    connection.greet(hello())
    assert (await connection.greeted()).epoch == 3
    connection.greet(hello(epoch=4))
    assert connection.hello.epoch == 4
    other = dataclasses.replace(LAYOUT, dtype="int8")
    for changes in (
        {"instance_id": "another"},
        {"layout": other},
        {"block_strides": ((8, 8), (8, 16))},
        {"permutes": False},
    ):
        with pytest.raises(ProtocolError, match="changed its id or cache"):
            connection.greet(hello(**changes))


async def test_a_wait_for_a_hello_ends_when_the_peer_is_lost() -> None:
    connection = connection_with(allocated("p", 3))
    connection.lose(PeerLost("gone"))
    with pytest.raises(PeerLost, match="gone"):
        await connection.greeted()
    assert isinstance(connection.error, PeerLost)
