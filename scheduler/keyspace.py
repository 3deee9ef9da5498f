"""The keys and memory that a registry takes in Redis."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Final

from msgspec import Meta

from kvxfer.errors import InvalidArgument
from kvxfer.settings import check_bounds

_PREFIX: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}|\{[A-Za-z0-9._:-]{1,64}\}")


@dataclass(frozen=True, slots=True)
class Keyspace:
    """The keys and memory of one registry in Redis. Raises InvalidArgument."""

    registry_prefix: str = "kvxfer"
    """The prefix, before a colon, of all keys of a registry in Redis. One for each fleet; in
    braces, as {kvxfer}, for a Redis Cluster."""
    registry_log_bytes: Annotated[int, Meta(ge=1 << 16)] = 64 << 20
    """The most bytes that the log of a registry in Redis takes. Replicas follow this log."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if not _PREFIX.fullmatch(self.registry_prefix):
            raise InvalidArgument(
                f"registry_prefix is {self.registry_prefix!r}; take 1 to 64 letters, digits and "
                ". _ : -, or these in braces"
            )
