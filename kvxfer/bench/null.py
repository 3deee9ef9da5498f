"""The engine's cost per page, over `null`: a NIC that moves nothing, but takes work requests of 64
bytes and a doorbell for each chain of them, and gives completions by another thread. No application
can choose that fabric, so the native engine is used as it is."""

from __future__ import annotations

import mmap
import secrets
import select
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

import numpy as np

from kvxfer.bench.figures import (
    OverheadFigure,
    ScatterFigure,
    overhead_figure,
    scatter_figure,
)
from kvxfer.bench.pages import PageDraw, PageLists
from kvxfer.bench.targets import OVERHEAD, SCATTER, SCATTER_PEERS
from kvxfer.engine.native import error_of, native, translated
from kvxfer.errors import BenchError

PAGE_BYTES = 4 << 10
PAGES = 100_000
_WARM_UP_ROUNDS = 3
_TIMEOUT_SECONDS = 10


@dataclass(frozen=True, slots=True)
class NullCase:
    """Pages in runs of `run_pages`: within a run each follows the last on both sides, across runs
    none does."""

    name: str
    run_pages: int

    def draw(self, seed: int, pages: int) -> PageLists:
        """Draws `pages` pages as whole runs; no run is longer than that."""
        length = min(self.run_pages, pages)
        nbytes = pages * PAGE_BYTES
        (runs,) = PageDraw(seed, length * PAGE_BYTES, nbytes, 2 * nbytes).draw()
        src, dst = (
            (first[:, np.newaxis] * length + np.arange(length)).ravel()
            for first in (runs.src, runs.dst)
        )
        return PageLists(PAGE_BYTES, src, dst)


CASES = (
    NullCase("scattered", 1),
    NullCase("runs of 16", 16),
    NullCase("sequential", PAGES),
)


class NullWriter:
    """An engine that is connected to another in this process, and a region of the other. The other
    has no thread, so that its cost is measured separately. One thread."""

    def __init__(
        self,
        engine: native.TransferEngine,
        receiver: native.TransferEngine,
        source: native.MemoryRegion,
        destination: bytes,
    ) -> None:
        self._engine, self._source, self._destination = engine, source, destination
        self._receiver = receiver
        self._total = 0
        self._events = select.poll()
        self._events.register(engine.event_fd, select.POLLIN)
        with translated():
            self._imm = receiver.allocate_counter(None)
            connecting = engine.connect(receiver.address, _TIMEOUT_SECONDS)
        self._peer, _ = self._completion("connect", connecting, receiver.poll)
        # The first write asks the receiver for its destination.
        self.write(
            PageLists(PAGE_BYTES, np.zeros(1, np.int64), np.zeros(1, np.int64)), receiver.poll
        )

    def write(
        self, pages: PageLists, meanwhile: Callable[[], object] | None = None
    ) -> tuple[int, int, int, int]:
        """Writes all pages with one call, and calls `meanwhile` until they are posted. Returns how
        many writes they became, and nanoseconds: until the call returned, until the engine's thread
        had posted and reported all of them, and for the receiver to count their immediates after
        that."""
        with translated():
            start = time.monotonic_ns()
            operation, writes, immediates, _ = self._engine.write_pages(
                self._peer,
                self._source,
                self._destination,
                page_length=pages.page_bytes,
                source_pages=pages.src.data,
                destination_pages=pages.dst.data,
                source_stride=pages.page_bytes,
                destination_stride=pages.page_bytes,
                source_offset=0,
                destination_offset=0,
                imm=self._imm,
                timeout=None,
                nic=None,
                after=None,
            )
            returned = time.monotonic_ns()
        _, completed = self._completion("write", operation, meanwhile)
        self._total += immediates
        arrived = time.monotonic_ns()
        if self._receiver.poll_counter(self._imm, self._total, _TIMEOUT_SECONDS) != self._total:
            raise BenchError(f"not every immediate came within {_TIMEOUT_SECONDS} s")
        return writes, returned - start, completed - start, time.monotonic_ns() - arrived

    def _completion(
        self, kind: str, ident: int, meanwhile: Callable[[], object] | None = None
    ) -> tuple[int, int]:
        """Returns the peer and the time of this completion; no one waits for others."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            if meanwhile:
                meanwhile()
            self._events.poll(0 if meanwhile else _TIMEOUT_SECONDS * 1000)
            for what, which, peer, code, text, _, _, at_ns, _ in self._engine.drain():
                if (what, which) != (kind, ident):
                    continue
                if code != "ok":
                    raise error_of(code, text)
                return peer, at_ns
        raise BenchError(f"no {kind} completed within {_TIMEOUT_SECONDS} s")


@contextmanager
def null_writer(nbytes: int, *, keeps_order: bool = True) -> Iterator[NullWriter]:
    """Opens two engines, and `nbytes` of address space for both that is never touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    space = np.frombuffer(mmap.mmap(-1, nbytes, flags, mmap.PROT_READ), np.uint8)
    key = secrets.token_bytes(32)
    nics = native.null_nics(keeps_order=keeps_order)
    with (
        closing(_engine(key, nics)) as sender,
        closing(_engine(key, nics, thread=False)) as receiver,
        translated(),
    ):
        source = sender.register_memory(space.ctypes.data, nbytes)
        destination = receiver.register_memory(space.ctypes.data, nbytes)
        yield NullWriter(sender, receiver, source, destination.descriptor)


