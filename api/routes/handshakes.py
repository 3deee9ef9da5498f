"""The comparison of two instances, before anything moves."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body

from kvxfer.api.access import GuardedRoute, allow
from kvxfer.api.context import ControlPlaneDep
from kvxfer.api.problems import responses
from kvxfer.errors import (
    ControlPlaneUnavailable,
    InvalidArgument,
    LayoutMismatch,
    UnknownInstance,
)
from kvxfer.scheduler.handshake import shake_hands
from kvxfer.transfers import Handshake, HandshakeRequest
from kvxfer.web.tokens import Scope

router = APIRouter(route_class=GuardedRoute, prefix="/v1/handshakes", tags=["transfers"])


@router.post(
    "",
    summary="Compare a pair",
    responses=responses(InvalidArgument, UnknownInstance, LayoutMismatch, ControlPlaneUnavailable),
)
@allow(Scope.WORKER, Scope.ROUTER, Scope.ADMIN)
async def handshake(body: Annotated[HandshakeRequest, Body()], app: ControlPlaneDep) -> Handshake:
    """Returns what would move between two instances, or names the field that cannot be mapped."""
    return await shake_hands(app.registry, body.prefill_id, body.decode_id)
