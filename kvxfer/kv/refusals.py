"""What an endpoint refuses: counted by what it was and by the code of the error."""

from __future__ import annotations

from collections import Counter

from kvxfer.errors import KvxferError


class Refusals:
    """Loop only. Both labels come from fixed sets: nothing that a peer makes up becomes one."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def count(self, what: str, error: KvxferError) -> None:
        self._counts[what, error.code] += 1

    def by_what(self) -> dict[str, dict[str, int]]:
        """For each what, how often by code."""
        found: dict[str, dict[str, int]] = {}
        for (what, code), times in sorted(self._counts.items()):
            found.setdefault(what, {})[code] = times
        return found
