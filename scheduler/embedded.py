"""The registry inside one control-plane process: nothing to install, nothing survives its end."""

from __future__ import annotations

import asyncio
import heapq
import hmac
import math
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from msgspec.structs import replace

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.instances import (
    BlockUpdate,
    Change,
    ChangeCause,
    Instance,
    InstanceSpec,
    InstanceState,
    Lease,
    Load,
    PublishedBlocks,
    Role,
    Snapshot,
    Traffic,
)
from kvxfer.kv.block_table import BlockTable
from kvxfer.prefix_hashes import MAX_HASHES_PER_INSTANCE, pack
from kvxfer.scheduler import lease_guard, refusals
from kvxfer.scheduler.arrivals import Arrivals
from kvxfer.scheduler.embedded_updates import EmbeddedUpdates
from kvxfer.scheduler.feed import ChangeFeed
from kvxfer.scheduler.fleet import Fleet
from kvxfer.scheduler.lease_policy import LeasePolicy
from kvxfer.scheduler.pairing import Pair
from kvxfer.scheduler.registry import Registry, Statistics, TransferEnd
from kvxfer.scheduler.room import Room
from kvxfer.scheduler.scoring import Scorer
from kvxfer.scheduler.weight_updates import UpdateStep
from kvxfer.transfers import Party, Transfer, TransferRequest
from kvxfer.weight_updates import AnnounceUpdate, Decision, ReportUpdate, WeightUpdate

_FEED_CAPACITY: Final = 10_000
_WATCH_BATCH: Final = 100
# Removals before others on the event loop have a turn.
_PORTION: Final = 100


@dataclass(slots=True)
class _Holder:
    """The holder of an id, and when its lease ends."""

    incarnation: str
    deadline: float
    secret: str
    leaving: bool = False
    """Whether its worker has reported that it drains, which no operator can undo."""


# An entry that may expire: (deadline, kind, id, epoch of the instance or 0).
_Expiry: TypeAlias = tuple[float, Literal["instance", "transfer"], str, int]


