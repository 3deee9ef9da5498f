"""The process of one rank, for all ways but MPI, which has separate processes."""

from __future__ import annotations

import contextlib
import gc
import os
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks.moe.cases import Routes
from benchmarks.moe.exchange import Exchange, tokens_of
from benchmarks.moe.gloo import Gloo
from benchmarks.moe.memcpy import Memcpy
from benchmarks.moe.way import Member, Way
from kvxfer.bench.settings import PEER_TIMEOUT_SECONDS
from kvxfer.moe import AllToAll, MoeShape

SECONDS: Final = 120.0
"""The most seconds to connect, and for the rounds of one order."""


def serve(
    rank: int,
    routes: Routes,
    ways: tuple[Way, ...],
    shared: NDArray[np.uint8],
    key: str,
    store: Path,
    orders: Connection,
) -> None:
    """Runs orders until None comes: a way and a number of rounds. Answers with the times."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=routes.case.ranks,
        timeout=timedelta(seconds=SECONDS),
    )
    with contextlib.ExitStack() as stack:
        members = _members(rank, routes, ways, shared, key, stack)
        gc.collect()
        gc.disable()
        orders.send(None)
        while (order := orders.recv()) is not None:
            way, rounds = order
            times = members[way].run(rounds)
            members[way].check()
            orders.send(times)
        dist.barrier()
    dist.destroy_process_group()


def _members(
    rank: int,
    routes: Routes,
    ways: tuple[Way, ...],
    shared: NDArray[np.uint8],
    key: str,
    stack: contextlib.ExitStack,
) -> dict[Way, Member]:
    case = routes.case
    members: dict[Way, Member] = {
        Way.GLOO: Gloo(routes, rank, tokens_of(case, rank)),
        Way.MEMCPY: Memcpy(routes, rank, shared),
    }
    groups: dict[str, AllToAll] = {}
    shape = MoeShape(
        experts=case.experts, top_k=case.top_k, hidden=case.hidden, max_tokens=case.tokens
    )
    for way in ways:
        if way.fabric is None:
            continue
        if way.fabric not in groups:
            groups[way.fabric] = stack.enter_context(
                AllToAll(
                    shape,
                    rank=rank,
                    ranks=case.ranks,
                    cluster_key=key,
                    exchange=_all_say,
                    timeout=SECONDS,
                    fabrics=[way.fabric],
                    peer_timeout=PEER_TIMEOUT_SECONDS,
                )
            )
        members[way] = Exchange(groups[way.fabric], case, rank, by_expert=way.by_expert)
    return members


def _all_say(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
