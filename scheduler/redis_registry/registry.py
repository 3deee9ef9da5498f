"""The registry in Redis: writes are scripts there, reads are answered from the mirror here."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Final

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.errors import ControlPlaneUnavailable, KvxferError
from kvxfer.instances import (
    BlockUpdate,
    Change,
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
from kvxfer.scheduler import refusals
from kvxfer.scheduler.ending import end
from kvxfer.scheduler.keyspace import Keyspace
from kvxfer.scheduler.lease_policy import LeasePolicy
from kvxfer.scheduler.pairing import Pair
from kvxfer.scheduler.redis_registry.answers import accepted, lease
from kvxfer.scheduler.redis_registry.follower import Follower
from kvxfer.scheduler.redis_registry.link import Link
from kvxfer.scheduler.redis_registry.mirror import Mirror
from kvxfer.scheduler.redis_registry.records import (
    decode_instance,
    decode_secret,
    decode_sent,
    decode_table,
    decode_transfer,
    decode_update,
    encode_load,
    encode_sent,
    encode_spec,
    encode_table,
    encode_transfer,
    encode_update,
    reading,
)
from kvxfer.scheduler.redis_registry.scripts import Step
from kvxfer.scheduler.redis_registry.url import RedisUrl
from kvxfer.scheduler.registry import Registry, Statistics, TransferEnd
from kvxfer.scheduler.room import Room
from kvxfer.scheduler.scoring import Scorer
from kvxfer.scheduler.weight_updates import (
    UpdateStep,
    announced,
    decided,
    lapsed,
    reported,
)
from kvxfer.transfers import Transfer, TransferRequest
from kvxfer.weight_updates import (
    MAX_ENDED_UPDATES,
    AnnounceUpdate,
    Decision,
    ReportUpdate,
    UpdateState,
    WeightUpdate,
)

_FEED_CAPACITY: Final = 10_000
_WATCH_BATCH: Final = 100
_KEYSPACE: Final = Keyspace()
_TIMEOUT: Final = 1.0
# Attempts at a step of a weight update when another replica is faster.
_ATTEMPTS: Final = 8


class RedisRegistry(Registry):
    """The registry in Redis, in one event loop; `open` it first. `url` is as in RedisUrl.

    A read first asks Redis for the end of the log and waits until the mirror is there too, so it
    sees whatever any replica did before. `choose`, `find` and `opened` do not wait: `reserve`
    decides in Redis.

    While Redis is unavailable, or the mirror is behind, reads are answered from the mirror as it is
    (`stale_seconds`). Steps need Redis alone: while it is unavailable they raise
    ControlPlaneUnavailable, the first one after `timeout` seconds. Leases end by the clock of
    Redis, and waits here end by that of this machine; `clock` takes the place of both in tests.
    """

    def __init__(
        self,
        url: str,
        policy: LeasePolicy | None = None,
        *,
        clock: Clock | None = None,
        feed_capacity: int = _FEED_CAPACITY,
        keyspace: Keyspace = _KEYSPACE,
        timeout: float = _TIMEOUT,
        scorer: Scorer | None = None,
    ) -> None:
        self._policy = policy or LeasePolicy()
        self._clock = clock
        self._lengths = (str(keyspace.registry_log_bytes), str(feed_capacity))
        self._link = Link(
            RedisUrl.parse(url),
            prefix=keyspace.registry_prefix,
            header=self._header,
            timeout=timeout,
            clock=clock or SYSTEM_CLOCK,
        )
        self.room = Room()
        self._mirror = Mirror(feed_capacity=feed_capacity, scorer=scorer, room=self.room)
        self._follower = Follower(self._link, self._mirror)
        self._counts: dict[bytes, bytes] = {}
        self._name = secrets.token_hex(8)
        self._abandoned: set[str] = set()
        self._releasing: asyncio.Task[None] | None = None
        self._sent: dict[str, tuple[Traffic, ...]] = {}

    async def open(self) -> None:
        self._link.check()
        self._follower.start()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._link.timeout):
                await self._mirror.reach(1)

    @property
    def stale_seconds(self) -> float | None:
        if self._link.trouble is None and self._follower.trouble is None:
            return None
        return self._follower.behind_seconds

    # --- instances ---------------------------------------------------------------------------

    async def register(
        self,
        spec: InstanceSpec,
        *,
        state: InstanceState = InstanceState.JOINING,
        incarnation: str = "",
        secret: str = "",
    ) -> Lease:
        answer = await self._take(
            "register",
            spec.instance_id,
            state.value,
            incarnation,
            str(spec.num_blocks),
            spec.http_address,
            spec.role.value,
            encode_spec(spec),
            spec.labels.get("zone", ""),
            secret,
        )
        return lease(spec.instance_id, self._policy, answer)

    async def heartbeat(
        self,
        instance_id: str,
        epoch: int,
        *,
        state: InstanceState | None = None,
        load: Load | None = None,
        secret: str | None = None,
    ) -> Lease:
        answer = await self._take(
            "heartbeat",
            instance_id,
            str(epoch),
            "" if state is None else state.value,
            encode_load(load),
            encode_sent(load),
            _shown(secret),
        )
        return lease(instance_id, self._policy, answer)

    async def publish_blocks(
        self, instance_id: str, epoch: int, update: BlockUpdate, *, secret: str | None = None
    ) -> PublishedBlocks:
        answer = await self._take(
            "blocks",
            instance_id,
            str(epoch),
            "1" if update.reset else "",
            pack(update.added),
            pack(update.removed),
            str(MAX_HASHES_PER_INSTANCE),
            _shown(secret),
        )
        with reading(f"what instance {instance_id!r} has cached"):
            (held,) = map(int, answer)
        return PublishedBlocks(held=held, capacity=MAX_HASHES_PER_INSTANCE)

    async def deregister(self, instance_id: str, epoch: int, *, secret: str | None = None) -> None:
        await self._take("deregister", instance_id, str(epoch), _shown(secret))

    async def drain(
        self, instance_id: str, *, seconds: float, secret: str | None = None
    ) -> Instance:
        answer = await self._take("drain", instance_id, _micros(seconds), _shown(secret))
        return self._mirror.completed(_instance(instance_id, answer))

    async def undrain(self, instance_id: str) -> Instance:
        answer = await self._take("undrain", instance_id)
        return self._mirror.completed(_instance(instance_id, answer))

    async def change_role(self, instance_id: str, role: Role) -> Instance:
        answer = await self._take("change_role", instance_id, role.value)
        return self._mirror.completed(_instance(instance_id, answer))

    async def require_secret(self, instance_id: str, secret: str) -> None:
        self._require_redis()
        packed = await self._link.field(f"{self._link.prefix}:instances", instance_id)
        if packed is None:
            raise refusals.unknown_instance(instance_id)
        with reading(f"instance {instance_id!r}"):
            held = decode_secret(packed)
        if held and not hmac.compare_digest(held, secret):
            raise refusals.wrong_secret(instance_id, secret)

    async def instance(self, instance_id: str) -> Instance:
        await self._catch_up()
        instance = self._mirror.instance(instance_id)
        if instance is None:
            raise refusals.unknown_instance(instance_id)
        return instance

    async def instances(self) -> tuple[Instance, ...]:
        await self._catch_up()
        return self._mirror.instances()

    async def sent(self) -> Mapping[str, tuple[Traffic, ...]]:
        with suppress(ControlPlaneUnavailable):
            found = {}
            async for name, packed in self._link.fields(f"{self._link.prefix}:sent"):
                with reading(f"what instance {name!r} sends"):
                    found[name.decode()] = decode_sent(packed)
            self._sent = found
        return self._sent

    async def watch(self, after: int | None = None) -> AsyncIterator[Snapshot | Change]:
        feed = self._mirror.feed
        while not feed.closed:
            if after is None or not feed.covers(after):
                # Another replica may have sent the reader a change that is not here yet.
                await self._catch_up()
                if after is None or not feed.covers(after):
                    after = feed.last_id
                    yield Snapshot(id=after, instances=self._mirror.instances())
                    continue
            for change in feed.after(after, limit=_WATCH_BATCH):
                after = change.id
                yield change
            await feed.wait(after)

    # --- transfers ---------------------------------------------------------------------------

    async def choose(self, request: TransferRequest) -> Pair:
        self._require_redis()
        pair = self._mirror.fleet.find(request) if self._mirror.loaded else None
        if pair is not None:
            return pair
        await self._catch_up()
        self._require_redis()
        return self._mirror.fleet.choose(request)

    def find(self, request: TransferRequest) -> Pair | None:
        self._require_redis()
        return self._mirror.fleet.find(request)

    async def opened(self, transfer_id: str) -> Transfer | None:
        return self._mirror.opened(transfer_id)

    async def reserve(
        self, transfer: Transfer, *, seconds: float, prefix_hashes: tuple[int, ...] = ()
    ) -> Transfer:
        self._require_redis()
        transfer_id, packed = transfer.transfer_id, encode_transfer(transfer)
        self._abandoned.discard(transfer_id)
        self._mirror.open(transfer)
        try:
            there = await self._take("reserve", packed, _micros(seconds), self._name)
            if not there:
                self._mirror.fleet.sent(transfer, prefix_hashes)
                return transfer
            with reading(f"transfer {transfer_id!r}"):
                (packed,) = there
                opened = decode_transfer(packed)
            if opened != transfer:
                self._mirror.undo(transfer_id)
            return opened
        except KvxferError as refused:
            self._mirror.undo(transfer_id)
            if isinstance(refused, ControlPlaneUnavailable):
                self._abandon(transfer_id)
            else:
                await self._catch_up()  # the next choice then knows what stood in the way
            raise
        except BaseException:
            self._mirror.undo(transfer_id)
            self._abandon(transfer_id)
            raise

    def _abandon(self, transfer_id: str) -> None:
        """Schedules the release of a transfer that may be reserved although its call failed."""
        self._abandoned.add(transfer_id)
        if self._releasing is None and not self._mirror.feed.closed:
            self._releasing = asyncio.create_task(self._release_abandoned())

    async def _release_abandoned(self) -> None:
        """Gives back what unanswered calls may have reserved, once Redis is available."""
        try:
            while self._abandoned:
                await self._link.available()
                for transfer_id in tuple(self._abandoned):
                    with suppress(ControlPlaneUnavailable):
                        await self._take("abandon", transfer_id, self._name)
                    if self._link.trouble is not None:
                        break
                    self._abandoned.discard(transfer_id)
        finally:
            self._releasing = None

    async def transfer(self, transfer_id: str) -> Transfer:
        await self._catch_up()
        transfer = self._mirror.fleet.transfer(transfer_id)
        if transfer is None:
            raise refusals.unknown_transfer(transfer_id)
        return transfer

    async def transfers(self) -> tuple[Transfer, ...]:
        await self._catch_up()
        return self._mirror.transfers()

    async def release(self, transfer_id: str) -> None:
        await self._take("release", transfer_id)

    async def put_block_table(self, transfer_id: str, table: BlockTable) -> None:
        await self._take("block_table", transfer_id, encode_table(table))

    async def block_table(self, transfer_id: str, *, wait_seconds: float = 0.0) -> BlockTable:
        clock = self._link.clock
        give_up = clock.monotonic() + wait_seconds
        await self._catch_up()
        while True:
            self._require_current()
            if self._mirror.fleet.transfer(transfer_id) is None:
                raise refusals.unknown_transfer(transfer_id)
            left = give_up - clock.monotonic()
            if transfer_id in self._mirror.tables:
                packed = await self._link.field(f"{self._link.prefix}:tables", transfer_id)
                if packed is not None:
                    with reading(f"the block table of transfer {transfer_id!r}"):
                        return decode_table(packed)
                await self._catch_up()  # the transfer has ended meanwhile
            elif left > 0:
                await self._mirror.arrivals.wait(transfer_id, left)
            if left <= 0:
                raise refusals.unknown_block_table(transfer_id)

    # --- weight updates ----------------------------------------------------------------------

    async def announce_update(self, request: AnnounceUpdate, *, seconds: float) -> UpdateStep:
        for _ in range(_ATTEMPTS):
            await self._catch_up()
            self._require_current()
            step = announced(
                request,
                self._mirror.fleet.snapshot(),
                self._mirror.updates,
                now=self._link.clock.unix(),
                seconds=seconds,
            )
            if step.before is not None or await self._take_update(b"", step.after):
                return step
        raise refusals.update_contended(request.update_id or "of " + request.model)

    async def report_update(self, update_id: str, report: ReportUpdate) -> UpdateStep:
        return await self._step_update(
            update_id, lambda update: reported(update, report, now=self._link.clock.unix())
        )

    async def decide_update(self, update_id: str, decision: Decision) -> UpdateStep:
        return await self._step_update(
            update_id, lambda update: decided(update, decision, now=self._link.clock.unix())
        )

    async def update(self, update_id: str) -> WeightUpdate:
        await self._catch_up()
        update = self._mirror.updates.get(update_id)
        if update is None:
            raise refusals.unknown_update(update_id)
        return update

    async def updates(self, model: str | None = None) -> tuple[WeightUpdate, ...]:
        await self._catch_up()
        return self._mirror.updates.all(model)

    async def _step_update(
        self, update_id: str, step: Callable[[WeightUpdate], WeightUpdate]
    ) -> UpdateStep:
        for _ in range(_ATTEMPTS):
            self._require_redis()
            packed = await self._link.field(f"{self._link.prefix}:updates", update_id)
            if packed is None:
                raise refusals.unknown_update(update_id)
            with reading(f"weight update {update_id!r}"):
                before = decode_update(packed)
            after = step(before)
            # A decision that was made before renews no lease.
            if after is before or await self._take_update(packed, after):
                return UpdateStep(before, after)
        raise refusals.update_contended(update_id)

    async def _take_update(self, was: bytes, update: WeightUpdate) -> bool:
        """Writes the update if it still is as it was read. Returns whether it was."""
        seconds, at = update.lease_seconds, self._link.clock.unix() + update.lease_seconds
        answer = await self._take(
            "weight_update",
            was,
            encode_update(update),
            encode_update(lapsed(update, at=at)) if update.under_way else b"",
            _micros(seconds),
            str(MAX_ENDED_UPDATES),
        )
        return answer == [b"taken"]

    # --- the registry itself -----------------------------------------------------------------

    async def sweep(self) -> None:
        await self._swept()

    async def statistics(self) -> Statistics:
        await self._catch_up()
        with suppress(ControlPlaneUnavailable):
            self._counts = await self._link.hash(f"{self._link.prefix}:counts")

        with reading("what has happened since the registry began"):
            counts = Counter({name.decode(): int(n) for name, n in self._counts.items()})

        return Statistics(
            instances=self._mirror.fleet.census(),
            open_transfers=self._mirror.open_transfers,
            registrations=counts["registrations"],
            leases_expired=counts["leases_expired"],
            leases_spared=counts["leases_spared"],
            transfers_opened=counts["transfers_opened"],
            transfers_ended=Counter({end: n for end in TransferEnd if (n := counts[end.value])}),
            updates_ended=Counter(
                {end: n for end in UpdateState if (n := counts[f"updates_{end.value}"])}
            ),
        )

    async def ping(self) -> None:
        await self._catch_up()

    async def close(self) -> None:
        self._mirror.feed.close()
        self._mirror.arrivals.announce_all()
        if self._releasing is not None:
            await end(self._releasing)
        await self._follower.stop()
        await self._link.close()

    # --- between here and Redis --------------------------------------------------------------

    def _header(self) -> tuple[str, ...]:
        now = "" if self._clock is None else _micros(self._clock.unix())
        return (now, *self._lengths, _micros(self._policy.lease_seconds))

    async def _take(self, step: Step, *arguments: str | bytes) -> list[bytes]:
        """Takes a step in Redis. Raises its refusal."""
        if self._mirror.feed.closed:
            raise refusals.stopping()
        answer = await self._link.take(step, *arguments)
        return accepted(step, answer, arguments)

    async def _swept(self) -> int:
        """Ends all that has expired, in as many short steps as it takes.

        Returns the log's last record.
        """
        while True:
            with reading("the place in the log"):
                last, more = await self._take("sweep")
                position = int(last)
            if not more:
                return position

    async def _catch_up(self) -> None:
        """Waits until the mirror has all earlier steps, unless it is known to be behind."""
        try:
            last = await self._swept()
            if self._follower.trouble is None:
                async with asyncio.timeout(self._link.timeout):
                    await self._mirror.reach(last)
        except TimeoutError:
            self._follower.late()
        except ControlPlaneUnavailable:
            if self._mirror.feed.closed:
                raise
        if not self._mirror.loaded:
            raise self._link.unavailable(self._link.trouble or self._follower.trouble)

    def _require_redis(self) -> None:
        if self._mirror.feed.closed:
            raise refusals.stopping()
        self._link.require()

    def _require_current(self) -> None:
        """Raises ControlPlaneUnavailable if the mirror was behind at the last `_catch_up`."""
        self._require_redis()
        if self._follower.trouble is not None:
            raise self._link.unavailable(self._follower.trouble)


def _instance(instance_id: str, answer: list[bytes]) -> Instance:
    with reading(f"instance {instance_id!r}"):
        member, spec = answer
        return decode_instance(instance_id.encode(), member, spec)


def _shown(secret: str | None) -> str:
    """Returns a secret as the scripts take it; `-` asks for no secret."""
    return "-" if secret is None else secret


def _micros(seconds: float) -> str:
    return str(round(seconds * 1e6))
