"""The secret that one cluster shares: engines authenticate with it, tickets are signed with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from kvxfer.errors import InvalidArgument

ENVIRONMENT: Final = "KVXFER_CLUSTER_KEY"
MIN_BYTES: Final = 16


def as_cluster_key(key: bytes | str) -> bytes:
    """Returns the key as bytes. Raises InvalidArgument if it is too short to be a secret."""
    raw = key.encode() if isinstance(key, str) else bytes(key)
    if len(raw) < MIN_BYTES:
        raise InvalidArgument(
            f"the cluster key has {len(raw)} bytes; use at least {MIN_BYTES}, "
            "for example from `openssl rand -hex 32`"
        )
    return raw


def read_cluster_key(file: Path | None = None) -> bytes:
    """Returns the key from `file`, or without a file from KVXFER_CLUSTER_KEY.

    White space around the key in a file is not part of it. Raises InvalidArgument.
    """
    if file is not None:
        try:
            return as_cluster_key(file.read_bytes().strip())
        except OSError as error:
            raise InvalidArgument(
                f"the cluster key file {file} cannot be read: {error.strerror}"
            ) from error
    from_environment = os.environ.get(ENVIRONMENT)
    if not from_environment:
        raise InvalidArgument(
            f"there is no cluster key: set {ENVIRONMENT} or name a file that holds it, "
            f"at least {MIN_BYTES} bytes, for example from `openssl rand -hex 32`"
        )
    return as_cluster_key(from_environment)
