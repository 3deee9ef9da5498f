"""One look at the fleet, made from the records of the registry."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from kvxfer.instances import Instance, Role, Traffic
from kvxfer.overview import (
    FabricTraffic,
    InstanceSummary,
    Level,
    Overview,
    OverviewQuery,
    PairTraffic,
    Place,
    RoleSummary,
    ScalingSummary,
    TransferSummary,
    UpdateSummary,
)
from kvxfer.scheduler.topology import place_of
from kvxfer.transfers import Transfer
from kvxfer.weight_updates import PartState, WeightUpdate

MAX_PLACES: Final = 240
MAX_TRANSFERS: Final = 50
MAX_PAIRS: Final = 50
MAX_MODELS: Final = 50
MAX_UPDATES: Final = 10

# Records that are looked at before others on the event loop have a turn.
_TURN: Final = 256

T = TypeVar("T")
# Whole numbers stay whole.
Sums: TypeAlias = defaultdict[str, Any]


async def look(
    instances: Sequence[Instance],
    transfers: Sequence[Transfer],
    query: OverviewQuery,
    *,
    now: float,
    sent: Mapping[str, Sequence[Traffic]],
    transfers_opened: int = 0,
    updates: Sequence[WeightUpdate] = (),
    stale_seconds: float | None = None,
    scaling: ScalingSummary | None = None,
) -> Overview:
    """Returns the part of the fleet that `query` asks for. `instances` are ordered by id,
    `transfers` by age, and `updates` with the newest first; `sent` is the traffic that each
    instance sends. `now` is in seconds since the Unix epoch.

    Other tasks on the event loop get their turns meanwhile.
    """
    asked = _filter(query)
    matching: list[Instance] = []
    received = _sums()
    rates = {name: sum(each.bytes_per_second for each in some) for name, some in sent.items()}
    async for some in _by_turns(instances):
        for instance in some:
            for traffic in sent.get(instance.instance_id, ()):
                received[traffic.to] += traffic.bytes_per_second
        matching += filter(asked, some)
    everything = len(matching) == len(instances)
    ids = None if everything else {each.instance_id for each in matching}
    level, places, omitted = await _places(matching, received, rates)
    pairs = await _pairs(instances, sent, ids)
    fabrics = _sums()
    for rate, _, _, fabric in pairs:
        fabrics[fabric] += rate
    most = heapq.nlargest(MAX_PAIRS, pairs)
    opened = [
        each
        for each in transfers
        if ids is None or each.prefill.instance_id in ids or each.decode.instance_id in ids
    ]
    page = matching[query.offset : query.offset + query.limit]
    return Overview(
        at=now,
        stale_seconds=stale_seconds,
        total=len(instances),
        matching=len(matching),
        models=tuple(sorted({each.model for each in instances})[:MAX_MODELS]),
        roles=await _roles(matching),
        level=level,
        places=places,
        places_omitted=omitted,
        offset=query.offset,
        instances=tuple(_row(each, rates, received, now) for each in page),
        transfers_opened=transfers_opened,
        transfers_open=len(opened),
        transfers=tuple(_transfer(each, now) for each in reversed(opened[-MAX_TRANSFERS:])),
        fabrics=tuple(
            FabricTraffic(fabric=fabric, bytes_per_second=rate)
            for fabric, rate in sorted(fabrics.items(), key=lambda item: -item[1])
        ),
        pairs=tuple(
            PairTraffic(prefill=prefill, decode=decode, fabric=fabric, bytes_per_second=rate)
            for rate, prefill, decode, fabric in most
        ),
        pairs_omitted=len(pairs) - len(most),
        updates=tuple(_update(each, now) for each in updates[:MAX_UPDATES]),
        scaling=scaling,
    )


async def _by_turns(items: Sequence[T]) -> AsyncIterator[Sequence[T]]:
    for start in range(0, len(items), _TURN):
        yield items[start : start + _TURN]
        await asyncio.sleep(0)


def _sums() -> Sums:
    return defaultdict(int)


def _filter(query: OverviewQuery) -> Callable[[Instance], bool]:
    search = query.search.lower() if query.search else None
    labels = [
        (name, value)
        for name, value in (("zone", query.zone), ("rack", query.rack), ("host", query.host))
        if value is not None
    ]

    def asked(instance: Instance) -> bool:
        return (
            query.instance_id in (None, instance.instance_id)
            and instance.serves(query.model)
            and query.role in (None, instance.role)
            and query.state in (None, instance.state)
            and (search is None or search in instance.instance_id.lower())
            and all(instance.labels.get(name, "") == value for name, value in labels)
        )

    return asked


async def _places(
    matching: Sequence[Instance], received: Sums, rates: Mapping[str, float]
) -> tuple[Level, tuple[Place, ...], int]:
    """Returns the narrowest level with at most MAX_PLACES places, its places, and how many were
    left out."""
    where: list[tuple[str, ...]] = []
    async for some in _by_turns(matching):
        where += ((*place_of(each.labels)[:3], each.instance_id) for each in some)
    levels = list(Level)
    depth = next(
        (
            depth
            for depth in range(len(levels), 1, -1)
            if not _more(MAX_PLACES, (path[:depth] for path in where))
        ),
        1,
    )
    found: defaultdict[tuple[str, ...], Sums] = defaultdict(_sums)
    async for placed in _by_turns(list(zip(where, matching, strict=True))):
        for path, instance in placed:
            sums = found[path[:depth]]
            sums[instance.role] += 1
            _add(sums, instance)
            sums["bytes_per_second"] += received[instance.instance_id] + rates.get(
                instance.instance_id, 0
            )
    paths = sorted(found)
    places = tuple(_place(path, found[path]) for path in paths[:MAX_PLACES])
    return levels[depth - 1], places, len(paths) - len(places)


def _more(limit: int, items: Iterable[object]) -> bool:
    """Returns whether more than `limit` items are different."""
    found = set()
    for item in items:
        found.add(item)
        if len(found) > limit:
            return True
    return False


def _add(sums: Sums, instance: Instance) -> None:
    load = instance.load
    sums[instance.state] += 1
    sums["running"] += load.running
    sums["waiting"] += load.waiting
    if load.free_blocks is not None:
        sums["blocks"] += instance.num_blocks
        sums["used_blocks"] += max(instance.num_blocks - load.free_blocks, 0)


def _place(path: tuple[str, ...], sums: Sums) -> Place:
    return Place(
        name=path[-1],
        zone=path[0],
        rack=path[1] if len(path) > 1 else None,
        host=path[2] if len(path) > 2 else None,
        **{name: sums[name] for name in Place.__struct_fields__[4:]},
    )


async def _roles(matching: Sequence[Instance]) -> tuple[RoleSummary, ...]:
    sums = {role: _sums() for role in Role}
    highest: dict[tuple[Role, str], float] = {}
    async for some in _by_turns(matching):
        for instance in some:
            role, load = instance.role, instance.load
            counts = sums[role]
            _add(counts, instance)
            counts["requests_per_second"] += load.requests_per_second or 0
            counts["tokens_per_second"] += load.tokens_per_second or 0
            for name, seconds in (("ttft_p90", load.ttft_p90), ("itl_p90", load.itl_p90)):
                if seconds is not None:
                    highest[role, name] = max(seconds, highest.get((role, name), 0.0))
    return tuple(
        RoleSummary(
            role=role,
            **{name: counts[name] for name in RoleSummary.__struct_fields__[1:-2]},
            ttft_p90=highest.get((role, "ttft_p90")),
            itl_p90=highest.get((role, "itl_p90")),
        )
        for role, counts in sums.items()
    )


async def _pairs(
    instances: Sequence[Instance], sent: Mapping[str, Sequence[Traffic]], ids: set[str] | None
) -> list[tuple[float, str, str, str]]:
    """Returns rate, prefill, decode and fabric of each pair."""
    found = []
    async for some in _by_turns(instances):
        found += [
            (traffic.bytes_per_second, instance.instance_id, traffic.to, traffic.fabric)
            for instance in some
            for traffic in sent.get(instance.instance_id, ())
            if ids is None or instance.instance_id in ids or traffic.to in ids
        ]
    return found


def _row(
    instance: Instance, rates: Mapping[str, float], received: Sums, now: float
) -> InstanceSummary:
    zone, rack, host, _ = place_of(instance.labels)
    deadline = instance.drain_deadline
    return InstanceSummary(
        instance_id=instance.instance_id,
        role=instance.role,
        state=instance.state,
        model=instance.model,
        zone=zone,
        rack=rack,
        host=host,
        running=instance.load.running,
        waiting=instance.load.waiting,
        transfers=instance.reserved.transfers,
        blocks=instance.num_blocks,
        used_blocks=_used(instance),
        weights_version=instance.weights_version,
        sent_bytes_per_second=rates.get(instance.instance_id, 0),
        received_bytes_per_second=received[instance.instance_id],
        heartbeat_seconds=max(now - instance.heartbeat_at, 0.0),
        drain_seconds=None if deadline is None else max(deadline - now, 0.0),
    )


def _transfer(transfer: Transfer, now: float) -> TransferSummary:
    return TransferSummary(
        transfer_id=transfer.transfer_id,
        request_id=transfer.request_id,
        prefill=transfer.prefill.instance_id,
        decode=transfer.decode.instance_id,
        prompt_tokens=transfer.prompt_tokens,
        blocks=transfer.decode_blocks,
        age_seconds=max(now - transfer.created_at, 0.0),
    )


def _update(update: WeightUpdate, now: float) -> UpdateSummary:
    states = Counter(part.state for part in update.instances)
    pauses = [p.pause_seconds for p in update.instances if p.pause_seconds is not None]
    return UpdateSummary(
        update_id=update.update_id,
        model=update.model,
        version=update.version,
        state=update.state,
        instances=len(update.instances),
        staged=states[PartState.STAGED] + states[PartState.COMMITTED],
        committed=states[PartState.COMMITTED],
        failed=states[PartState.FAILED] + states[PartState.LOST],
        error="" if update.error is None else f"{update.error.code}: {update.error.message}",
        age_seconds=max(now - update.started_at, 0.0),
        pause_seconds=max(pauses, default=None),
    )


def _used(instance: Instance) -> int | None:
    free = instance.load.free_blocks
    return None if free is None else max(instance.num_blocks - free, 0)
