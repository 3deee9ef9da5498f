"""The HTTP face of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException

from kvxfer.reference.worker import problems
from kvxfer.reference.worker.completions import (
    CompletionRequest,
    DecodeCompletion,
    Health,
    PrefillCompletion,
)
from kvxfer.reference.worker.service import WorkerService

T = TypeVar("T")


def make_app(service: WorkerService) -> FastAPI:
    """`POST /v1/completions` and `GET /healthz` of one worker."""
    app = FastAPI(title="kvxfer worker")
    problems.install(app)

    @app.post("/v1/completions", response_model=PrefillCompletion | DecodeCompletion)
    async def complete(body: CompletionRequest, request: Request) -> Any:
        return await _while_connected(request, service.complete(body))

    @app.get("/healthz")
    async def health() -> Health:
        return service.health()

    return app


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as nobody is there to read it.

    By the time this ends so has `work`, with all it had to give back.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        # Nobody sees this answer.
        raise HTTPException(499, "the client has left")
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    """Returns when the client has closed the connection; its body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