def measure_null(
    seed: int, rounds: int, advance: Callable[[], None], pages: int = PAGES
) -> list[OverheadFigure]:
    """Writes each case's pages once a round, so that all see the same moments of the machine."""
    lists = [case.draw(seed, pages) for case in CASES]
    with null_writer(2 * pages * PAGE_BYTES) as writer:
        for _ in range(_WARM_UP_ROUNDS):
            writes = [writer.write(each)[0] for each in lists]
        call_ns: list[list[int]] = [[] for _ in CASES]
        completed_ns: list[list[int]] = [[] for _ in CASES]
        received_ns: list[list[int]] = [[] for _ in CASES]
        for _ in range(rounds):
            for i, each in enumerate(lists):
                _, called, completed, received = writer.write(each)
                call_ns[i].append(called)
                completed_ns[i].append(completed)
                received_ns[i].append(received)
            advance()
    return [
        overhead_figure(
            case.name,
            pages,
            writes[i],
            call_ns[i],
            completed_ns[i],
            received_ns[i],
            OVERHEAD[case.name],
        )
        for i, case in enumerate(CASES)
    ]


def measure_scatter(
    rounds: int, advance: Callable[[], None], peers: int = SCATTER_PEERS
) -> ScatterFigure:
    """Measures writes of 4 KiB to each of `peers` engines without threads, from one without a
    thread, so that the call itself posts. Each round begins when the writes of the last have
    ended."""
    nics = native.null_nics(keeps_order=True)
    key = secrets.token_bytes(32)
    with ExitStack() as stack, translated():
        sender, *receivers = (
            stack.enter_context(closing(_engine(key, nics, thread=False))) for _ in range(peers + 1)
        )
        source = sender.allocate(peers * PAGE_BYTES, None)
        regions = [receiver.allocate(PAGE_BYTES, None) for receiver in receivers]
        imms = {receiver.allocate_counter(None) for receiver in receivers}
        if len(imms) != 1:
            raise BenchError("the first counters of new engines differ")
        (imm,) = imms

        def completed(kind: str, ident: int, *others: native.TransferEngine) -> int:
            deadline = time.monotonic() + _TIMEOUT_SECONDS
            while time.monotonic() < deadline:
                for engine in (sender, *others):
                    engine.poll()
                for what, which, who, code, text, *_ in sender.drain():
                    if (what, which) == (kind, ident):
                        if code != "ok":
                            raise error_of(code, text)
                        return who
            raise BenchError(f"no {kind} completed within {_TIMEOUT_SECONDS} s")

        peer_ids = [
            completed("connect", sender.connect(receiver.address, _TIMEOUT_SECONDS), receiver)
            for receiver in receivers
        ]
        destinations = [region.descriptor for region in regions]
        posted_ns = []
        for turn in range(_WARM_UP_ROUNDS + rounds):
            operation, took_ns = sender.time_scatter(
                source, peer_ids, destinations, PAGE_BYTES, imm
            )
            # The first write asks each receiver for its destination; receivers count all writes.
            completed("write", operation, *receivers)
            if turn >= _WARM_UP_ROUNDS:
                posted_ns.append(took_ns)
                advance()
    return scatter_figure(peers, posted_ns, SCATTER)


def measure_page_costs(
    seed: int,
    rounds: int,
    advance: Callable[[], None],
    page_bytes: list[int],
    pages: int,
    *,
    keeps_order: bool,
) -> list[tuple[float, float]]:
    """Returns the nanoseconds per page until complete, and of the receiver, for scattered pages of
    each size: medians. A NIC that does not keep order has an immediate for each page."""
    lists = []
    for size in page_bytes:
        lists += PageDraw(seed, size, pages * size, 2 * pages * size).draw()
    with null_writer(2 * pages * max(page_bytes), keeps_order=keeps_order) as writer:
        for each in lists:
            writer.write(each)
        taken: list[list[tuple[int, int]]] = [[] for _ in lists]
        for _ in range(rounds):
            for i, each in enumerate(lists):
                _, _, completed, received = writer.write(each)
                taken[i].append((completed, received))
            advance()
    medians = np.median(np.array(taken), axis=1) / pages
    return [(float(completed), float(received)) for completed, received in medians]


def _engine(
    cluster_key: bytes, nics: native.NicFactory, *, thread: bool = True
) -> native.TransferEngine:
    """Makes an engine with the default options except for the fabric."""
    with translated():
        return native.TransferEngine(
            native.EngineOptions(
                cluster_key=cluster_key,
                name="bench null",
                local=False,
                tcp=False,
                more_nics=nics,
                thread=thread,
                peer_timeout=_TIMEOUT_SECONDS,  # an instrumented engine is a slow one
            )
        )
