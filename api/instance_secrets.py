"""Secrets of instances: drawn for a lease, kept as a digest, shown by calls as the instance."""

from __future__ import annotations

import hashlib
import secrets
from typing import Annotated, TypeAlias

from fastapi import Header, Request

from kvxfer.api.access import caller
from kvxfer.instance_secret import HEADER
from kvxfer.web.tokens import Scope

InstanceSecret: TypeAlias = Annotated[
    str | None,
    Header(
        alias=HEADER,
        description="What the registration of the instance answered as `secret`. Not needed for an "
        "instance that took none, nor for a token with a scope beside `worker` that the route "
        "takes.",
    ),
]


def new_secret() -> str:
    return secrets.token_hex(32)


def digest(secret: str | None) -> str:
    """What a registry keeps and compares; empty for none."""
    return hashlib.sha256(secret.encode()).hexdigest() if secret else ""


def asked_of(request: Request, secret: str | None, *scopes: Scope) -> str | None:
    """The digest of what a caller showed; None for one with any of these scopes, which need show
    nothing. Without tokens every caller has all scopes."""
    return None if has_any(request, *scopes) else digest(secret)


def has_any(request: Request, *scopes: Scope) -> bool:
    return not caller(request).scopes.isdisjoint(scopes)
