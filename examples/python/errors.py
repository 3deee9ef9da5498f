"""Wrong uses of an engine, and the error of each: one line, with a code that is the same in Python,
REST, metrics and logs (docs/errors.md has the remedy of each).

    python examples/python/errors.py
"""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import Callable
from typing import Any

import numpy as np

from kvxfer import Engine, KvxferError

KEY = "a secret of at least 16 bytes, which both engines have"


async def show(what: str, wrong: Callable[[], Any]) -> None:
    """Prints the error of a call, or of what it returns once that is awaited."""
    try:
        answer = wrong()
        if inspect.isawaitable(answer):
            await answer
    except KvxferError as error:
        print(f"{what}\n    {error.code}: {error}")
    else:
        print(f"{what}\n    no error")


async def main() -> None:
    options: dict[str, Any] = {"fabric": ["tcp"]}
    await show("an unknown option", lambda: Engine(cluster_key=KEY, **options))
    await show("a short cluster key", lambda: Engine(cluster_key="short"))

    async with (
        Engine(cluster_key=KEY, name="a") as a,
        Engine(cluster_key=KEY, name="b") as b,
        Engine(cluster_key="another secret of 16 bytes or more") as stranger,
    ):
        with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections, says nothing
            port = server.getsockname()[1]
            other = f"kvx://127.0.0.1:{port}/" + "0" * 32
            await show("a port of another server", lambda: a.connect(other, timeout=0.2))
        await show("nothing listens there", lambda: a.connect(other))
        await show("another cluster key", lambda: a.connect(stranger.address))

        peer = await a.connect(b.address)
        back = await b.accept(timeout=30)
        source, target = a.alloc(8192), b.alloc(8192)
        to = target.descriptor

        array: Any = np.zeros(8192, np.uint8)
        await show("memory that is not registered", lambda: peer.write(array, to, length=64))
        await show("beyond the region", lambda: peer.write(source, to, length=9000))
        await show("a negative offset", lambda: peer.write(source, to, length=8, dst_offset=-1))
        length: Any = 4096.0
        await show("a length that is not an int", lambda: peer.write(source, to, length=length))
        await show(
            "a page that does not exist",
            lambda: peer.write_pages(
                source, to, page_length=4096, src_pages=[0, 2], dst_pages=[0, 1]
            ),
        )
        text: Any = "hi"
        await show("text for bytes", lambda: peer.send(text))

        counter = b.counter(back)
        (grant,) = counter.grant([(target, 0, 4096)])
        await show("a grant without imm=", lambda: peer.write(source, grant, length=64))
        await peer.write(source, grant, length=64, imm=counter.imm)
        await peer.write(source, grant, length=64, imm=counter.imm)
        await show("a wait for too few", lambda: counter.wait(1, timeout=30))
        await show("a wait for too many", lambda: counter.wait(3, timeout=0.1))
        counter.release()
        await show("a released counter", lambda: counter.wait(2))

        source.close()
        await show("memory that was closed", lambda: peer.write(source, to, length=64))
        await b.close()
        await show("a peer that has left", lambda: peer.receive(timeout=30))
    await show("a closed engine", lambda: a.alloc(64))


if __name__ == "__main__":
    asyncio.run(main())
