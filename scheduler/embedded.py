"""The registry inside one control-plane process: nothing to install, nothing survives its end."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

from kvxfer.errors import (
    ControlPlaneUnavailable,
    InstanceExists,
    NoCapacity,
    StaleEpoch,
    UnknownInstance,
    UnknownTransfer,
)
from kvxfer.instances import (
    Change,
    ChangeCause,
    Instance,
    InstanceSpec,
    InstanceState,
    Lease,
    Load,
    Role,
    Snapshot,
)
from kvxfer.scheduler.clock import Clock, SystemClock
from kvxfer.scheduler.feed import ChangeFeed
from kvxfer.scheduler.registry import LeasePolicy, Registry, Statistics, TransferEnd
from kvxfer.transfers import Party, Transfer

_FEED_CAPACITY: Final = 10_000
_WATCH_BATCH: Final = 100


@dataclass(slots=True)
class _Member:
    instance: Instance
    incarnation: str
    deadline: float
    transfers: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Reservation:
    transfer: Transfer
    deadline: float


# What may run out, and when: (deadline, kind, id, epoch of the instance or 0).
_Expiry: TypeAlias = tuple[float, Literal["instance", "transfer"], str, int]


class EmbeddedRegistry(Registry):
    """Belongs to one event loop. No step awaits in its middle, which makes each one atomic.

    Change ids and epochs are one ascending number. It starts at the microseconds since the Unix
    epoch, so that both go on ascending when the process restarts.
    """

    def __init__(
        self,
        policy: LeasePolicy | None = None,
        *,
        clock: Clock | None = None,
        feed_capacity: int = _FEED_CAPACITY,
    ) -> None:
        self._policy = policy or LeasePolicy()
        self._clock = clock or SystemClock()
        self._feed = ChangeFeed(last_id=int(self._clock.unix() * 1e6), capacity=feed_capacity)
        self._members: dict[str, _Member] = {}
        self._reservations: dict[str, _Reservation] = {}
        # One entry per member and reservation; a renewed lease is put back when its turn comes.
        self._expiries: list[_Expiry] = []
        self._registrations = 0
        self._leases_expired = 0
        self._transfers_opened = 0
        self._transfers_ended: Counter[TransferEnd] = Counter()

    # --- instances ---------------------------------------------------------------------------

    async def register(
        self,
        spec: InstanceSpec,
        *,
        state: InstanceState = InstanceState.JOINING,
        incarnation: str = "",
    ) -> Lease:
        now = self._begin()
        holder = self._members.get(spec.instance_id)
        if holder is not None:
            if not incarnation or incarnation != holder.incarnation:
                raise _held(holder, now)
            self._remove(holder, ChangeCause.DEREGISTERED)
        epoch, unix = self._feed.next_id, self._clock.unix()
        instance = Instance(
            instance_id=spec.instance_id,
            role=spec.role,
            model=spec.model,
            engine_address=spec.engine_address,
            http_address=spec.http_address,
            layout=spec.layout,
            num_blocks=spec.num_blocks,
            fabrics=spec.fabrics,
            labels=spec.labels,
            epoch=epoch,
            state=state,
            registered_at=unix,
            heartbeat_at=unix,
        )
        member = _Member(instance, incarnation, deadline=now + self._policy.lease_seconds)
        self._members[spec.instance_id] = member
        heapq.heappush(self._expiries, (member.deadline, "instance", spec.instance_id, epoch))
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
    ) -> Lease:
        now = self._begin()
        member = self._living(instance_id, epoch)
        before = member.instance
        after = replace(
            before,
            state=before.state if state is None else before.state.advanced_to(state),
            load=before.load if load is None else load,
            heartbeat_at=self._clock.unix(),
        )
        member.instance = after
        member.deadline = now + self._policy.lease_seconds
        if after.state is not before.state:
            self._publish(ChangeCause.STATE_CHANGED, after)
        return self._lease(after)

    async def deregister(self, instance_id: str, epoch: int) -> None:
        self._begin()
        self._member(instance_id)
        self._remove(self._living(instance_id, epoch), ChangeCause.DEREGISTERED)

    async def drain(self, instance_id: str, *, seconds: float) -> Instance:
        self._begin()
        before = self._member(instance_id).instance
        return self._change(
            replace(
                before,
                state=before.state.advanced_to(InstanceState.DRAINING),
                drain_deadline=self._clock.unix() + seconds,
            ),
            ChangeCause.STATE_CHANGED,
        )

    async def change_role(self, instance_id: str, role: Role) -> Instance:
        self._begin()
        before = self._member(instance_id).instance
        if before.role is role:
            return before
        return self._change(replace(before, role=role), ChangeCause.ROLE_CHANGED)

    async def instance(self, instance_id: str) -> Instance:
        self._begin()
        return self._member(instance_id).instance

    async def instances(self) -> tuple[Instance, ...]:
        self._begin()
        return self._snapshot()

    async def watch(self, after: int | None = None) -> AsyncIterator[Snapshot | Change]:
        while not self._feed.closed:
            self._begin()
            if after is None or not self._feed.covers(after):
                snapshot = Snapshot(id=self._feed.last_id, instances=self._snapshot())
                after = snapshot.id
                yield snapshot
                continue
            for change in self._feed.after(after, limit=_WATCH_BATCH):
                after = change.id
                yield change
            await self._feed.wait(after)

    # --- transfers ---------------------------------------------------------------------------

    async def reserve(self, transfer: Transfer, *, seconds: float) -> None:
        now = self._begin()
        sides = (
            (transfer.prefill, transfer.prefill_blocks),
            (transfer.decode, transfer.decode_blocks),
        )
        members = [self._reservable(party, blocks) for party, blocks in sides]
        for member, (_, blocks) in zip(members, sides, strict=True):
            member.transfers.add(transfer.transfer_id)
            _count_reserved(member, transfers=1, blocks=blocks)
        deadline = now + seconds
        self._reservations[transfer.transfer_id] = _Reservation(transfer, deadline)
        heapq.heappush(self._expiries, (deadline, "transfer", transfer.transfer_id, 0))
        self._transfers_opened += 1

    async def transfer(self, transfer_id: str) -> Transfer:
        self._begin()
        reservation = self._reservations.get(transfer_id)
        if reservation is None:
            raise _unknown_transfer(transfer_id)
        return reservation.transfer

    async def transfers(self) -> tuple[Transfer, ...]:
        self._begin()
        # In the order of their reservation, which is how a dict keeps them.
        return tuple(reservation.transfer for reservation in self._reservations.values())

    async def release(self, transfer_id: str) -> None:
        self._begin()
        if transfer_id not in self._reservations:
            raise _unknown_transfer(transfer_id)
        self._end_transfer(transfer_id, TransferEnd.RELEASED)

    # --- the registry itself -----------------------------------------------------------------

    async def sweep(self) -> None:
        self._begin()

    async def statistics(self) -> Statistics:
        self._begin()
        return Statistics(
            instances=Counter((m.instance.role, m.instance.state) for m in self._members.values()),
            open_transfers=len(self._reservations),
            registrations=self._registrations,
            leases_expired=self._leases_expired,
            transfers_opened=self._transfers_opened,
            transfers_ended=Counter(self._transfers_ended),
        )

    async def ping(self) -> None:
        self._begin()

    async def close(self) -> None:
        self._feed.close()

    def _begin(self) -> float:
        """The start of every step: what has run out by now is ended. Returns the time."""
        if self._feed.closed:
            raise ControlPlaneUnavailable("the control plane is stopping; retry with another one")
        now = self._clock.monotonic()
        while self._expiries and self._expiries[0][0] <= now:
            _, kind, name, epoch = heapq.heappop(self._expiries)
            if kind == "transfer":
                if name in self._reservations:
                    self._end_transfer(name, TransferEnd.EXPIRED)
                continue
            member = self._members.get(name)
            if member is None or member.instance.epoch != epoch:
                continue
            if member.deadline > now:
                heapq.heappush(self._expiries, (member.deadline, kind, name, epoch))
            else:
                self._leases_expired += 1
                self._remove(member, ChangeCause.LEASE_EXPIRED)
        return now

    def _member(self, instance_id: str) -> _Member:
        member = self._members.get(instance_id)
        if member is None:
            raise _unknown_instance(instance_id)
        return member

    def _change(self, instance: Instance, cause: ChangeCause) -> Instance:
        self._members[instance.instance_id].instance = instance
        self._publish(cause, instance)
        return instance

    def _living(self, instance_id: str, epoch: int) -> _Member:
        member = self._members.get(instance_id)
        if member is None:
            raise StaleEpoch(
                f"instance {instance_id!r} has no lease under epoch {epoch}; register again",
                instance_id=instance_id,
                epoch=epoch,
            )
        if member.instance.epoch != epoch:
            raise StaleEpoch(
                f"instance {instance_id!r} lives under epoch {member.instance.epoch}, "
                f"not {epoch}; register again",
                instance_id=instance_id,
                epoch=epoch,
            )
        return member

    def _reservable(self, party: Party, blocks: int) -> _Member:
        member = self._living(party.instance_id, party.epoch)
        instance = member.instance
        if instance.state is not InstanceState.READY:
            raise NoCapacity(
                f"instance {instance.instance_id!r} is {instance.state}, not ready",
                reasons=[f"instance {instance.instance_id!r} is {instance.state}"],
            )
        unreserved = instance.num_blocks - instance.reserved.blocks
        if blocks > unreserved:
            raise NoCapacity(
                f"instance {instance.instance_id!r} has {unreserved} unreserved KV blocks, "
                f"not {blocks}",
                reasons=[f"instance {instance.instance_id!r} has {unreserved} unreserved blocks"],
            )
        return member

    def _remove(self, member: _Member, cause: ChangeCause) -> None:
        instance_id = member.instance.instance_id
        for transfer_id in list(member.transfers):
            self._end_transfer(transfer_id, TransferEnd.INSTANCE_GONE)
        del self._members[instance_id]
        self._publish(cause, replace(member.instance, state=InstanceState.GONE))

    def _end_transfer(self, transfer_id: str, end: TransferEnd) -> None:
        transfer = self._reservations.pop(transfer_id).transfer
        for party, blocks in (
            (transfer.prefill, transfer.prefill_blocks),
            (transfer.decode, transfer.decode_blocks),
        ):
            member = self._members[party.instance_id]
            member.transfers.remove(transfer_id)
            _count_reserved(member, transfers=-1, blocks=-blocks)
        self._transfers_ended[end] += 1

    def _publish(self, cause: ChangeCause, instance: Instance) -> None:
        self._feed.append(Change(id=self._feed.next_id, cause=cause, instance=instance))

    def _snapshot(self) -> tuple[Instance, ...]:
        return tuple(self._members[instance_id].instance for instance_id in sorted(self._members))

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


def _count_reserved(member: _Member, *, transfers: int, blocks: int) -> None:
    before = member.instance.reserved
    after = replace(before, transfers=before.transfers + transfers, blocks=before.blocks + blocks)
    member.instance = replace(member.instance, reserved=after)


def _held(holder: _Member, now: float) -> InstanceExists:
    instance, remaining = holder.instance, holder.deadline - now
    return InstanceExists(
        f"instance {instance.instance_id!r} is alive at {instance.http_address} (epoch "
        f"{instance.epoch}); choose another instance_id, stop that instance, or wait until its "
        f"lease ends, in {remaining:.1f} s without a heartbeat",
        instance_id=instance.instance_id,
        epoch=instance.epoch,
        lease_remaining_seconds=round(remaining, 3),
    )


def _unknown_instance(instance_id: str) -> UnknownInstance:
    return UnknownInstance(
        f"no instance {instance_id!r} is registered: it never was, it left, or its lease expired",
        instance_id=instance_id,
    )


def _unknown_transfer(transfer_id: str) -> UnknownTransfer:
    return UnknownTransfer(
        f"no transfer {transfer_id!r} is open: it was released, it expired, or one of its "
        "instances is gone",
        transfer_id=transfer_id,
    )
