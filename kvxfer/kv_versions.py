"""The versions of the KV protocol: those that this library speaks, and what came with which."""

from __future__ import annotations

from typing import Final, TypeAlias

from kvxfer.errors import LayoutMismatch

Versions: TypeAlias = tuple[int, int]
"""The oldest and the newest one that an endpoint speaks."""

OLDEST: Final = 7
NEWEST: Final = 8
VERSIONS: Final[Versions] = (OLDEST, NEWEST)
TELLS_MODEL: Final = 8
"""Since this one HELLO tells the range of versions and the model, and OFFER the adapter."""
UNTOLD: Final[Versions] = (7, 7)
"""What a worker speaks that does not tell its versions."""


def require_common_version(prefill: Versions, decode: Versions) -> None:
    """Raises LayoutMismatch where no version is in both ranges."""
    if min(prefill[1], decode[1]) < max(prefill[0], decode[0]):
        raise LayoutMismatch("kv_versions", prefill, decode)
