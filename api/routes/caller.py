"""The caller that a token names; the page shows what that caller may do."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from kvxfer.api.access import GuardedRoute, allow, caller
from kvxfer.web.tokens import Scope

router = APIRouter(route_class=GuardedRoute, prefix="/v1/caller", tags=["operations"])


class CallerInfo(BaseModel):
    """The caller as the control plane knows it."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"name": "ops", "scopes": ["admin", "router"]}]}
    )

    name: str = Field(description="The name in the tokens file; `anonymous` without one.")
    scopes: list[Scope]


@router.get("", summary="Caller")
@allow(*Scope)
async def who(request: Request) -> CallerInfo:
    """Returns the name and the scopes of this request's token."""
    known = caller(request)
    return CallerInfo(name=known.name, scopes=sorted(known.scopes))