class EmbeddedRegistry(Registry):
    """A registry in one event loop. No step awaits after its start, so each step is atomic.

    Change ids and epochs are one ascending number. It starts at the microseconds since the Unix
    epoch, so that both keep ascending when the process restarts.

    Set `silence_seconds` only if steps come regularly. Two steps that are farther apart show that
    the process was stopped or starved and that no lease could be renewed; all leases are then
    extended by that time.
    """

    def __init__(
        self,
        policy: LeasePolicy | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        feed_capacity: int = _FEED_CAPACITY,
        scorer: Scorer | None = None,
        silence_seconds: float = math.inf,
    ) -> None:
        self._policy = policy or LeasePolicy()
        self._clock = clock
        self._silence_seconds = silence_seconds
        self._stepped = self._clock.monotonic()
        # The time of the last step that ended a silence; -inf once leases were spared for it.
        self._unwell_at = -math.inf
        self._feed = ChangeFeed(last_id=int(self._clock.unix() * 1e6), capacity=feed_capacity)
        self.room = Room()
        self._fleet = Fleet(scorer, self.room)
        self._holders: dict[str, _Holder] = {}
        self._sent: dict[str, tuple[Traffic, ...]] = {}
        self._tables: dict[str, BlockTable] = {}
        self._arrivals = Arrivals()
        self._updates = EmbeddedUpdates(clock)
        # One entry per instance and transfer; the entry of a renewed lease is put back when due.
        self._expiries: list[_Expiry] = []
        self._registrations = 0
        self._leases_expired = self._leases_spared = 0
        self._transfers_opened = 0
        self._transfers_ended: Counter[TransferEnd] = Counter()

    async def open(self) -> None:
        pass

    @property
    def stale_seconds(self) -> float | None:
        return None

    # --- instances ---------------------------------------------------------------------------

    async def register(
        self,
        spec: InstanceSpec,
        *,
        state: InstanceState = InstanceState.JOINING,
        incarnation: str = "",
        secret: str = "",
    ) -> Lease:
        now = await self._begin()
        held = self._fleet.get(spec.instance_id)
        if held is not None:
            holder = self._holders[spec.instance_id]
            if not incarnation or incarnation != holder.incarnation:
                raise refusals.held(
                    *(held.instance_id, held.http_address, held.epoch, holder.deadline - now),
                    registering=spec.http_address,
                )
            self._remove(held, ChangeCause.DEREGISTERED)
        unix = self._clock.unix()
        epoch = self._feed.last_id + 1
        instance = Instance.of(
            spec,
            epoch=epoch,
            state=state,
            registered_at=unix,
            heartbeat_at=unix,
            has_secret=bool(secret),
        )
        deadline = now + self._policy.lease_seconds
        self._fleet.put(instance)
        self._holders[spec.instance_id] = _Holder(incarnation, deadline, secret)
        heapq.heappush(self._expiries, (deadline, "instance", spec.instance_id, epoch))
        self._registrations += 1
        self._publish(ChangeCause.REGISTERED, instance)
        return self._lease(instance)

    async def heartbeat(
        self,
        instance_id: str,
        epoch: int,
        *,
        state: InstanceState | None = None,
        load: Load | None = None,
        secret: str | None = None,
    ) -> Lease:
        now = await self._begin()
        before = self._living(instance_id, epoch, secret)
        holder = self._holders[instance_id]
        if load is not None:
            self._sent[instance_id] = load.sent
            load = replace(load, sent=())
        after = replace(
            before,
            state=before.state if state is None else before.state.advanced_to(state),
            load=before.load if load is None else load,
            started=before.started if load is None else 0,
            heartbeat_at=self._clock.unix(),
        )
        self._fleet.put(after)
        holder.deadline = now + self._policy.lease_seconds
        holder.leaving |= state is InstanceState.DRAINING
        if after.state is not before.state:
            self._publish(ChangeCause.STATE_CHANGED, after)
        return self._lease(after)

    async def publish_blocks(
        self, instance_id: str, epoch: int, update: BlockUpdate, *, secret: str | None = None
    ) -> PublishedBlocks:
        await self._begin()
        self._living(instance_id, epoch, secret)
        held = self._fleet.publish(
            instance_id, pack(update.added), pack(update.removed), reset=update.reset
        )
        return PublishedBlocks(held=held, capacity=MAX_HASHES_PER_INSTANCE)

    async def deregister(self, instance_id: str, epoch: int, *, secret: str | None = None) -> None:
        await self._begin()
        self._member(instance_id)
        self._remove(self._living(instance_id, epoch, secret), ChangeCause.DEREGISTERED)

    async def drain(
        self, instance_id: str, *, seconds: float, secret: str | None = None
    ) -> Instance:
        await self._begin()
        before = self._member(instance_id)
        self._require_secret(instance_id, secret)
        return self._change(
            replace(
                before,
                state=before.state.advanced_to(InstanceState.DRAINING),
                drain_deadline=self._clock.unix() + seconds,
            ),
            ChangeCause.STATE_CHANGED,
        )

    async def undrain(self, instance_id: str) -> Instance:
        await self._begin()
        before = self._member(instance_id)
        if self._holders[instance_id].leaving:
            raise refusals.leaving(instance_id)
        if before.state is not InstanceState.DRAINING:
            return before
        return self._change(
            replace(before, state=InstanceState.JOINING, drain_deadline=None),
            ChangeCause.STATE_CHANGED,
        )

    async def change_role(self, instance_id: str, role: Role) -> Instance:
        await self._begin()
        before = self._member(instance_id)
        if before.role is role:
            return before
        return self._change(replace(before, role=role), ChangeCause.ROLE_CHANGED)

    async def require_secret(self, instance_id: str, secret: str) -> None:
        await self._begin()
        self._member(instance_id)
        self._require_secret(instance_id, secret)

    async def instance(self, instance_id: str) -> Instance:
        await self._begin()
        return self._member(instance_id)

    async def instances(self) -> tuple[Instance, ...]:
        await self._begin()
        return self._fleet.snapshot()

    async def sent(self) -> Mapping[str, tuple[Traffic, ...]]:
        await self._begin()
        return dict(self._sent)

    async def watch(self, after: int | None = None) -> AsyncIterator[Snapshot | Change]:
        while not self._feed.closed:
            await self._begin()
            if after is None or not self._feed.covers(after):
                snapshot = Snapshot(id=self._feed.last_id, instances=self._fleet.snapshot())
                after = snapshot.id
                yield snapshot
                continue
            for change in self._feed.after(after, limit=_WATCH_BATCH):
                after = change.id
                yield change
            await self._feed.wait(after)

    # --- transfers ---------------------------------------------------------------------------

    async def choose(self, request: TransferRequest) -> Pair:
        await self._begin()
        return self._fleet.choose(request)

    def find(self, request: TransferRequest) -> Pair | None:
        return self._fleet.find(request)

    async def opened(self, transfer_id: str) -> Transfer | None:
        await self._begin()
        return self._fleet.transfer(transfer_id)

    async def reserve(
        self, transfer: Transfer, *, seconds: float, prefix_hashes: tuple[int, ...] = ()
    ) -> Transfer:
        now = await self._begin()
        there = self._fleet.transfer(transfer.transfer_id)
        if there is not None:
            return there
        for party, blocks in transfer.sides:
            self._check(party, blocks)
        self._fleet.open(transfer)
        self._fleet.sent(transfer, prefix_hashes)
        heapq.heappush(self._expiries, (now + seconds, "transfer", transfer.transfer_id, 0))
        self._transfers_opened += 1
        return transfer

    async def transfer(self, transfer_id: str) -> Transfer:
        await self._begin()
        transfer = self._fleet.transfer(transfer_id)
        if transfer is None:
            raise refusals.unknown_transfer(transfer_id)
        return transfer

    async def transfers(self) -> tuple[Transfer, ...]:
        await self._begin()
        return self._fleet.transfers()

    async def release(self, transfer_id: str) -> None:
        await self._begin()
        if self._fleet.transfer(transfer_id) is None:
            raise refusals.unknown_transfer(transfer_id)
        self._end_transfer(transfer_id, TransferEnd.RELEASED)

    async def put_block_table(self, transfer_id: str, table: BlockTable) -> None:
        await self.transfer(transfer_id)
        if self._tables.setdefault(transfer_id, table) != table:
            raise refusals.block_table_exists(transfer_id)
        self._arrivals.announce(transfer_id)

    async def block_table(self, transfer_id: str, *, wait_seconds: float = 0.0) -> BlockTable:
        give_up = self._clock.monotonic() + wait_seconds
        while True:
            await self.transfer(transfer_id)
            table = self._tables.get(transfer_id)
            if table is not None:
                return table
            left = give_up - self._clock.monotonic()
            if left <= 0:
                raise refusals.unknown_block_table(transfer_id)
            await self._arrivals.wait(transfer_id, left)

    # --- weight updates ----------------------------------------------------------------------

    async def announce_update(self, request: AnnounceUpdate, *, seconds: float) -> UpdateStep:
        await self._begin()
        return self._updates.announce(request, self._fleet.snapshot(), seconds)

    async def report_update(self, update_id: str, report: ReportUpdate) -> UpdateStep:
        await self._begin()
        return self._updates.report(update_id, report)

    async def decide_update(self, update_id: str, decision: Decision) -> UpdateStep:
        await self._begin()
        return self._updates.decide(update_id, decision)

    async def update(self, update_id: str) -> WeightUpdate:
        await self._begin()
        return self._updates.get(update_id)

    async def updates(self, model: str | None = None) -> tuple[WeightUpdate, ...]:
        await self._begin()
        return self._updates.all(model)

    # --- the registry itself -----------------------------------------------------------------

    async def sweep(self) -> None:
        await self._begin()

    async def statistics(self) -> Statistics:
        await self._begin()
        return Statistics(
            instances=self._fleet.census(),
            open_transfers=self._fleet.open_transfers,
            registrations=self._registrations,
            leases_expired=self._leases_expired,
            leases_spared=self._leases_spared,
            transfers_opened=self._transfers_opened,
            transfers_ended=Counter(self._transfers_ended),
            updates_ended=Counter(self._updates.ended),
        )

    async def ping(self) -> None:
        await self._begin()

    async def close(self) -> None:
        self._feed.close()
        self._arrivals.announce_all()

    async def _begin(self) -> float:
        """Starts a step: ends what has expired, and returns the time.

        Other tasks run after each portion; what follows the last one is atomic.
        """
        while True:
            if self._feed.closed:
                raise refusals.stopping()
            now = self._clock.monotonic()
            silence, self._stepped = now - self._stepped, now
            if silence > self._silence_seconds:
                for holder in self._holders.values():
                    holder.deadline += silence
                self._updates.extend(silence)
                self._unwell_at = now
            self._updates.end_lapsed(now)
            if self._expired(now):
                return now
            await asyncio.sleep(0)

    def _expired(self, now: float) -> bool:
        """Ends a portion of what has expired. Returns whether nothing is left."""
        removed, may_spare = 0, True
        while self._expiries and self._expiries[0][0] <= now:
            if removed >= _PORTION:
                return False
            _, kind, name, epoch = heapq.heappop(self._expiries)
            if kind == "transfer":
                if self._fleet.transfer(name) is not None:
                    self._end_transfer(name, TransferEnd.EXPIRED)
                    removed += 1
                continue
            instance = self._fleet.get(name)
            if instance is None or instance.epoch != epoch:
                continue
            if self._holders[name].deadline <= now and may_spare:
                may_spare = False
                self._spare(now)
            deadline = self._holders[name].deadline
            if deadline > now:
                heapq.heappush(self._expiries, (deadline, kind, name, epoch))
            else:
                self._leases_expired += 1
                removed += 1 + instance.reserved.transfers
                self._remove(instance, ChangeCause.LEASE_EXPIRED)
        return True

    def _spare(self, now: float) -> None:
        lease = self._policy.lease_seconds
        if now > self._unwell_at + lease_guard.AFTER * lease:
            return
        zones = {each.instance_id: each.labels.get("zone", "") for each in self._fleet.snapshot()}
        until = now + lease_guard.LATE * lease
        late = {name: zones[name] for name, held in self._holders.items() if held.deadline <= until}
        names = lease_guard.spared(late, zones)
        if not names:
            return
        self._unwell_at = -math.inf
        for name in names:
            self._holders[name].deadline += lease
        self._leases_spared += len(names)
        lease_guard.say(len(names))

    def _member(self, instance_id: str) -> Instance:
        instance = self._fleet.get(instance_id)
        if instance is None:
            raise refusals.unknown_instance(instance_id)
        return instance

    def _change(self, instance: Instance, cause: ChangeCause) -> Instance:
        self._fleet.put(instance)
        self._publish(cause, instance)
        return instance

    def _living(self, instance_id: str, epoch: int, secret: str | None = None) -> Instance:
        instance = self._fleet.get(instance_id)
        if instance is None or instance.epoch != epoch:
            living = None if instance is None else instance.epoch
            raise refusals.stale_epoch(instance_id, epoch, living)
        self._require_secret(instance_id, secret)
        return instance

    def _require_secret(self, instance_id: str, shown: str | None) -> None:
        held = self._holders[instance_id].secret
        if shown is not None and held and not hmac.compare_digest(held, shown):
            raise refusals.wrong_secret(instance_id, shown)

    def _check(self, party: Party, blocks: int) -> None:
        """Checks that `party` can take a reservation of `blocks` blocks."""
        instance = self._living(party.instance_id, party.epoch)
        if instance.state is not InstanceState.READY:
            raise refusals.not_ready(instance.instance_id, instance.state)
        unreserved = instance.num_blocks - instance.reserved.blocks
        if blocks > unreserved:
            raise refusals.too_few_blocks(instance.instance_id, unreserved, blocks)

    def _remove(self, instance: Instance, cause: ChangeCause) -> None:
        for transfer_id in self._fleet.held_by(instance.instance_id):
            self._end_transfer(transfer_id, TransferEnd.INSTANCE_GONE)
        last = self._fleet.remove(instance.instance_id)
        del self._holders[instance.instance_id]
        self._sent.pop(instance.instance_id, None)
        self._publish(cause, replace(last, state=InstanceState.GONE))

    def _end_transfer(self, transfer_id: str, end: TransferEnd) -> None:
        self._fleet.end(transfer_id, released=end is TransferEnd.RELEASED)
        self._tables.pop(transfer_id, None)
        self._arrivals.announce(transfer_id)
        self._transfers_ended[end] += 1

    def _publish(self, cause: ChangeCause, instance: Instance) -> None:
        self._feed.append(Change(id=self._feed.last_id + 1, cause=cause, instance=instance))

    def _lease(self, instance: Instance) -> Lease:
        return Lease(
            instance_id=instance.instance_id,
            epoch=instance.epoch,
            state=instance.state,
            lease_seconds=self._policy.lease_seconds,
            heartbeat_interval=self._policy.heartbeat_interval,
            role=instance.role,
            reserved=instance.reserved,
            drain_seconds=(
                None
                if instance.drain_deadline is None
                else max(0.0, instance.drain_deadline - self._clock.unix())
            ),
        )
