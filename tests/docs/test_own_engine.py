"""docs/own-engine.md: its Python runs as it is written, and its figures are right."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

import jwt
import pytest

import kvxfer
import kvxfer.client
import kvxfer.errors
import kvxfer.kv
from kvxfer import Engine
from kvxfer.kv import BlockPool, KvCache, KvEndpoint, KvIdentity, KvLayout, KvOptions
from kvxfer.ticket import verify_ticket
from tests.docs.test_snippets import ROOT, run, snippet
from verify.processes.control_plane import CLUSTER_KEY as KEY
from verify.processes.control_plane import RunningControlPlane

pytestmark = pytest.mark.native

PAGE: Final = "docs/own-engine.md"
PUBLIC: Final = {
    name: getattr(module, name)
    for module in (kvxfer, kvxfer.client, kvxfer.kv)
    for name in module.__all__
}
PROMPT: Final = list(range(100))
LAYOUT: Final[KvLayout] = eval(  # the layout of the page
    snippet(PAGE, "layout =").splitlines()[0].partition("= ")[2], {"KvLayout": KvLayout}
)


async def run_public(begins: str, **names: Any) -> dict[str, Any]:
    """Runs a part of the page with the public names, and those of the caller's program."""
    return await run(snippet(PAGE, begins), **{**PUBLIC, **names})


@asynccontextmanager
async def worker(
    instance_id: str, layout: KvLayout = LAYOUT, *, epoch: int = 0, **options: Any
) -> AsyncIterator[Any]:
    async with Engine(cluster_key=KEY) as engine:
        with KvCache.allocate(engine, layout, 64) as cache:
            pool = BlockPool(64)
            identity = KvIdentity(instance_id, KEY, epoch)
            async with KvEndpoint(engine, cache, pool, identity, KvOptions(**options)) as endpoint:
                yield SimpleNamespace(engine=engine, cache=cache, pool=pool, endpoint=endpoint)
                pool.check()
                assert pool.num_free == 64


async def new_ticket() -> str:
    bound = await run_public("ticket =", KEY=KEY, uuid=uuid, time=time)
    return str(bound["ticket"])


async def test_a_worker_is_an_engine_a_cache_a_pool_and_an_endpoint() -> None:
    seen = []

    async def serve(engine: Engine, cache: KvCache, pool: BlockPool, endpoint: KvEndpoint) -> None:
        seen.append((engine.address, len(cache.buffer(0, "K")), pool.num_free, endpoint.epoch))

    await run_public("layout =", KEY=KEY, serve=serve)
    [(address, nbytes, free, epoch)] = seen
    assert address.startswith("kvx://")
    assert (nbytes, free, epoch) == (1024 * LAYOUT.part_bytes, 1024, 0)


async def test_both_sides_of_a_transfer() -> None:
    computed: list[int] = []
    generated = []

    async with worker("prefill-0", epoch=1) as prefill, worker("decode-0", epoch=1) as decode:

        async def compute(layer: int, blocks: Any) -> None:
            computed.append(layer)
            for part in LAYOUT.parts:
                plane = prefill.cache.buffer(layer, part)
                for block in blocks.tolist():
                    size = LAYOUT.part_bytes
                    plane[block * size : (block + 1) * size] = bytes([1 + layer]) * size

        async def generate(blocks: Any, first_token: bytes) -> None:
            generated.append((len(blocks), first_token))
            for layer in range(LAYOUT.num_layers):
                plane, size = decode.cache.buffer(layer, "V"), LAYOUT.part_bytes
                for block in blocks.tolist():
                    assert plane[block * size : (block + 1) * size] == bytes([1 + layer]) * size

        ticket = await new_ticket()
        common = {"ticket": ticket, "layout": LAYOUT, "prompt": PROMPT}
        await asyncio.gather(
            run_public(
                "# prefill",
                endpoint=prefill.endpoint,
                pool=prefill.pool,
                compute=compute,
                first_token=b"hi",
                **common,
            ),
            run_public(
                "# decode",
                endpoint=decode.endpoint,
                prefill_address=prefill.engine.address,
                generate=generate,
                **common,
            ),
        )
    assert computed == [0, 1, 2, 3]
    assert generated == [(7, b"hi")]


