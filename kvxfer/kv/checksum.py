"""The checksum of a transfer over every byte of every run, wherever it is on each side.

It is the sum of XXH3 (64 bits, https://xxhash.com) over the runs of a plan. Each is seeded with its
number, which both sides derive from the plan and the block tables. The checksum finds bytes that
were altered, lost, or put in another place; it does not protect against forgery.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from kvxfer.errors import ChecksumMismatch, ProtocolError
from kvxfer.kv.blocks import by_group
from kvxfer.kv.plan import blocks_match

if TYPE_CHECKING:
    from kvxfer.engine.memory import Region
    from kvxfer.kv.block_pool import BlockIds
    from kvxfer.kv.cache import KvCache
    from kvxfer.kv.connection import Connection
    from kvxfer.kv.messages import Checksum
    from kvxfer.kv.plane_writes import Offsets, Runs

_MODULUS: Final = 1 << 64


class RunningChecksum:
    """The checksum of the runs so far, in any order. Not locked."""

    def __init__(self) -> None:
        self.value = 0
        self.nbytes = 0

    def add(
        self,
        region: Region,
        offset: int,
        runs: Runs,
        places: Offsets,
        numbers: Offsets,
        first_number: int,
    ) -> None:
        """Adds runs at `places` of a plane that begins at `offset` of its region."""
        part = region.checksum(places + offset, numbers + first_number, runs.length)
        self.value = (self.value + part) % _MODULUS
        self.nbytes += len(places) * runs.length


def verify(
    checksum: Checksum | None,
    connection: Connection,
    cache: KvCache,
    ids: BlockIds,
    first_block: int,
) -> int:
    """Compares the bytes that a prefill rank has written into blocks with its checksum, and returns
    their number. Any thread.

    Raises ChecksumMismatch, and ProtocolError if there is no checksum or it is for another number
    of blocks.
    """
    plan, name = connection.inbound_plan, connection.hello.instance_id
    if checksum is None:
        raise ProtocolError(f"{name!r} sent no checksum; run the same version of kvxfer on both")
    target = by_group(ids, cache.layout)
    num_blocks = first_block + target.shape[1]
    if not blocks_match(plan.prefill, checksum.blocks, plan.decode, num_blocks):
        raise ProtocolError(
            f"{name!r} sent the checksum of {checksum.blocks} blocks for {num_blocks} here"
        )
    source = np.arange(checksum.blocks, dtype=np.int32)
    running = RunningChecksum()
    for arrival in connection.arrivals:
        plane = arrival.plane
        row = plane.places(target[arrival.group])
        _, places, numbers = arrival.runs.offsets(source, row, first_block)
        running.add(plane.region, plane.offset, arrival.runs, places, numbers, arrival.first_number)
    if running.value != checksum.value:
        raise ChecksumMismatch(
            f"what {name!r} wrote has the checksum {running.value:016x} here and "
            f"{checksum.value:016x} there; the blocks are not used. Memory, a NIC or a driver on "
            "the way damages data"
        )
    return running.nbytes
