"""The transfers of kv_transfer.py in a fleet: a control plane pairs the instances and signs the
tickets. Prefill has one rank, decode two, each with one of the two KV heads.

    python examples/python/kv_fleet.py
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import secrets
import subprocess
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from multiprocessing.connection import Connection

from kv_transfer import BLOCKS, LAYOUT, PROMPTS, Worker, worker

from kvxfer.client import ControlPlaneClient, InstanceSpec, Registration, Role


def registration(client: ControlPlaneClient, role: Role, ranks: list[Worker]) -> Registration:
    """Returns the place of an instance in the fleet, which it has from `async with` on."""
    addresses = tuple(rank.engine.address for rank in ranks)
    spec = InstanceSpec(
        instance_id=role,
        role=role,
        model="mine",
        engine_address=addresses[0],
        rank_addresses=addresses,
        layout=ranks[0].cache.layout,
        num_blocks=BLOCKS,
    )
    return Registration(client, spec, on_epoch=ranks[0].endpoint.set_epoch)


def prefill_process(pipe: Connection, key: str, url: str) -> None:
    async def serve() -> None:
        async with (
            ControlPlaneClient(url) as client,
            worker(Role.PREFILL, key, epoch=0) as prefill,
            registration(client, Role.PREFILL, [prefill]),
        ):
            pipe.send("registered")
            while (request := await asyncio.to_thread(pipe.recv)) is not None:
                await prefill.prefill(*request)

    asyncio.run(serve())


async def run(key: str, url: str) -> None:
    pipe, theirs = multiprocessing.Pipe()
    prefill = multiprocessing.Process(target=prefill_process, args=(theirs, key, url))
    prefill.start()
    await asyncio.to_thread(pipe.recv)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(ControlPlaneClient(url))
        # Both ranks are in one process here; your engine has a process for each rank.
        ranks = [
            await stack.enter_async_context(
                worker(Role.DECODE, key, replace(LAYOUT, tp_size=2, tp_rank=rank), epoch=0)
            )
            for rank in range(2)
        ]
        await stack.enter_async_context(registration(client, Role.DECODE, ranks))
        await ranks[1].endpoint.follow(ranks[0].engine.address)  # rank 1 then has the epoch
        for tokens in PROMPTS:
            transfer = await client.open_transfer(model="mine", prompt_tokens=tokens)
            pipe.send((transfer.ticket, tokens))
            address = transfer.prefill.engine_address
            both = await asyncio.gather(
                *(rank.decode(transfer.ticket, address, tokens) for rank in ranks)
            )
            await client.release_transfer(transfer.transfer_id)
            print(f"{tokens:3d} tokens: {both} bytes on the two ranks, all as computed")
        pipe.send(None)
        await asyncio.to_thread(prefill.join)
        print(f"prefill ends: {prefill.exitcode}")


def main() -> None:
    key = secrets.token_hex()
    with subprocess.Popen(
        [sys.executable, "-m", "kvxfer.cli", "serve", "--port", "0", "--json"],
        env={**os.environ, "KVXFER_CLUSTER_KEY": key},
        stdout=subprocess.PIPE,
    ) as control_plane:
        assert control_plane.stdout is not None
        try:
            asyncio.run(run(key, json.loads(control_plane.stdout.readline())["url"]))
        finally:
            control_plane.terminate()


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")  # an engine does not survive a fork
    main()
