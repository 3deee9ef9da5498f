"""The bounds of an engine on a NIC that is not here: the processor, as measured over the null NIC,
the NIC's writes per second, and the wire, both as published."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvxfer.bench.null import measure_page_costs

PAGE_KIB: Final = (1, 4, 16, 64, 256)
PAGES: Final = 20_000
_PREAMBLE_GAP_AND_FCS: Final = 8 + 12 + 4
_ETHERNET, _IPV4, _UDP, _BTH, _RETH, _IMMEDIATE, _ICRC = 14, 20, 8, 12, 16, 4, 4


@dataclass(frozen=True, slots=True)
class NicModel:
    """A model of a NIC. `gbits` is that of the NICs of one GPU. `headers` are the bytes on the wire
    beside the payload, of a packet and of a write; None if they are not published. `writes_per_s`
    is for posted writes of any size."""

    name: str
    title: str
    gbits: float
    mtu: int
    headers: tuple[int, int] | None
    writes_per_s: float
    keeps_order: bool
    sources: tuple[str, ...]

    def wire_gbits(self, nbytes: int) -> float:
        """Returns the payload's Gbit/s for writes of `nbytes`, if only the wire bounds it."""
        if self.headers is None:
            return self.gbits
        packet, write = self.headers
        on_wire = nbytes + write + packet * math.ceil(nbytes / self.mtu)
        return self.gbits * nbytes / on_wire

    def rate_gbits(self, nbytes: int) -> float:
        """Returns the payload's Gbit/s for writes of `nbytes`, if only their rate bounds it."""
        return self.writes_per_s * nbytes * 8 / 1e9


NICS: Final = {
    each.name: each
    for each in (
        NicModel(
            name="cx7",
            title="ConnectX-7, 400 Gbit/s, RoCE v2, MTU 4096",
            gbits=400,
            mtu=4096,
            headers=(
                _PREAMBLE_GAP_AND_FCS + _ETHERNET + _IPV4 + _UDP + _BTH + _ICRC,
                _RETH + _IMMEDIATE,
            ),
            writes_per_s=11e6,
            keeps_order=True,
            sources=(
                "wire: headers of RoCE v2 (IBTA, annex A17)",
                "writes per second: 11 M of small pages, arXiv 2510.27656",
            ),
        ),
        NicModel(
            name="efa-p5en",
            title="EFA of p5en, two NICs of 200 Gbit/s for each GPU",
            gbits=400,
            mtu=8192,
            headers=None,
            writes_per_s=2e6,
            keeps_order=False,
            sources=(
                "wire: without the headers of SRD, which are not published",
                "writes per second: 2 M of small pages, arXiv 2510.27656",
                "the processor's time in libfabric is not in it",
            ),
        ),
    )
}


@dataclass(frozen=True, slots=True)
class NicBounds:
    """The bounds of pages of one size, each a write: nanoseconds per page of the sender's and of
    the receiver's engine, and Gbit/s that each bound allows."""

    page_bytes: int
    sender_ns: float
    receiver_ns: float
    cpu_gbits: float
    rate_gbits: float
    wire_gbits: float
    binds: str


def measure_bounds(
    nic: NicModel, seed: int, rounds: int, advance: Callable[[], None]
) -> list[NicBounds]:
    """Measures scattered pages of each size, over one engine's thread."""
    return [
        bounds_of(nic, kib << 10, *costs)
        for kib, costs in zip(
            PAGE_KIB,
            measure_page_costs(
                seed,
                rounds,
                advance,
                [kib << 10 for kib in PAGE_KIB],
                PAGES,
                keeps_order=nic.keeps_order,
            ),
            strict=True,
        )
    ]


def bounds_of(nic: NicModel, page_bytes: int, sender_ns: float, receiver_ns: float) -> NicBounds:
    """Returns the bounds; the least binds. The sender and the receiver work at the same time."""
    bounds = {
        "processor": page_bytes * 8 / max(sender_ns, receiver_ns),
        "writes/s": nic.rate_gbits(page_bytes),
        "wire": nic.wire_gbits(page_bytes),
    }
    return NicBounds(
        page_bytes=page_bytes,
        sender_ns=sender_ns,
        receiver_ns=receiver_ns,
        cpu_gbits=bounds["processor"],
        rate_gbits=bounds["writes/s"],
        wire_gbits=bounds["wire"],
        binds=min(bounds, key=bounds.__getitem__),
    )
