"""A guard for leases that end although their workers live.

Shortly after the registry was unavailable, most of a fleet or of a zone may not have reconnected
yet. The registry in Redis decides the same (redis_registry/lua/prelude.lua).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Final

# Fewer late leases than this are the fault of their workers.
_MASS: Final = 10
# The time after an outage of the registry, in leases, in which leases may be spared.
AFTER: Final = 2
# A lease with less than this part left was not renewed by a heartbeat that was due.
LATE: Final = 0.5

_log = logging.getLogger("kvxfer.registry")


def spared(late: Mapping[str, str], fleet: Mapping[str, str]) -> list[str]:
    """Returns the instances whose lease is to be extended, out of those whose heartbeat is late.

    These are all if they are most of the fleet, else those of each zone where most are late. Both
    arguments map an instance to its zone, or to "" if it has none.
    """
    if len(late) < _MASS:
        return []
    if 2 * len(late) > len(fleet):
        return list(late)
    missed, there = Counter(late.values()), Counter(fleet.values())
    zones = {zone for zone, n in missed.items() if zone and n >= _MASS and 2 * n > there[zone]}
    return [name for name, zone in late.items() if zone in zones]


def say(leases: int) -> None:
    _log.warning(
        "most leases of a fleet or of a zone were about to end shortly after the registry was "
        "unavailable; %d leases are extended once",
        leases,
    )
