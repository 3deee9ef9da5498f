"""Heartbeats, answered without FastAPI: most requests of a large fleet are heartbeats."""

from __future__ import annotations

import re
from typing import Final

import msgspec
from fastapi import Request
from msgspec.structs import replace
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvxfer.api.access import Guard, GuardedRoute
from kvxfer.api.context import ControlPlane
from kvxfer.api.instance_secrets import digest
from kvxfer.api.problems import answer_error
from kvxfer.errors import KvxferError
from kvxfer.instance_secret import HEADER
from kvxfer.instances import Heartbeat, InstanceState, Lease
from kvxfer.unreadable import UNREADABLE

_PATH: Final = re.compile(r"/v1/instances/([A-Za-z0-9][A-Za-z0-9._:-]{0,127})/heartbeat")
_JSON: Final = b"application/json"

_read = msgspec.json.Decoder(Heartbeat).decode
_write = msgspec.json.Encoder().encode


async def renew(
    control_plane: ControlPlane, instance_id: str, body: Heartbeat, secret: str | None
) -> Lease:
    """The renewed lease. Raises StaleEpoch, Forbidden or ControlPlaneUnavailable."""
    lease = await control_plane.registry.heartbeat(
        instance_id,
        body.epoch,
        state=None if body.state is None else InstanceState(body.state),
        load=body.load,
        secret=digest(secret),
    )
    control_plane.metrics.heartbeats.inc()
    return replace(lease, at=control_plane.clock.unix())


class AnswerHeartbeats:
    """ASGI middleware that answers the requests of `route`, and passes all others on.

    It also passes on what it cannot read. FastAPI then reads the body again, and accepts it or
    names what is wrong, so this changes no answer.
    """

    def __init__(
        self, app: ASGIApp, route: GuardedRoute, guard: Guard, control_plane: ControlPlane
    ) -> None:
        self._app = app
        self._route = route
        self._guard = guard
        self._control_plane = control_plane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = None
        if scope["type"] == "http" and scope["method"] == "PUT":
            found = _PATH.fullmatch(scope["path"])
        if found is None or not _is_json(scope):
            await self._app(scope, receive, send)
            return
        scope["route"] = self._route  # for metrics and traces
        request = Request(scope, receive, send)
        try:
            self._guard.admit(request, self._route)
            content = await _body(receive)
            secret = request.headers.get(HEADER)
            lease = await renew(self._control_plane, found[1], _read(content), secret)
        except KvxferError as error:
            await answer_error(request, error)(scope, receive, send)
        except HTTPException:  # the body is too large, and still is for FastAPI
            await self._app(scope, receive, send)
        except UNREADABLE:
            await self._app(scope, _again(content, receive), send)
        else:
            await _send_json(send, _write(lease))


def _is_json(scope: Scope) -> bool:
    """Whether the body is JSON of a declared length."""
    names = dict(scope["headers"])
    media_type = names.get(b"content-type", b"").partition(b";")[0].strip().lower()
    return media_type == _JSON and b"content-length" in names and b"transfer-encoding" not in names


async def _body(receive: Receive) -> bytes:
    """The whole body, or as much of it as came before the client left."""
    content = b""
    more = True
    while more:
        message = await receive()
        content += message.get("body", b"")
        more = message.get("more_body", False)
    return content


def _again(content: bytes, receive: Receive) -> Receive:
    """`receive` with a body that was read already."""
    messages: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


async def _send_json(send: Send, content: bytes) -> None:
    headers = [(b"content-length", b"%d" % len(content)), (b"content-type", _JSON)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})
