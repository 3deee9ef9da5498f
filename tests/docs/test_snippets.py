"""Python of the documents, run as it is written, with engines of the test."""

from __future__ import annotations

import asyncio
import re
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from kvxfer import Engine, Peer, ReceivePool, RemotePool
from kvxfer.layout import KvLayout
from verify.polling import PATIENCE, eventually
from verify.processes.control_plane import RunningControlPlane

pytestmark = pytest.mark.native

ROOT: Final = Path(__file__).parents[2]
KEY: Final = "the cluster key of this test"
PAGE: Final = 16384


def snippet(page: str, begins: str) -> str:
    """Returns the block of Python of the page that begins with `begins`."""
    text = (ROOT / page).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    [found] = (block for block in blocks if block.startswith(begins))
    return str(found)


async def run(source: str, **names: Any) -> dict[str, Any]:
    """Runs a block and returns the names that it has bound."""
    body = textwrap.indent(source, "    ")
    exec(f"async def snippet():\n{body}\n    return locals()", names)
    async with asyncio.timeout(PATIENCE):
        return dict(await names["snippet"]())


@pytest.fixture
async def other() -> AsyncIterator[Engine]:
    async with Engine(cluster_key=KEY) as engine:
        yield engine


async def first_peer(engine: Engine) -> Peer:
    await eventually(lambda: engine.peers)
    return engine.peers[0]


async def test_readme_writes_pages(other: Engine) -> None:
    theirs, counter = other.alloc(4 * PAGE), other.counter()

    class Filled(Engine):
        def alloc(self, *args: Any, **options: Any) -> Any:
            memory = super().alloc(*args, **options)
            np.asarray(memory)[:] = 7
            return memory

    await run(
        snippet("README.md", "async with Engine"),
        Engine=Filled,
        KEY=KEY,
        address_of_the_other=other.address,
        their_descriptor=theirs.descriptor,
        mine=np.array([5, 0]),
        theirs=np.array([1, 3]),
        their_counter=counter.imm,
    )
    pages = np.asarray(theirs).reshape(4, PAGE)
    assert [{*page.tolist()} for page in pages] == [{0}, {7}, {0}, {7}]


async def test_a_counter_waits_for_what_a_peer_writes() -> None:
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    class Told(Engine):
        async def accept(self, timeout: float | None = None) -> Peer:
            listening.set_result(self.address)
            return await super().accept(timeout)

    receiver, sender = snippet("docs/python-api.md", "async with Engine").split("\n\n")
    messages = {
        "pack": lambda *values: msgspec.msgpack.encode(values if values[1:] else values[0]),
        "unpack": msgspec.msgpack.decode,
        "KEY": KEY,
    }
    receiving = asyncio.create_task(run(receiver, Engine=Told, **messages))
    sent = await run(sender, Engine=Engine, address=await listening, **messages)
    received = await receiving
    assert sent["write"].done()
    assert received["counter"].imm == sent["imm"]


async def test_pools_lend_slots(other: Engine) -> None:
    class Taken(Exception):
        pass

    def consume(peer: Peer, data: Any) -> None:
        raise Taken(peer.name, bytes(data))

    receiver, sender = snippet("docs/python-api.md", "pool = ReceivePool").split("\n\n")
    async with Engine(cluster_key=KEY, name="sender") as engine:
        memory = engine.alloc(PAGE)
        np.asarray(memory)[:5] = list(b"hello")
        peer = await engine.connect(other.address)
        sending = asyncio.create_task(
            run(sender, RemotePool=RemotePool, peer=peer, memory=memory, length=5)
        )
        peer = await first_peer(other)
        with pytest.raises(Taken) as taken:
            await run(receiver, ReceivePool=ReceivePool, engine=other, peer=peer, consume=consume)
        assert taken.value.args == ("sender", b"hello")
        await sending


async def test_an_instance_of_your_own_is_in_the_fleet(other: Engine) -> None:
    layout = KvLayout(num_layers=2, num_kv_heads=2, head_size=64, dtype="float16", block_size=16)
    with RunningControlPlane() as control_plane:
        source = snippet("docs/api.md", "from kvxfer.client import ControlPlaneClient")
        bound = await run(
            source.replace("http://127.0.0.1:8080", control_plane.url),  # text
            engine=other,
            layout=layout,
            pool=SimpleNamespace(num_free=4096),
        )
    assert bound["me"].epoch > 0
