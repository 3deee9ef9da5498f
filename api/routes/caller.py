"""The caller that a token names: the page asks it to show what that caller may do."""

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

    name: str = Field(description="As the tokens file names it; `anonymous` where there is none.")
    scopes: list[Scope]


@router.get("", summary="Caller")
@allow(*Scope)
async def who(request: Request) -> CallerInfo:
    """The name and the scopes of the token that this request carries."""
    known = caller(request)
    return CallerInfo(name=known.name, scopes=sorted(known.scopes))
