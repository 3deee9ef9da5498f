"""Scatter and barrier."""

from __future__ import annotations

import random
from array import array
from typing import Any

import numpy as np
import pytest

from kvxfer import Memory, PeerGroup, Scattered
from kvxfer.errors import (
    InvalidArgument,
    OutOfBounds,
    PeerLost,
    StaleCounter,
    UnknownRegion,
)
from tests.engine.conftest import Pair, Star, bytes_of
from verify.polling import PATIENCE

pytestmark = pytest.mark.native

SIZE = 3 << 20


class Targets:
    """A region and a counter at each reader. All counters have the same immediate, as each is the
    first of a new engine."""

    def __init__(self, star: Star) -> None:
        self.memory: list[Memory] = [reader.alloc(SIZE) for reader in star.readers]
        self.counters = [reader.counter() for reader in star.readers]
        (self.imm,) = {counter.imm for counter in self.counters}
        self.descriptors = [memory.region.descriptor for memory in self.memory]

    def contents(self, at: int) -> Any:
        return bytes_of(self.memory[at])


async def test_each_peer_gets_its_part_and_its_announced_count(
    star: Star, rng: random.Random
) -> None:
    targets = Targets(star)
    source = star.hub.alloc(SIZE)
    sent = bytes_of(source)
    sent[:] = np.frombuffer(rng.randbytes(SIZE), dtype=np.uint8)
    lengths = [rng.randrange(1, 1 << 20), 0, SIZE - 4096]  # the last one takes several writes
    src_offsets = [rng.randrange(SIZE - length) for length in lengths]
    dst_offsets = [rng.randrange(SIZE - length) for length in lengths]
    group = PeerGroup(star.hub, star.to_readers).scatter(
        source.region,
        targets.descriptors,
        src_offsets=src_offsets,
        dst_offsets=dst_offsets,
        lengths=lengths,
        imm=targets.imm,
    )
    assert group.nbytes == sum(lengths)
    assert group.by_peer[1] == 1  # only the immediate
    assert group.by_peer[2] >= 3
    await group
    assert group.done()
    assert group.errors == (None, None, None)
    for at, counter in enumerate(targets.counters):
        await counter.wait(group.by_peer[at], timeout=PATIENCE)
        expected = np.zeros(SIZE, dtype=np.uint8)
        from_, to, length = src_offsets[at], dst_offsets[at], lengths[at]
        expected[to : to + length] = sent[from_ : from_ + length]
        assert np.array_equal(targets.contents(at), expected)


@pytest.mark.parametrize(
    "integers",
    [
        list,
        tuple,
        lambda values: np.array(values, dtype=np.int32),
        lambda values: np.array(values, dtype=np.int64),
        lambda values: array("q", values),
        lambda values: memoryview(array("i", values)),
    ],
    ids=["list", "tuple", "int32", "int64", "array", "memoryview"],
)
async def test_integers_come_as_sequences_or_buffers(pair: Pair, integers: Any) -> None:
    source, target = pair.writer.alloc(4096), pair.reader.alloc(4096)
    bytes_of(source)[100] = 9
    await PeerGroup(pair.writer, [pair.to_reader]).scatter(
        source.region,
        [target.region.descriptor],
        src_offsets=integers([100]),
        dst_offsets=integers([200]),
        lengths=integers([1]),
    )
    assert bytes_of(target)[200] == 9


async def test_a_barrier_counts_one_at_every_peer(star: Star) -> None:
    targets = Targets(star)
    group = PeerGroup(star.hub, star.to_readers).barrier(targets.imm)
    assert isinstance(group, Scattered)
    assert (group.by_peer, group.immediates, group.nbytes) == ((1, 1, 1), 3, 0)
    await group
    for counter in targets.counters:
        await counter.wait(1, timeout=PATIENCE)


