"""Writes that wait for compute."""

from __future__ import annotations

import asyncio
import ctypes

import numpy as np
import pytest

from kvxfer import Engine
from kvxfer.errors import Cancelled, DeadlineExceeded, InvalidArgument
from tests.engine.conftest import Pair, bytes_of
from verify.polling import PATIENCE

pytestmark = pytest.mark.native

LAYER = 4096


async def test_each_layer_leaves_when_the_watcher_reaches_it(pair: Pair) -> None:
    source, target = pair.writer.alloc(4 * LAYER), pair.reader.alloc(4 * LAYER)
    sent = bytes_of(source).reshape(4, LAYER)
    placed = bytes_of(target).reshape(4, LAYER)
    watcher = pair.writer.watcher()
    counter = pair.reader.counter()
    writes = [
        pair.to_reader.write(
            source.region,
            target.region.descriptor,
            length=LAYER,
            src_offset=layer * LAYER,
            dst_offset=layer * LAYER,
            imm=counter.imm,
            after=watcher.at(layer + 1),
        )
        for layer in range(4)
    ]
    for layer, write in enumerate(writes):
        # A later write that does not wait shows that the engine has not sent the held ones.
        passing = pair.reader.counter()
        await pair.to_reader.write_imm(passing.imm)
        await passing.wait(1, timeout=PATIENCE)
        assert [each.done() for each in writes] == [n < layer for n in range(4)]
        assert not placed[layer:].any()
        sent[layer] = layer + 1
        assert watcher.add() == watcher.value == layer + 1
        await write
        await counter.wait(layer + 1, timeout=PATIENCE)
        assert (placed[layer] == layer + 1).all()


async def test_a_plain_store_starts_waiting_writes(pair: Pair) -> None:
    watcher = pair.writer.watcher()
    counter = pair.reader.counter()
    write = pair.to_reader.write_imm(counter.imm, after=watcher.at(7))
    assert watcher.address % 8 == 0
    ctypes.c_uint64.from_address(watcher.address).value = 7
    await write
    await counter.wait(1, timeout=PATIENCE)
    assert watcher.value == 7


async def test_a_value_that_was_reached_holds_nothing_back(pair: Pair) -> None:
    watcher = pair.writer.watcher()
    watcher.add(10)
    counter = pair.reader.counter()
    await pair.to_reader.write_imm(counter.imm, after=watcher.at(0))
    await pair.to_reader.write_imm(counter.imm, after=watcher.at(10))
    await counter.wait(2, timeout=PATIENCE)


async def test_pages_wait_too_and_watchers_are_independent(pair: Pair) -> None:
    source, target = pair.writer.alloc(4 * LAYER), pair.reader.alloc(4 * LAYER)
    bytes_of(source)[:] = 1
    counter = pair.reader.counter()
    watchers = [pair.writer.watcher(), pair.writer.watcher()]
    writes = [
        pair.to_reader.write_pages(
            source.region,
            target.region.descriptor,
            page_length=LAYER,
            src_pages=np.array(pages),
            dst_pages=np.array(pages),
            src_stride=LAYER,
            dst_stride=LAYER,
            imm=counter.imm,
            after=watcher.at(1),
        )
        for watcher, pages in zip(watchers, ([0, 2], [1, 3]), strict=True)
    ]
    watchers[1].add()
    await writes[1]
    await counter.wait(writes[1].immediates, timeout=PATIENCE)
    assert not writes[0].done()
    placed = bytes_of(target).reshape(4, LAYER)
    assert placed.any(axis=1).tolist() == [False, True, False, True]
    watchers[0].add()
    await writes[0]
    assert placed.all()


async def test_a_held_write_has_its_deadline_and_can_be_cancelled(pair: Pair) -> None:
    watcher = pair.writer.watcher()
    counter = pair.reader.counter()
    late = pair.to_reader.write_imm(counter.imm, timeout=0.01, after=watcher.at(1))
    cancelled = pair.to_reader.write_imm(counter.imm, after=watcher.at(1))
    with pytest.raises(DeadlineExceeded, match="0 of 1 writes"):
        await late
    cancelled.cancel()
    with pytest.raises(Cancelled):
        await cancelled
    watcher.add()
    await pair.to_reader.write_imm(counter.imm)
    await counter.wait(1, timeout=PATIENCE)  # neither was posted


async def test_the_word_outlives_its_watcher_while_a_write_waits(pair: Pair) -> None:
    watcher = pair.writer.watcher()
    counter = pair.reader.counter()
    write = pair.to_reader.write_imm(counter.imm, after=watcher.at(1))
    word = watcher.at(1).word
    del watcher
    await asyncio.sleep(0)
    word.add(1)  # without waking the engine
    await write


async def test_impossible_values_are_refused() -> None:
    async with Engine(cluster_key="a cluster key for the tests") as engine:
        watcher = engine.watcher()
        for value in (-1, 1 << 64):
            with pytest.raises(InvalidArgument, match="value is"):
                watcher.at(value)
