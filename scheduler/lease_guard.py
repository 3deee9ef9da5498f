"""When leases that end are no sign of workers that died.

Shortly after the registry was unavailable most of a fleet, or of a zone, may not have got through
again. The registry in Redis decides the same (redis_registry/lua/prelude.lua).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Final

# Fewer leases than these end for reasons of their workers.
_MASS: Final = 10
# For so many leases after the registry was unavailable, leases may be spared.
AFTER: Final = 2
# A lease that has less than this part left was not renewed by a heartbeat that was due.
LATE: Final = 0.5

_log = logging.getLogger("kvxfer.registry")


def spared(late: Mapping[str, str], fleet: Mapping[str, str]) -> list[str]:
    """Of instances whose heartbeat is late the ones whose lease is to be extended: all where they
    are most of the fleet, else those of each zone that they are most of.

    Both map an instance to its zone, or to nothing where it has none.
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
        "most of a fleet or of a zone was about to be gone shortly after the registry was "
        "unavailable; %d leases are extended once",
        leases,
    )