async def test_all_is_submitted_or_nothing(star: Star) -> None:
    targets = Targets(star)
    source = star.hub.alloc(SIZE)
    group = PeerGroup(star.hub, star.to_readers)

    def scatter(
        descriptors: list[bytes] = targets.descriptors,
        src_offsets: Any = (0, 0, 0),
        lengths: Any = (8, 8, 8),
    ) -> Scattered:
        return group.scatter(
            source.region,
            descriptors,
            src_offsets=src_offsets,
            dst_offsets=[0, 0, 0],
            lengths=lengths,
            imm=targets.imm,
        )

    with pytest.raises(OutOfBounds, match="leaves the region"):
        scatter(src_offsets=[0, 0, SIZE])
    with pytest.raises(OutOfBounds, match=r"the scatter has a negative .* position 2"):
        scatter(src_offsets=[0, 0, -1])
    with pytest.raises(InvalidArgument, match="3 peers"):
        scatter(lengths=[8, 8])
    with pytest.raises(InvalidArgument, match=r"dst\[2\] is b'garbage'; pass the bytes of"):
        scatter([*targets.descriptors[:2], b"garbage"])
    with pytest.raises(UnknownRegion, match="belongs to engine"):
        scatter([*targets.descriptors[:2], targets.descriptors[0]])
    with pytest.raises(InvalidArgument, match=r"lengths is .*0\.5"):
        scatter(lengths=[8, 8, 0.5])
    with pytest.raises(InvalidArgument, match="lengths is array"):
        scatter(lengths=np.array([8.0, 8.0, 8.0]))
    await scatter()
    for counter in targets.counters:
        await counter.wait(1, timeout=PATIENCE)  # nothing of the refused scatters has arrived


async def test_a_lost_peer_refuses_the_whole_group(star: Star) -> None:
    targets = Targets(star)
    await star.readers[2].close()
    with pytest.raises(PeerLost):
        await star.to_readers[2].receive(PATIENCE)
    with pytest.raises(PeerLost, match="'reader 2'"):
        PeerGroup(star.hub, star.to_readers).barrier(targets.imm)
    await PeerGroup(star.hub, star.to_readers[:2]).barrier(targets.imm)
    for counter in targets.counters[:2]:
        await counter.wait(1, timeout=PATIENCE)


async def test_the_first_error_is_raised_when_all_have_ended_and_all_are_kept(star: Star) -> None:
    targets = Targets(star)
    targets.counters[1].release()
    targets.counters[2].release()
    group = PeerGroup(star.hub, star.to_readers).barrier(targets.imm)
    with pytest.raises(StaleCounter, match="'reader 1'"):
        await group
    assert group.done()
    errors = group.errors
    assert errors[0] is None
    assert [type(error) for error in errors[1:]] == [StaleCounter, StaleCounter]
    assert "'reader 2'" in str(errors[2])
    await targets.counters[0].wait(1, timeout=PATIENCE)


async def test_a_group_waits_for_a_watcher_and_can_be_cancelled(star: Star) -> None:
    targets = Targets(star)
    watcher = star.hub.watcher()
    peers = PeerGroup(star.hub, star.to_readers)
    held, cancelled = (peers.barrier(targets.imm, after=watcher.at(1)) for _ in range(2))
    cancelled.cancel()
    with pytest.raises(Exception, match="cancelled by the caller"):
        await cancelled
    assert [getattr(error, "code", None) for error in cancelled.errors] == ["cancelled"] * 3
    assert not held.done()
    watcher.add()
    await held
    for counter in targets.counters:
        await counter.wait(1, timeout=PATIENCE)


async def test_peers_of_another_engine_are_refused_and_a_group_may_be_empty(star: Star) -> None:
    with pytest.raises(InvalidArgument, match="another engine"):
        PeerGroup(star.hub, [star.to_readers[0], star.to_hub[0]])
    group = PeerGroup(star.hub, []).barrier(1)
    await group
    assert (group.done(), group.by_peer, group.nbytes) == (True, (), 0)