async def test_an_instance_registers_and_has_tickets_of_the_control_plane() -> None:
    with RunningControlPlane() as control_plane:
        async with worker("decode-0") as decode, worker("prefill-0") as prefill:
            sent = []

            async def send(prefill: Any, decode: Any, ticket: str) -> None:
                signed = jwt.decode(ticket, options={"verify_signature": False})["iat"]
                sent.append((prefill, decode, verify_ticket(ticket, KEY, now=signed)))

            async def serve() -> None:
                source = snippet(PAGE, "spec =").replace("Role.DECODE", "Role.PREFILL")
                await run(source, **PUBLIC, **told(prefill), serve=ask)

            async def ask() -> None:
                async with kvxfer.client.ControlPlaneClient(control_plane.url) as client:
                    await run_public("transfer =", client=client, prompt=PROMPT, send=send)
                    assert not await client.transfers()

            def told(side: Any) -> dict[str, Any]:
                made = {"engine": side.engine, "pool": side.pool, "endpoint": side.endpoint}
                return {**made, "layout": LAYOUT, "url": control_plane.url}

            await run_public("spec =", **told(decode), serve=serve)
            [(source, target, claims)] = sent
            assert source.engine_address == prefill.engine.address
            assert (target.instance_id, target.http_address) == ("decode-0", "")
            assert claims.prefill_epoch == prefill.endpoint.epoch > 0
            assert claims.decode_epoch == decode.endpoint.epoch > 0


async def test_other_ranks_take_the_epoch_of_the_first() -> None:
    layouts = [replace(LAYOUT, tp_size=2, tp_rank=rank) for rank in range(2)]
    async with worker("d", layouts[0], epoch=7) as first, worker("d", layouts[1]) as second:
        await run_public(
            "await endpoint.follow",
            endpoint=second.endpoint,
            address_of_first_rank=first.engine.address,
        )
        assert second.endpoint.epoch == 7


async def writes(order: str, ranks: int) -> tuple[int, int]:
    """Returns the number of writes for the page's prompt, and the bytes of each."""
    async with AsyncExitStack() as stack:
        ours = replace(LAYOUT, order=order)
        prefill = await stack.enter_async_context(worker("prefill-0", ours, epoch=1))
        decodes = [
            await stack.enter_async_context(
                worker("decode-0", replace(LAYOUT, tp_size=ranks, tp_rank=rank), epoch=1)
            )
            for rank in range(ranks)
        ]
        ticket = await new_ticket()
        blocks = LAYOUT.blocks_for(len(PROMPT))
        with prefill.pool.hold(blocks) as hold:
            async with prefill.endpoint.prefill_session(ticket, hold) as session:
                receivers = [
                    await decode.endpoint.decode_session(ticket, prefill.engine.address, blocks)
                    for decode in decodes
                ]
                for layer in range(LAYOUT.num_layers):
                    session.write_layer(layer)
                await session.finish()
                for receiver in receivers:
                    await receiver.wait()
                    receiver.take().release()
                return session.writes, session.nbytes // session.writes


async def test_writes_are_as_many_as_the_page_says() -> None:
    rows = re.findall(r'^\| `order="(\w+)"`.*$', (ROOT / PAGE).read_text(), re.MULTILINE)
    assert rows == ["NHD", "HND"]
    for order in rows:
        [row] = re.findall(rf'^\| `order="{order}"`.*$', (ROOT / PAGE).read_text(), re.MULTILINE)
        said = re.findall(r"([\d,]+) writes of ([\d,]+) bytes", row)
        assert [tuple(int(n.replace(",", "")) for n in pair) for pair in said] == [
            await writes(order, ranks) for ranks in (1, 2)
        ]


def test_errors_of_the_page_are_errors_of_the_library() -> None:
    table = (ROOT / PAGE).read_text().split("\n## What to do about errors\n")[1]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    named = re.findall(r"`(\w+)`", " ".join(rows))
    assert len(named) == len(set(named)) > 10
    for name in named:
        assert issubclass(getattr(kvxfer.errors, name), kvxfer.errors.KvxferError)
