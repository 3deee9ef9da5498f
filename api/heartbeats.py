"""Heartbeats: most requests of a large fleet."""

from __future__ import annotations

import re
from typing import Final

import msgspec
from fastapi import Request
from msgspec.structs import replace

from kvxfer.api.context import ControlPlane
from kvxfer.api.direct import Answer, AnswerDirectly
from kvxfer.api.instance_secrets import digest
from kvxfer.instance_secret import HEADER
from kvxfer.instances import Heartbeat, InstanceState, Lease

_PATH: Final = re.compile(r"/v1/instances/([A-Za-z0-9][A-Za-z0-9._:-]{0,127})/heartbeat")

_read = msgspec.json.Decoder(Heartbeat).decode
_write = msgspec.json.Encoder().encode


async def renew(
    control_plane: ControlPlane, instance_id: str, body: Heartbeat, secret: str | None
) -> Lease:
    """Renews a lease. Raises StaleEpoch, Forbidden or ControlPlaneUnavailable."""
    lease = await control_plane.registry.heartbeat(
        instance_id,
        body.epoch,
        state=None if body.state is None else InstanceState(body.state),
        load=body.load,
        secret=digest(secret),
    )
    control_plane.metrics.heartbeats.inc()
    return replace(lease, at=control_plane.clock.unix())


class AnswerHeartbeats(AnswerDirectly):
    method = "PUT"

    def match(self, path: str) -> str | None:
        found = _PATH.fullmatch(path)
        return None if found is None else found[1]

    def read(self, content: bytes) -> Heartbeat:
        return _read(content)

    async def answer(self, request: Request, found: str, body: Heartbeat) -> Answer:
        secret = request.headers.get(HEADER)
        return Answer(200, _write(await renew(self.control_plane, found, body, secret)))
