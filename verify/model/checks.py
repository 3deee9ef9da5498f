"""The checks: sizes of the model, and mutations that lack a defence and must fail."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


class Search(enum.StrEnum):
    """A way in which Spin searches the states."""

    EXHAUSTIVE = "exhaustive"
    BITSTATE = "bitstate"  # a part of the states: one minute in random order, two bits per state
    FORMULA = "formula"  # LTL, with weak fairness
    CYCLES = "cycles"  # no run may be endless


@dataclass(frozen=True, slots=True)
class Check:
    """One run of Spin. `refuted` is the invariant that must be violated; None if all must hold."""

    name: str
    defines: Mapping[str, str | int | None]
    search: Search = Search.EXHAUSTIVE
    formula: str | None = None
    refuted: str | None = None
    model: str = "transfer.pml"


def _alone(faults: int, *switches: str) -> dict[str, str | int | None]:
    """Returns the definitions for one transfer of one pair, with one block."""
    sizes = {"TRANSFERS": 1, "SLOTS": 1, "TOPOLOGY": "ONE_PAIR", "FAULTS": faults}
    return {**sizes, **dict.fromkeys(switches)}


def _together(
    transfers: int, topology: str, faults: int, *switches: str
) -> dict[str, str | int | None]:
    sizes = {"TRANSFERS": transfers, "SLOTS": 2, "TOPOLOGY": topology, "FAULTS": faults}
    return {**sizes, **dict.fromkeys(switches)}


def _path(name: str, *switches: str, refuted: int | None = None) -> Check:
    """Returns a check of three writes over a path between NICs that ends up to twice."""
    return Check(
        name,
        {"WRITES": 3, "FAULTS": 2, **dict.fromkeys(switches)},
        refuted=f"invariant {refuted}" if refuted else None,
        model="path_end.pml",
    )


_PAIRS: Final = {
    "two pairs, one decode worker": "SHARED_DECODE",
    "two pairs, one prefill worker": "SHARED_PREFILL",
    "one pair, two transfers": "ONE_PAIR",
}

SMALL: Final = Check("one transfer, 2 strikes, NIC", _alone(2, "NIC"))
PATH_ENDS: Final = _path("a path between NICs ends")

CHECKS: Final = (
    Check("one transfer, 3 strikes, receiver", _alone(3, "WITH_KEEP")),
    Check("one transfer, 3 strikes, NIC", _alone(3, "NIC", "WITH_KEEP")),
    Check("one transfer, 3 strikes, GPU", _alone(3, "GPU", "WITH_KEEP")),
    Check("the same without leases", _alone(3, "NIC", "WITH_KEEP", "WITHOUT_LEASES")),
    Check("one transfer, 3 strikes, NIC, groups", _alone(3, "NIC", "WITH_KEEP", "GROUPED")),
    *(
        Check(f"{name}, 1 strike, {placer}", _together(2, topology, 1, *switches))
        for name, topology in _PAIRS.items()
        for placer, switches in (("receiver", ()), ("NIC", ("NIC",)), ("GPU", ("GPU",)))
    ),
    Check(
        "two pairs, one decode worker, without leases",
        _together(2, "SHARED_DECODE", 1, "NIC", "WITHOUT_LEASES"),
    ),
    Check("every run ends", _alone(2, "NIC", "WITH_KEEP"), Search.CYCLES),
    Check(
        "every page taken is returned",
        _alone(2, "NIC", "WITH_KEEP", "FORMULAS"),
        Search.FORMULA,
        formula="pages_return",
    ),
    Check(
        "each side learns of the other's end",
        _alone(2, "NIC", "WITH_KEEP", "FORMULAS", "WITHOUT_LEASES"),
        Search.FORMULA,
        formula="peers_learn",
    ),
    PATH_ENDS,
)

LARGE: Final = (
    Check(
        "two pairs, one decode worker, 2 strikes, NIC",
        _together(2, "SHARED_DECODE", 2, "NIC"),
        Search.BITSTATE,
    ),
    Check(
        "three transfers, one decode worker, 3 strikes, NIC",
        _together(3, "SHARED_DECODE", 3, "NIC", "WITH_KEEP"),
        Search.BITSTATE,
    ),
)


def _mutation(name: str, refuted: int, *switches: str) -> Check:
    return Check(name, _alone(2, *switches), refuted=f"invariant {refuted}")


FENCE_REMOVED: Final = Check(
    "fence removed",
    _together(2, "SHARED_DECODE", 1, "NIC", "WITHOUT_FENCE"),
    refuted="invariant 1",
)

PATH_STOP_REMOVED: Final = _path("a path ends without path_stop", "WITHOUT_STOP", refuted=6)

MUTATIONS: Final = (
    FENCE_REMOVED,
    _mutation("cancel frees at once, the NIC is not asked", 1, "NIC", "WITHOUT_REVOKE"),
    _mutation("path of a late writer is not reset", 1, "NIC", "WITHOUT_RESET"),
    _mutation("grants are not checked", 1, "WITHOUT_GRANTS"),
    _mutation("a counter is released without waiting for copies", 1, "GPU", "WITHOUT_COPY_WAIT"),
    _mutation("a batch counts before its copy has ended", 1, "GPU", "WITHOUT_COPY_END"),
    _mutation("prefill frees blocks with writes under way", 1, "WITHOUT_PINS"),
    _mutation("a group is split over two queue pairs", 1, "NIC", "GROUPED", "SPLIT_GROUP"),
    _mutation("leases never end", 2, "WITH_ENDLESS_LEASES"),
    _mutation("DONE's total is ignored", 3, "WITHOUT_TOTAL"),
    _mutation("prefill sends no CANCEL when it fails", 4, "WITHOUT_LEASES", "WITHOUT_LAST_WORDS"),
    _mutation("a lost decode worker is forgotten", 4, "WITHOUT_LEASES", "WITHOUT_MEMORY"),
    _mutation("heartbeats are not watched", 4, "WITHOUT_LEASES", "WITHOUT_HEARTBEATS"),
    _mutation("epochs are not checked", 5, "WITHOUT_EPOCHS"),
    PATH_STOP_REMOVED,
    _path("completions are believed after path_stop", "WITHOUT_SEAL", refuted=6),
    _path("a NIC is stopped before all is counted", "WITHOUT_COUNTING", refuted=6),
    _path("path_close is sent before the NIC is stopped", "EARLY_CLOSE", refuted=1),
    _path("path_close's counts are ignored", "WITHOUT_COUNTS", refuted=3),
    _path("uncounted writes are not delivered first", "WITHOUT_ORDER", refuted=3),
)
