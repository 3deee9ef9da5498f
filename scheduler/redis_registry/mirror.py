"""The fleet as the log in Redis tells it, in the memory of one replica."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from kvxfer.instances import Change, InstanceState
from kvxfer.scheduler.arrivals import Arrivals
from kvxfer.scheduler.feed import ChangeFeed
from kvxfer.scheduler.fleet import Fleet
from kvxfer.scheduler.redis_registry.records import (
    decode_change,
    decode_load,
    decode_transfer,
    id_of,
)
from kvxfer.scheduler.scoring import Scorer
from kvxfer.transfers import Transfer


class LogBroken(Exception):
    """The next record does not follow the last one: records are missing, or Redis began anew."""


class Mirror:
    """Belongs to one event loop. Empty until the first `replace`."""

    def __init__(self, *, feed_capacity: int, scorer: Scorer | None = None) -> None:
        self._scorer = scorer
        self.fleet = self.empty_fleet()
        self.feed = ChangeFeed(last_id=0, capacity=feed_capacity)
        self.tables: set[str] = set()
        """The transfers that have a block table, which itself is in Redis alone."""
        self.arrivals = Arrivals()
        self.loaded = False
        self.position = 0
        # Opened here before Redis has said so, so that the next choice already counts them.
        self._provisional: set[str] = set()
        self._news = asyncio.Event()

    def empty_fleet(self) -> Fleet:
        """One to fill and give to `replace`."""
        return Fleet(self._scorer)

    def replace(
        self,
        fleet: Fleet,
        position: int,
        floor: int,
        changes: Sequence[Change],
        tables: Iterable[str] = (),
    ) -> None:
        """Holds `fleet` from now on, which is that of the log's record `position`."""
        self.fleet, self.position, self.loaded = fleet, position, True
        self.tables = set(tables)
        self.arrivals.announce_all()
        self._provisional.clear()
        self.feed.reload(floor, changes)
        self._wake()

    def apply(self, entry_id: bytes, fields: Mapping[bytes, bytes]) -> None:
        """Takes the step of one record. Raises LogBroken."""
        if int(fields[b"after"]) != self.position:
            raise LogBroken
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
            case b"end":
                self._end(fields[b"transfer"].decode())
            case other:
                raise LogBroken(f"unknown record {other!r}")
        self.position = id_of(entry_id)
        self._wake()

    async def reach(self, position: int) -> None:
        """Returns once the record `position` was applied."""
        while self.position < position:
            await self._news.wait()

    def open(self, transfer: Transfer) -> None:
        """Counts a transfer that is about to be reserved."""
        self._provisional.add(transfer.transfer_id)
        self.fleet.open(transfer)

    def transfers(self) -> tuple[Transfer, ...]:
        """Every open transfer, the oldest first, without those that Redis has not taken yet."""
        return tuple(t for t in self.fleet.transfers() if t.transfer_id not in self._provisional)

    def undo(self, transfer_id: str) -> None:
        """The transfer was not reserved, as far as is known here."""
        if transfer_id in self._provisional:
            self._provisional.remove(transfer_id)
            self.fleet.end(transfer_id)

    def _change(self, change: Change) -> None:
        if change.instance.state is InstanceState.GONE:
            self.fleet.remove(change.instance.instance_id)
        else:
            self.fleet.put(change.instance)
        self.feed.append(change)

    def _beat(self, fields: Mapping[bytes, bytes]) -> None:
        instance = self.fleet.get(fields[b"instance"].decode())
        if instance is None:
            raise LogBroken("a heartbeat of an instance that is not there")
        self.fleet.put(
            replace(
                instance,
                heartbeat_at=float(fields[b"heartbeat_at"]),
                load=decode_load(fields[b"load"]) or instance.load,
            )
        )

    def _blocks(self, fields: Mapping[bytes, bytes]) -> None:
        self.fleet.publish(
            fields[b"instance"].decode(),
            fields[b"added"],
            fields[b"removed"],
            reset=fields[b"reset"] == b"1",
        )

    def _open(self, transfer: Transfer) -> None:
        self._provisional.discard(transfer.transfer_id)
        self.fleet.open(transfer)

    def _table(self, transfer_id: str) -> None:
        self.tables.add(transfer_id)
        self.arrivals.announce(transfer_id)

    def _end(self, transfer_id: str) -> None:
        self.fleet.end(transfer_id)
        self.tables.discard(transfer_id)
        self.arrivals.announce(transfer_id)

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
