"""The versions of the KV protocol that this library speaks, and what each of them added."""

from __future__ import annotations

from typing import Final, TypeAlias

from kvxfer.errors import LayoutMismatch

Versions: TypeAlias = tuple[int, int]
"""The oldest and the newest version that an endpoint speaks."""

OLDEST: Final = 7
NEWEST: Final = 8
VERSIONS: Final[Versions] = (OLDEST, NEWEST)
TELLS_MODEL: Final = 8
"""The first version in which HELLO has the range of versions and the model, and OFFER the
adapter."""
UNTOLD: Final[Versions] = (7, 7)
"""The versions of a worker that does not report them."""


def require_common_version(prefill: Versions, decode: Versions) -> None:
    """Raises LayoutMismatch if no version is in both ranges."""
    if min(prefill[1], decode[1]) < max(prefill[0], decode[0]):
        raise LayoutMismatch("kv_versions", prefill, decode)
