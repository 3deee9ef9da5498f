"""The demo's cluster: a control plane, one prefill and one decode worker, each a process."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from kvxfer.child_process import Child
from kvxfer.cluster_key import ENVIRONMENT as CLUSTER_KEY

# A large checkpoint takes minutes to read from a slow disk.
_START_SECONDS: Final = 300.0
# All processes share this machine, which may be a busy laptop.
_PEER_TIMEOUT: Final = "5"
# The time until the exit of a process that caused an error is seen.
_BLAME_SECONDS: Final = 2.0
_TRUST_VARIABLES: Final = tuple(
    f"KVXFER_{name}"
    for name in ("TOKENS_FILE", "TOKEN", "TOKEN_FILE", "CA_FILE", "CERT_FILE", "KEY_FILE")
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster. Loop only."""

    control_plane: str
    children: Sequence[Child]

    async def run(self, work: Awaitable[T]) -> T:
        """Returns the result of `work`, which needs every process of the cluster.

        Raises ProcessFailed as soon as one exits, even if that first shows as another error.
        """
        working = asyncio.ensure_future(work)
        exits = [asyncio.create_task(child.fail_on_exit()) for child in self.children]
        try:
            await asyncio.wait([working, *exits], return_when=asyncio.FIRST_COMPLETED)
            if not (working.done() and working.exception() is None):
                await asyncio.wait(
                    exits, timeout=_BLAME_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                for ended in exits:
                    if ended.done():
                        ended.result()
            return await working
        finally:
            for task in (working, *exits):
                task.cancel()
            await asyncio.gather(working, *exits, return_exceptions=True)


@contextlib.asynccontextmanager
async def start_cluster(
    *,
    model: Path | None,
    fabrics: Sequence[str] | None,
    gpu: int | None,
    blocks: int,
    threads: int,
) -> AsyncIterator[Cluster]:
    """Starts a cluster, and yields it when its workers are registered and accept requests. It uses
    all fabrics of this host unless some are named.

    Raises ProcessFailed if a process ends before.
    """
    # The keys in the environment are those of another cluster.
    environment = {CLUSTER_KEY: secrets.token_hex(32)} | dict.fromkeys(_TRUST_VARIABLES, "")
    async with contextlib.AsyncExitStack() as stack:
        control_plane = await stack.enter_async_context(
            Child("control plane", ["serve", "--port", "0", "--json"], environment)
        )
        url = str((await control_plane.ready(_START_SECONDS))["url"])
        options = ["--control-plane", url]
        if fabrics is not None:
            options += ["--fabrics", ",".join(fabrics)]
        options += ["--blocks", str(blocks), "--threads", str(threads), "--json"]
        options += ["--peer-timeout", _PEER_TIMEOUT]
        if model is not None:
            options += ["--model", str(model)]
        if gpu is not None:
            options += ["--gpu", str(gpu)]
        workers = [
            await stack.enter_async_context(
                Child(f"{role} worker", ["worker", "--role", role, *options], environment)
            )
            for role in ("prefill", "decode")
        ]
        # All workers are told to stop before the first is waited for.
        for worker in workers:
            stack.callback(worker.terminate)
        cluster = Cluster(url, [control_plane, *workers])
        await cluster.run(asyncio.gather(*(worker.ready(_START_SECONDS) for worker in workers)))
        yield cluster
