"""The fleet that the log in Redis describes, in the memory of one replica."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from kvxfer.instances import Change, Instance, InstanceState
from kvxfer.scheduler import lease_guard
from kvxfer.scheduler.arrivals import Arrivals
from kvxfer.scheduler.feed import ChangeFeed
from kvxfer.scheduler.fleet import Fleet, counted
from kvxfer.scheduler.redis_registry.records import (
    decode_change,
    decode_load,
    decode_transfer,
    decode_update,
    finite,
    hashes,
    id_of,
    reading,
)
from kvxfer.scheduler.room import Room
from kvxfer.scheduler.scoring import Scorer
from kvxfer.scheduler.weight_updates import UpdateLedger
from kvxfer.transfers import Transfer


class LogBroken(Exception):
    """A record that does not follow the last one: records are missing, or Redis began anew."""


class Mirror:
    """The state of the registry, in one event loop. Empty until the first `replace`."""

    def __init__(self, *, feed_capacity: int, scorer: Scorer | None, room: Room) -> None:
        self._scorer = scorer
        self._room = room
        self.fleet = self.empty_fleet()
        self.feed = ChangeFeed(last_id=0, capacity=feed_capacity)
        self.tables: set[str] = set()
        """The transfers that have a block table; the table itself is in Redis alone."""
        self.arrivals = Arrivals()
        self.updates = UpdateLedger()
        self.loaded = False
        self.position = 0
        # Transfers that Redis has not confirmed yet, so that the next choice already counts them.
        self._provisional: dict[str, Transfer] = {}
        self._news = asyncio.Event()

    def empty_fleet(self) -> Fleet:
        """Returns a fleet to fill and to give to `replace`."""
        return Fleet(self._scorer, self._room)

    def replace(
        self,
        fleet: Fleet,
        position: int,
        floor: int,
        changes: Sequence[Change],
        tables: Iterable[str] = (),
        updates: UpdateLedger | None = None,
    ) -> None:
        """Replaces the state with `fleet`, which is that of the log's record `position`."""
        self.fleet, self.position, self.loaded = fleet, position, True
        self.tables = set(tables)
        self.updates = updates or UpdateLedger()
        self.arrivals.announce_all()
        self._provisional.clear()
        self.feed.reload(floor, changes)
        self._room.tell(None)
        self._wake()

    def apply(self, entry_id: bytes, fields: Mapping[bytes, bytes]) -> None:
        """Applies the step of one record. Raises LogBroken, and ControlPlaneUnavailable for a
        damaged record; the caller must then load the whole again."""
        with reading(f"record {entry_id.decode(errors='backslashreplace')} of the log"):
            if int(fields[b"after"]) != self.position:
                raise LogBroken
            self._take(entry_id, fields)
            self.position = id_of(entry_id)
        self._wake()

    async def reach(self, position: int) -> None:
        """Returns once the record `position` was applied."""
        while self.position < position:
            await self._news.wait()

    def open(self, transfer: Transfer) -> None:
        """Counts a transfer that is about to be reserved."""
        if self.fleet.transfer(transfer.transfer_id) is None:
            self._provisional[transfer.transfer_id] = transfer
            self.fleet.open(transfer)

    def instance(self, instance_id: str) -> Instance | None:
        """Returns an instance without reservations that Redis has not taken yet."""
        instance = self.fleet.get(instance_id)
        if instance is None:
            return None
        held = self.fleet.held_by(instance_id)
        for transfer in self._provisional.values():
            if transfer.transfer_id in held:
                instance = counted(instance, transfer, -1)
        return instance

    def completed(self, instance: Instance) -> Instance:
        """Returns an instance as Redis has it, with what only follows from its transfers."""
        known = self.instance(instance.instance_id)
        if known is None or known.epoch != instance.epoch:
            return instance
        return replace(instance, prefilling=known.prefilling)

    def instances(self) -> tuple[Instance, ...]:
        """Returns every instance, ordered by id, as `instance` does."""
        concerned = {
            party.instance_id
            for transfer in self._provisional.values()
            for party in (transfer.prefill, transfer.decode)
        }
        told = {name: self.instance(name) for name in concerned}
        return tuple(told.get(i.instance_id) or i for i in self.fleet.snapshot())

    @property
    def open_transfers(self) -> int:
        return self.fleet.open_transfers - len(self._provisional)

    def transfers(self) -> tuple[Transfer, ...]:
        """Returns every open transfer that Redis has taken, the oldest first."""
        return tuple(t for t in self.fleet.transfers() if t.transfer_id not in self._provisional)

    def opened(self, transfer_id: str) -> Transfer | None:
        """Returns the open transfer, unless Redis has not taken it yet."""
        if transfer_id in self._provisional:
            return None
        return self.fleet.transfer(transfer_id)

    def undo(self, transfer_id: str) -> None:
        """Forgets a transfer that was not reserved, as far as is known here."""
        if self._provisional.pop(transfer_id, None) is not None:
            self.fleet.end(transfer_id)

    def _take(self, entry_id: bytes, fields: Mapping[bytes, bytes]) -> None:
        match fields[b"kind"]:
            case b"change":
                self._change(decode_change(entry_id, fields))
            case b"beat":
                self._beat(fields)
            case b"blocks":
                self._blocks(fields)
            case b"open":
                self._open(decode_transfer(fields[b"transfer"]))
            case b"table":
                self._table(fields[b"transfer"].decode())
            case b"update":
                self.updates.put(decode_update(fields[b"update"]))
            case b"no-update":
                self.updates.drop(fields[b"update"].decode())
            case b"end":
                self._end(fields[b"transfer"].decode(), fields.get(b"reason", b""))
            case b"spared":
                lease_guard.say(int(fields[b"leases"]))
            case other:
                raise LogBroken(f"unknown record {other!r}")

    def _change(self, change: Change) -> None:
        if change.instance.state is InstanceState.GONE:
            self.fleet.remove(change.instance.instance_id)
        else:
            self.fleet.put(change.instance)
            change = replace(change, instance=self.completed(change.instance))
        self.feed.append(change)

    def _beat(self, fields: Mapping[bytes, bytes]) -> None:
        instance = self.fleet.get(fields[b"instance"].decode())
        if instance is None:
            raise LogBroken("a heartbeat of an unknown instance")
        load = decode_load(fields[b"load"])
        self.fleet.put(
            replace(
                instance,
                heartbeat_at=finite(fields[b"heartbeat_at"]),
                load=load or instance.load,
                started=0 if load else instance.started,
            )
        )

    def _blocks(self, fields: Mapping[bytes, bytes]) -> None:
        if b"come" not in fields:
            return  # a record of an older version, with longer hashes
        self.fleet.publish(
            fields[b"instance"].decode(),
            hashes(fields[b"come"]),
            hashes(fields[b"go"]),
            reset=fields[b"anew"] == b"1",
        )

    def _open(self, transfer: Transfer) -> None:
        provisional = self._provisional.pop(transfer.transfer_id, None)
        if provisional is not None and provisional != transfer:
            self.fleet.end(transfer.transfer_id)  # another pair was reserved before
        self.fleet.open(transfer)

    def _table(self, transfer_id: str) -> None:
        self.tables.add(transfer_id)
        self.arrivals.announce(transfer_id)

    def _end(self, transfer_id: str, reason: bytes) -> None:
        self._provisional.pop(transfer_id, None)
        self.fleet.end(transfer_id, released=reason == b"released")
        self.tables.discard(transfer_id)
        self.arrivals.announce(transfer_id)

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
