"""Engines that their caller polls, without a thread and without asyncio."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from kvxfer import EngineOptions, Peer, PeerGroup, PolledEngine
from kvxfer.errors import (
    ConnectFailed,
    DeadlineExceeded,
    EngineClosed,
    EngineError,
    InvalidArgument,
    PeerError,
    StaleCounter,
)
from tests.engine.conftest import KEY, bytes_of
from tests.engine.fabrics import engine_options
from verify.polling import PATIENCE

pytestmark = pytest.mark.native

PAGE, PAGES = 4096, 64


@dataclass
class Offer:
    """The address, descriptor and immediate that a writer needs of a reader."""

    address: str
    descriptor: bytes
    imm: int


class Reader:
    """An engine that another thread polls, until it has been written to and is told to end."""

    def __init__(self, fabric: str) -> None:
        self.offers: queue.Queue[Offer] = queue.Queue()
        self.came: queue.Queue[bytes] = queue.Queue()
        self._end = threading.Event()
        self._options = engine_options(fabric)
        self.totals: queue.Queue[int] = queue.Queue()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        with PolledEngine(cluster_key=KEY, name="reader", **self._options) as engine:
            engine.handler = self
            memory = engine.alloc(PAGE * PAGES)
            counter = engine.counter()
            self.offers.put(Offer(engine.address, memory.region.descriptor, counter.imm))
            engine.poll_until(lambda: self._end.is_set() or not self.totals.empty(), PATIENCE)
            if not self.totals.empty():
                engine.poll_counter(counter, self.totals.get(), PATIENCE)
                self.came.put(bytes(bytes_of(memory)))
            engine.poll_until(self._end.is_set, PATIENCE)

    def peer_up(self, peer: Peer) -> None:
        pass

    def message(self, peer: Peer, data: bytes) -> None:
        """Replies with the message reversed; counts the immediate in a message of 4 bytes twice."""
        if len(data) == 4:
            peer.write_imm(int.from_bytes(data))
            peer.write_imm(int.from_bytes(data))
        else:
            peer.send(data[::-1])

    def peer_lost(self, peer: Peer, error: PeerError) -> None:
        pass


class Messages:
    """A handler that collects messages."""

    def __init__(self) -> None:
        self.came: list[bytes] = []

    def peer_up(self, peer: Peer) -> None:
        pass

    def message(self, peer: Peer, data: bytes) -> None:
        self.came.append(data)

    def peer_lost(self, peer: Peer, error: PeerError) -> None:
        pass


@pytest.fixture
def engine(fabric: str) -> Iterator[PolledEngine]:
    with PolledEngine(cluster_key=KEY, name="writer", **engine_options(fabric)) as engine:
        yield engine


def test_two_threads_move_pages_by_polling(fabric: str, engine: PolledEngine) -> None:
    with Reader(fabric) as reader:
        there = reader.offers.get(timeout=PATIENCE)
        peer = engine.connect(there.address, PATIENCE)
        source = engine.alloc(PAGE * PAGES)
        bytes_of(source)[:] = np.arange(PAGE * PAGES) // PAGE
        pages = np.arange(PAGES)
        write = peer.write_pages(
            source.region,
            there.descriptor,
            page_length=PAGE,
            src_pages=pages,
            dst_pages=pages[::-1].copy(),
            src_stride=PAGE,
            dst_stride=PAGE,
            imm=there.imm,
        )
        assert write.writes == PAGES
        told = PeerGroup(engine, [peer]).barrier(there.imm)
        reader.totals.put(write.immediates + sum(told.by_peer))
        engine.poll_until(write.done, PATIENCE)
        engine.poll_until(told.done, PATIENCE)
        assert (write.error, told.errors) == (None, (None,))
        sent = bytes_of(source).reshape(PAGES, PAGE)
        assert reader.came.get(timeout=PATIENCE) == sent[::-1].tobytes()

        messages = engine.handler = Messages()
        peer.send(b"abc")
        engine.poll_until(lambda: bool(messages.came), PATIENCE)
        assert messages.came == [b"cba"]


def test_waits_have_deadlines_and_say_what_is_missing(engine: PolledEngine) -> None:
    counter = engine.counter()
    with pytest.raises(DeadlineExceeded, match="stands at 0 of 3 immediates after 0"):
        engine.poll_counter(counter, 3, 0.0)
    with pytest.raises(DeadlineExceeded, match=r"0\.0 s of polling"):
        engine.poll_until(lambda: False, 0.0)
    counter.release()
    with pytest.raises(StaleCounter):
        engine.poll_counter(counter, 1, PATIENCE)


def test_more_writes_than_announced_are_an_error(fabric: str, engine: PolledEngine) -> None:
    with Reader(fabric) as reader:
        there = reader.offers.get(timeout=PATIENCE)
        peer = engine.connect(there.address, PATIENCE)
        back = engine.counter()
        peer.send(back.imm.to_bytes(4))
        engine.poll_until(lambda: back.value == 2, PATIENCE)
        with pytest.raises(EngineError, match="2 immediates, but 1 were waited for"):
            engine.poll_counter(back, 1, PATIENCE)


def test_connecting_to_an_unused_port_fails(engine: PolledEngine) -> None:
    with pytest.raises(ConnectFailed):
        engine.connect(f"kvx://127.0.0.1:1/{'0' * 32}", PATIENCE)


def test_a_closed_engine_refuses(engine: PolledEngine) -> None:
    address = engine.address
    engine.close()
    engine.close()
    assert not engine.poll()
    with pytest.raises(EngineClosed):
        engine.connect(address)
    with pytest.raises(EngineClosed):
        engine.counter()


def test_a_polled_engine_has_no_thread_to_pin() -> None:
    options: EngineOptions = {"fabrics": ["tcp"], "cpus": [0]}
    with pytest.raises(InvalidArgument, match="leave cpus out"):
        PolledEngine(cluster_key=KEY, **options)
