"""The fleet as a stream of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from fastapi import APIRouter, Header
from fastapi.responses import StreamingResponse

from kvxfer.api.access import GuardedRoute, allow
from kvxfer.api.context import ControlPlane, ControlPlaneDep
from kvxfer.api.problems import responses
from kvxfer.errors import ControlPlaneUnavailable, InvalidArgument
from kvxfer.instances import Change, Snapshot
from kvxfer.web.tokens import Scope

router = APIRouter(route_class=GuardedRoute, prefix="/v1/instances", tags=["instances"])

_RETRY_MS = 1000
# Silence after which a comment is sent, so that no proxy cuts the stream.
_KEEPALIVE_SECONDS = 15.0


@router.get(
    "/watch",
    summary="Watch",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": (
                "Events `snapshot` (data: Snapshot) and `change` (data: Change), each with an id"
            ),
            "content": {
                "text/event-stream": {
                    "schema": {"type": "string"},
                    "example": (
                        "event: snapshot\n"
                        "id: 1795046400000001\n"
                        'data: {"id":1795046400000001,"instances":[]}\n\n'
                    ),
                }
            },
        },
        **responses(InvalidArgument, ControlPlaneUnavailable),
    },
)
@allow(Scope.WORKER, Scope.ROUTER, Scope.ADMIN)
async def watch(
    app: ControlPlaneDep,
    last_event_id: Annotated[
        int | None,
        Header(ge=0, description="Resume after this event; EventSource sends it by itself."),
    ] = None,
) -> StreamingResponse:
    """Sends every change of an instance's registration or state as server-sent events.

    Without Last-Event-ID, or if the changes since are no longer kept, the stream begins with a
    `snapshot` that replaces all that the reader knew. Comments keep an idle stream alive.
    """
    await app.registry.ping()
    return StreamingResponse(
        _events(app, last_event_id),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _events(app: ControlPlane, after: int | None) -> AsyncIterator[bytes]:
    changes = aiter(app.registry.watch(after))
    stopping = asyncio.ensure_future(app.stopping.wait())
    pending = asyncio.ensure_future(anext(changes, None))
    app.metrics.watchers.inc()
    try:
        yield b"retry: %d\n\n" % _RETRY_MS
        while True:
            done, _ = await asyncio.wait(
                (pending, stopping),
                timeout=_KEEPALIVE_SECONDS,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if stopping in done:
                return
            if not done:
                yield b": keep-alive\n\n"
                continue
            item = pending.result()
            if item is None:
                return
            yield _event(item)
            pending = asyncio.ensure_future(anext(changes, None))
    finally:
        # Cancelling the pending read also ends the watch behind it.
        pending.cancel()
        stopping.cancel()
        app.metrics.watchers.dec()


def _event(item: Snapshot | Change) -> bytes:
    # Records are known to be valid; pydantic would take long, and delay all other requests.
    name = b"snapshot" if isinstance(item, Snapshot) else b"change"
    return b"event: %s\nid: %d\ndata: %s\n\n" % (name, item.id, msgspec.json.encode(item))
