"""The targets of all benchmarks. docs/performance.md has them as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvxfer.bench.cases import CASES, LIMIT_TITLES, Case


class Direction(StrEnum):
    AT_LEAST = "at least"
    AT_MOST = "at most"


@dataclass(frozen=True, slots=True)
class Target:
    """The bound of one figure. Without `unit` the figure is a ratio: the value `measured`, divided
    by the same value of `against`."""

    name: str
    measured: str
    against: str
    direction: Direction
    bound: float
    command: str
    unit: str = ""
    required: bool = False
    """Whether the command exits with code 1 if the target is missed."""

    def __str__(self) -> str:
        sign = "≥" if self.direction is Direction.AT_LEAST else "≤"
        return f"{sign} {self.bound:g} {self.unit}" if self.unit else f"{sign} {self.bound:.2f}"

    def met(self, figure: float) -> bool:
        if self.direction is Direction.AT_LEAST:
            return figure >= self.bound
        return figure <= self.bound


@dataclass(frozen=True, slots=True)
class Verdict:
    """A figure beside its target."""

    figure: float
    target: Target
    met: bool


def judge(figure: float, target: Target) -> Verdict:
    return Verdict(figure, target, target.met(figure))


def _throughput(case: Case, bounds: Mapping[int, float]) -> dict[int, Target]:
    return {
        kib << 10: Target(
            name=f"throughput, {case.name}" + (f", pages from {kib} KiB" if kib else ""),
            measured="GB/s of the engine",
            against=LIMIT_TITLES[case.limit],
            direction=Direction.AT_LEAST,
            bound=bound,
            command="kvxfer bench",
        )
        for kib, bound in bounds.items()
    }


def _overhead(pages: str, sender: float, receiver: float) -> tuple[Target, Target]:
    def target(side: str, measured: str, nanoseconds: float) -> Target:
        return Target(
            name=f"{side}, {pages} pages",
            measured=f"time per page {measured}, over a NIC that moves nothing",
            against="",
            direction=Direction.AT_MOST,
            bound=nanoseconds,
            unit="ns",
            command="kvxfer bench --null",
        )

    return (
        target("engine overhead", "until complete", sender),
        target("engine overhead of the receiver", "to count its immediates", receiver),
    )


def _control(registry: str, route: str) -> Target:
    return Target(
        name=f"{route}, {registry} registry",
        measured="requests per second",
        against="an empty route on the same server",
        direction=Direction.AT_LEAST,
        bound=0.30,
        command="make bench SUITE=control",
        required=True,
    )


def _router(
    name: str, measured: str, against: str = "", bound: float = 1.5, unit: str = ""
) -> Target:
    return Target(
        name=f"router, {name}",
        measured=measured,
        against=against,
        direction=Direction.AT_MOST,
        bound=bound,
        command="make bench SUITE=router",
        unit=unit,
        required=True,
    )


def _vllm(
    name: str, measured: str, against: str, bound: float, *, unit: str = "", required: bool = False
) -> Target:
    command = "make bench SUITE=vllm"
    return Target(
        name, measured, against, Direction.AT_MOST, bound, command, unit=unit, required=required
    )


def _weights(name: str, against: str, bound: float) -> Target:
    return Target(
        name=f"weight update, {name}",
        measured="GB/s from 4 training to 2 inference ranks",
        against=against,
        direction=Direction.AT_LEAST,
        bound=bound,
        command="make bench SUITE=weights",
    )


def _moe(ranks: int, tokens: int, name: str, against: str, bound: float) -> Target:
    return Target(
        name=f"MoE, EP {ranks}, {tokens:,} tokens, {name}",
        measured="GB/s of dispatch, or of combine where that is less",
        against=against,
        direction=Direction.AT_LEAST,
        bound=bound,
        command="make bench SUITE=moe",
        required=ranks < 8,
    )


# KiB of the smallest pages that a bound is for -> the bound.
_THROUGHPUT: Final = {
    name: _throughput(CASES[name], bounds)
    for name, bounds in {
        "tcp": {0: 0.50, 4: 0.70, 16: 0.85},
        "local": {0: 0.80, 16: 0.85},
        "local-cma": {0: 0.90},
    }.items()
}
OVERHEAD: Final = {
    "scattered": _overhead("scattered", 40, 10),
    "runs of 16": _overhead("runs of 16", 25, 10),
    "sequential": _overhead("sequential", 25, 10),
}
SCATTER_PEERS: Final = 64
SCATTER: Final = Target(
    name=f"scatter to {SCATTER_PEERS} peers",
    measured="time in which 4 KiB for each are posted, over a NIC that moves nothing",
    against="",
    direction=Direction.AT_MOST,
    bound=5,
    unit="µs",
    command="kvxfer bench --null",
)
IDLE: Final = Target(
    name="idle engine",
    measured="CPU time of either process, one connected peer, share of a core",
    against="",
    direction=Direction.AT_MOST,
    bound=0.5,
    unit="%",
    command="kvxfer bench --idle",
)
OPEN_TRANSFER: Final = "open transfer"
HEARTBEAT: Final = "heartbeat"
CONTROL: Final = {
    registry: {route: _control(registry, route) for route in (OPEN_TRANSFER, HEARTBEAT)}
    for registry in ("embedded", "redis")
}

_RAW_ASGI: Final = "a raw ASGI pass-through"
ROUTER_TOKEN: Final = _router("a streamed token", "CPU time per token", _RAW_ASGI)
ROUTER_STREAM: Final = _router(
    "streams per core", "CPU time per token, with begin and end of the requests", _RAW_ASGI
)
ROUTER_FIRST_BYTE: Final = _router(
    "first byte",
    "time above that of a raw ASGI pass-through, less the answers of control plane and workers",
    bound=1,
    unit="ms",
)

VLLM_PROMPT_TOKENS: Final = 2000
VLLM_CROWD: Final = 64
"""Requests in one step of prefill."""
VISIBLE_TRANSFER: Final = _vllm(
    f"visible transfer, {VLLM_PROMPT_TOKENS:,} tokens",
    "time between prefill's last layer and decode's first step, by push",
    "NixlConnector",
    0.50,
    required=True,
)
FIRST_TOKEN: Final = _vllm(
    f"first token, {VLLM_PROMPT_TOKENS:,} tokens",
    "time to the first token by push",
    "pull",
    1.00,
    required=True,
)
LAYER: Final = _vllm(
    "a layer of prefill's forward",
    f"time of its thread that kvxfer takes, {VLLM_CROWD} requests in the step",
    "",
    20,
    unit="µs",
)
IDLE_VLLM: Final = _vllm(
    "idle vLLM",
    "CPU time of a server above that of one without connector, share of a core",
    "",
    1,
    unit="%",
)
WAITING_VLLM: Final = _vllm(
    "vLLM while a push waits",
    "CPU time of both servers whose queue readers sleep, share of a core",
    "",
    25,
    unit="%",
)
VLLM_CACHE: Final = Target(
    name="a vLLM cache in host memory",
    measured="GB/s of its pages to another process of the host",
    against="engine.alloc()",
    direction=Direction.AT_LEAST,
    bound=0.90,
    command="make bench SUITE=vllm-cache",
    required=True,
)

_RAW: Final = "raw writes of the same bytes"
WEIGHTS: Final = {
    (fabric, digests): {
        "raw": _weights(f"{fabric}, with digests" if digests else fabric, _RAW, bound)
    }
    | (
        {}
        if digests
        else {
            "gather": _weights(f"{fabric}, a broadcast", "gather and broadcast by gloo", 2.5),
            "send": _weights(f"{fabric}, isend", "isend and irecv by gloo", 1.5),
        }
    )
    for fabric in ("tcp", "local")
    for digests, bound in ((False, 0.85), (True, 0.50))
}
"""The targets by fabric and whether digests are on, then by what is measured beside the update."""

MOE_MPI: Final = 1.3
MOE_MEMCPY: Final = 0.8
_GLOO: Final = "all_to_all_single of gloo"
_HOST: Final = f"the lesser of {MOE_MPI:g} MPI_Alltoallv and {MOE_MEMCPY:g} memcpy"
MOE: Final = {
    **{
        (ranks, tokens): {
            "local": _moe(ranks, tokens, "local", _GLOO, 5),
            "host": _moe(ranks, tokens, "local, MPI and memcpy", _HOST, 1),
            "tcp": _moe(ranks, tokens, "tcp", _GLOO, 2),
        }
        for ranks, tokens in ((2, 128), (4, 128), (2, 4096))
    },
    **{
        (ranks, tokens): {"tcp": _moe(ranks, tokens, "tcp", _GLOO, 1.5)}
        for ranks, tokens in ((8, 128), (8, 512))
    },
}
"""The targets by ranks and the tokens of each rank."""

TARGETS: Final = (
    *(target for of_it in _THROUGHPUT.values() for target in of_it.values()),
    *(target for pair in OVERHEAD.values() for target in pair),
    SCATTER,
    IDLE,
    *(target for of_it in CONTROL.values() for target in of_it.values()),
    *(ROUTER_TOKEN, ROUTER_STREAM, ROUTER_FIRST_BYTE),
    *(VISIBLE_TRANSFER, FIRST_TOKEN, LAYER, IDLE_VLLM, WAITING_VLLM, VLLM_CACHE),
    *(target for of_it in WEIGHTS.values() for target in of_it.values()),
    *(target for of_it in MOE.values() for target in of_it.values()),
)


def throughput_target(case: Case, page_bytes: int) -> Target:
    """Returns the target for pages of this size: that of the largest size that is no larger."""
    of_it = _THROUGHPUT[case.name]
    return of_it[max(size for size in of_it if size <= page_bytes)]
