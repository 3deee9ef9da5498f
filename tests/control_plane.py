"""Time for a registry, and calls without a socket, for tests of registry and API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx2

from tests.asgi import AsgiTransport
from tests.virtual_time import VirtualClock, VirtualLoop, passes
from verify.polling import PATIENCE

if TYPE_CHECKING:
    from fastapi import FastAPI

    from kvxfer.scheduler.registry import Registry


async def pass_time(registry: Registry, clock: VirtualClock, seconds: float) -> None:
    """Lets time pass, and sweeps twice a second, as a control plane does."""
    while seconds > 0:
        step = min(seconds, 0.5)
        if isinstance(asyncio.get_running_loop(), VirtualLoop):
            await passes(step)
        else:
            clock.advance(step)
        seconds -= step
        await registry.sweep()


@asynccontextmanager
async def calling(app: FastAPI, **options: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """Yields a client of a control plane that runs in this event loop, without a socket."""
    transport = AsgiTransport({"kvxfer": app})
    options = {"timeout": PATIENCE, **options}
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://kvxfer", **options) as client,
    ):
        yield client
