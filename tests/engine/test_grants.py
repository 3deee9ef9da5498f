"""Ranges granted to one writer, with one counter, until the counter is released."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.errors import EngineError, InvalidArgument, OutOfBounds
from tests.engine.conftest import Pair
from verify.polling import PATIENCE

pytestmark = pytest.mark.native


async def test_a_writer_reaches_granted_ranges_and_nothing_else(pair: Pair) -> None:
    source = pair.writer.alloc(4096)
    np.frombuffer(source, np.uint8)[:] = 7
    owner = pair.reader.alloc(64 * 1024)
    memory = np.frombuffer(owner, np.uint8)
    counter = pair.reader.counter(pair.to_writer)
    first, second = counter.grant([(owner.region, 8192, 4096), (owner.region, 32768, 4096)])
    total = 0
    for grant in (first, second):
        operation = pair.to_reader.write(source.region, grant, length=4096, imm=counter.imm)
        await operation
        total += operation.immediates
    await counter.wait(total, PATIENCE)
    assert memory[8192:12288].all()
    assert memory[32768:36864].all()
    assert int(memory.sum()) == 7 * 8192
    with pytest.raises(OutOfBounds):
        pair.to_reader.write(source.region, first, length=4096, dst_offset=1, imm=counter.imm)
    for wrong in (None, counter.imm + 1):
        with pytest.raises(
            InvalidArgument, match=rf"a grant of peer 'reader'.* imm={counter.imm};"
        ):
            pair.to_reader.write(source.region, first, length=4096, imm=wrong)

    counter.release()
    # With some NICs the writer ends the grant, and need not confirm once all has arrived.
    pair.to_writer.send(b"released")
    await pair.to_reader.receive(PATIENCE)
    memory[:] = 0
    with pytest.raises(EngineError):
        await pair.to_reader.write(source.region, second, length=4096, imm=counter.imm)
    assert not memory.any()


async def test_what_cannot_be_granted_is_refused_by_name(pair: Pair) -> None:
    memory = pair.reader.alloc(4096)
    with pytest.raises(InvalidArgument, match="has no writer"):
        pair.reader.counter().grant([(memory.region, 0, 4096)])
    counter = pair.reader.counter(pair.to_writer)
    with pytest.raises(OutOfBounds, match="4096 bytes at offset 1 of a region of 4096"):
        counter.grant([(memory.region, 1, 4096)])
    assert counter.grant([]) == []
