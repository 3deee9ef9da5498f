"""Secrets of instances: drawn for a lease, kept as a digest, sent by calls as the instance."""

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
        description="The `secret` in the answer to the instance's registration. Not needed for an "
        "instance that took none, nor with a token that has another scope of the route than "
        "`worker`.",
    ),
]


def new_secret() -> str:
    return secrets.token_hex(32)


def digest(secret: str | None) -> str:
    """Returns what a registry keeps and compares; empty without a secret."""
    return hashlib.sha256(secret.encode()).hexdigest() if secret else ""


def asked_of(request: Request, secret: str | None, *scopes: Scope) -> str | None:
    """Returns the digest of the secret that a caller sent; None for a caller with any of these
    scopes, which needs none. Without tokens every caller has all scopes."""
    return None if has_any(request, *scopes) else digest(secret)


def has_any(request: Request, *scopes: Scope) -> bool:
    return not caller(request).scopes.isdisjoint(scopes)
