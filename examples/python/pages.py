"""Pages from one process into chosen pages of another, one-sidedly: a counter says when they have
arrived. Every byte is compared. At the end the sender is killed in the middle of a transfer.

    python examples/python/pages.py
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection

import msgspec
import numpy as np

from kvxfer import Engine
from kvxfer.errors import PeerError

KEY = "a secret of at least 16 bytes, which both processes have"
PAGE = 4096
PAGES = 256


class Target(msgspec.Struct):
    """The destination of a transfer. The descriptor is the permission to write there."""

    descriptor: bytes
    imm: int
    pages: list[int]


def content(page: int) -> np.ndarray:
    """Returns the sender's content of a page."""
    return np.random.default_rng(page).integers(0, 256, PAGE, dtype=np.uint8)


async def send(address: str) -> None:
    async with Engine(cluster_key=KEY, name="sender") as engine:
        source = engine.alloc(PAGES * PAGE)  # zeroed, and registered
        pages = np.frombuffer(source, np.uint8).reshape(PAGES, PAGE)
        for page in range(PAGES):
            pages[page] = content(page)
        peer = await engine.connect(address)
        never = engine.watcher()
        while True:
            target = msgspec.msgpack.decode(await peer.receive(), type=Target)
            write = peer.write_pages(
                source,
                target.descriptor,
                page_length=PAGE,
                src_pages=range(len(target.pages)),
                dst_pages=target.pages,
                imm=target.imm,
                # The last transfer does not end: its sender is killed.
                after=never.at(1) if len(target.pages) == PAGES else None,
            )
            # The total of the receiver's counter. One immediate may count for several pages.
            peer.send(write.immediates.to_bytes(8, "little"))
            await write  # delivered; only now may the source change


async def receive(told: Connection, sender: multiprocessing.process.BaseProcess) -> None:
    async with Engine(cluster_key=KEY, name="receiver") as engine:
        told.send(engine.address)
        peer = await engine.accept(timeout=30)
        memory = engine.alloc(PAGES * PAGE)
        pages = np.frombuffer(memory, np.uint8).reshape(PAGES, PAGE)
        # Three pages into chosen places, then more, in another order.
        for wanted in ([200, 3, 77], list(range(100, 0, -1))):
            pages[:] = 0
            counter = engine.counter(peer)
            target = Target(memory.descriptor, counter.imm, wanted)
            peer.send(msgspec.msgpack.encode(target))
            total = int.from_bytes(await peer.receive(timeout=30), "little")
            await counter.wait(total, timeout=30)  # only now are the bytes in memory
            counter.release()  # nothing lands with its immediate any more
            right = all((pages[to] == content(page)).all() for page, to in enumerate(wanted))
            others = np.delete(pages, wanted, axis=0).any()
            print(f"{len(wanted)} pages are {'as sent' if right else 'wrong'},", end=" ")
            print(f"the others are {'changed' if others else 'untouched'}")

        counter = engine.counter(peer)
        target = Target(memory.descriptor, counter.imm, list(range(PAGES)))
        peer.send(msgspec.msgpack.encode(target))
        await peer.receive(timeout=30)
        os.kill(sender.pid or 0, signal.SIGKILL)
        try:
            # A counter reports only arrivals; the peer reports its loss.
            await peer.receive(timeout=30)
        except PeerError as error:
            print(f"the sender is killed: {error.code}, {counter.value} immediates came")


def sender_process(told: Connection) -> None:
    asyncio.run(send(told.recv()))


def main() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    sender = context.Process(target=sender_process, args=(theirs,))
    sender.start()
    asyncio.run(receive(ours, sender))
    sender.join()


if __name__ == "__main__":
    main()
