"""The registry: the one place that knows which instances live and which transfers are open.

Every implementation passes the same conformance suite (tests/scheduler/test_registry.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

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
from kvxfer.scheduler.pairing import Pair
from kvxfer.scheduler.room import Room
from kvxfer.scheduler.weight_updates import UpdateStep
from kvxfer.transfers import Transfer, TransferRequest
from kvxfer.weight_updates import (
    AnnounceUpdate,
    Decision,
    ReportUpdate,
    UpdateState,
    WeightUpdate,
)


class TransferEnd(StrEnum):
    """Why a transfer is no longer open."""

    RELEASED = "released"
    EXPIRED = "expired"
    INSTANCE_GONE = "instance-gone"


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts over the whole registry: of what is there now, and of events since it began."""

    instances: Mapping[tuple[Role, InstanceState], int]
    open_transfers: int
    registrations: int
    leases_expired: int
    leases_spared: int
    transfers_opened: int
    transfers_ended: Mapping[TransferEnd, int]
    updates_ended: Mapping[UpdateState, int]


class Registry(ABC):
    """Instances under leases, and the transfers that are reserved on them.

    Each step is atomic. An instance whose lease has run out is gone for every call that follows,
    and so are its transfers; where many run out at once, watchers hear of them one after the other.
    Time in which no step was taken does not count against a lease. Where most of a fleet or a zone
    would be gone shortly after such a time, leases are extended once by one lease (lease_guard.py).

    `secret` is the SHA-256 of what a caller shows as an instance's secret, "" for nothing; an
    instance that registered without one takes any. None asks for no secret: the caller is no
    worker.

    Where the registry cannot be reached, what changes something raises ControlPlaneUnavailable, and
    what reads is answered from what was last known, if anything was: `stale_seconds` says so.
    """

    room: Room
    """Tells when an instance can take more than before."""

    @abstractmethod
    async def open(self) -> None:
        """Starts what the registry does by itself. Returns also where it cannot be reached yet."""

    @property
    @abstractmethod
    def stale_seconds(self) -> float | None:
        """None where reads are current, else the seconds since they were."""

    @abstractmethod
    async def register(
        self,
        spec: InstanceSpec,
        *,
        state: InstanceState = InstanceState.JOINING,
        incarnation: str = "",
        secret: str = "",
    ) -> Lease:
        """Begins a lease with a new epoch, greater than every one before under this id.

        `incarnation` names the process that asks. A process that still holds the id itself (it did
        not see the answer to its registration) gets a new epoch; any other raises InstanceExists.
        `secret` takes the place of the one before.
        """

    @abstractmethod
    async def heartbeat(
        self,
        instance_id: str,
        epoch: int,
        *,
        state: InstanceState | None = None,
        load: Load | None = None,
        secret: str | None = None,
    ) -> Lease:
        """Renews the lease. A state that lies behind the current one is ignored; None keeps both.

        Raises StaleEpoch where the id does not live under this epoch, and Forbidden for another
        secret.
        """

    @abstractmethod
    async def publish_blocks(
        self, instance_id: str, epoch: int, update: BlockUpdate, *, secret: str | None = None
    ) -> PublishedBlocks:
        """Takes note of KV blocks that an instance has cached; they go with its registration.

        It may be repeated. It renews no lease. Raises StaleEpoch or Forbidden.
        """

    @abstractmethod
    async def deregister(self, instance_id: str, epoch: int, *, secret: str | None = None) -> None:
        """Ends the lease. Raises UnknownInstance, StaleEpoch where a later epoch lives, or
        Forbidden."""

    @abstractmethod
    async def drain(
        self, instance_id: str, *, seconds: float, secret: str | None = None
    ) -> Instance:
        """Lets an instance finish what it has for at most `seconds`, and get nothing new.

        Its next lease says so, and renews as before. Again on a draining instance it sets the
        deadline anew. Raises UnknownInstance or Forbidden.
        """

    @abstractmethod
    async def undrain(self, instance_id: str) -> Instance:
        """Takes a drain back: the instance is joining until its worker says with its next heartbeat
        that it is ready. An instance that does not drain stays as it is.

        Raises UnknownInstance, and InstanceLeaving where its worker has said that it leaves.
        """

    @abstractmethod
    async def change_role(self, instance_id: str, role: Role) -> Instance:
        """Gives an instance another role: new transfers see it at once, the worker in its next
        lease; open transfers stay as they are. Raises UnknownInstance.
        """

    @abstractmethod
    async def require_secret(self, instance_id: str, secret: str) -> None:
        """Raises Forbidden for another secret than the instance's, or UnknownInstance."""

    @abstractmethod
    async def instance(self, instance_id: str) -> Instance:
        """The live instance. Raises UnknownInstance."""

    @abstractmethod
    async def sent(self) -> Mapping[str, tuple[Traffic, ...]]:
        """What each instance that sends KV cache said of it last: `Load.sent`, which is left out
        of instances and changes. What is read may be a moment old."""

    @abstractmethod
    async def instances(self) -> tuple[Instance, ...]:
        """Every live instance, ordered by id."""

    @abstractmethod
    def watch(self, after: int | None = None) -> AsyncIterator[Snapshot | Change]:
        """The changes after change `after`, without end until the registry closes.

        Begins with a Snapshot where `after` is None or too old to go on from; one also comes in
        between when the reader was too slow. No change is left out or comes twice.
        """

    @abstractmethod
    async def choose(self, request: TransferRequest) -> Pair:
        """The pair that suits the request best, as PairIndex.choose; `reserve` has the last word.

        What it looks at may be a moment old. Raises NoCapacity or PromptTooLong, which are not.
        """

    @abstractmethod
    def find(self, request: TransferRequest) -> Pair | None:
        """As `choose` from what is known here, with None where that has no room."""

    @abstractmethod
    async def opened(self, transfer_id: str) -> Transfer | None:
        """The open transfer of this id, as `choose` sees it, if there is one."""

    @abstractmethod
    async def reserve(
        self, transfer: Transfer, *, seconds: float, prefix_hashes: tuple[int, ...] = ()
    ) -> Transfer:
        """Counts a transfer against both of its instances for at most `seconds`. Its prompt, which
        has these hashes, is on its way to them: `find` and `choose` take it for cached there.

        Returns it; where one of this id is open already, it returns that one and counts nothing.

        Raises StaleEpoch where one of them no longer lives under its epoch, and NoCapacity where
        one is not ready or its blocks are reserved by others.
        """

    @abstractmethod
    async def transfer(self, transfer_id: str) -> Transfer:
        """The open transfer. Raises UnknownTransfer."""

    @abstractmethod
    async def transfers(self) -> tuple[Transfer, ...]:
        """Every open transfer, the oldest first."""

    @abstractmethod
    async def release(self, transfer_id: str) -> None:
        """Ends a transfer and gives back what it reserved. Raises UnknownTransfer."""

    @abstractmethod
    async def put_block_table(self, transfer_id: str, table: BlockTable) -> None:
        """Keeps decode's block table as long as the transfer is open. The same again is no news.

        Raises UnknownTransfer, and BlockTableExists where there is another one.
        """

    @abstractmethod
    async def block_table(self, transfer_id: str, *, wait_seconds: float = 0.0) -> BlockTable:
        """The block table of an open transfer, for which it waits.

        Raises UnknownTransfer, also as soon as the transfer ends, UnknownBlockTable after the wait,
        and ControlPlaneUnavailable where the registry cannot be reached: it is no read that could
        be answered from what was last known.
        """

    @abstractmethod
    async def announce_update(self, request: AnnounceUpdate, *, seconds: float) -> UpdateStep:
        """Begins a weight update under a lease of so many seconds, which each report renews.

        Where the lease ends, so does the update: as aborted if nothing is decided. Raises what
        `weight_updates.announced` does.
        """

    @abstractmethod
    async def report_update(self, update_id: str, report: ReportUpdate) -> UpdateStep:
        """Takes a report of the coordinator, and renews the lease of an update under way.

        Raises UnknownWeightUpdate, and what `weight_updates.reported` does.
        """

    @abstractmethod
    async def decide_update(self, update_id: str, decision: Decision) -> UpdateStep:
        """Decides about an update: the first decision holds, and the answer has it.

        Raises UnknownWeightUpdate.
        """

    @abstractmethod
    async def update(self, update_id: str) -> WeightUpdate:
        """Raises UnknownWeightUpdate."""

    @abstractmethod
    async def updates(self, model: str | None = None) -> tuple[WeightUpdate, ...]:
        """The updates under way and the last ones that ended, the newest first."""

    @abstractmethod
    async def sweep(self) -> None:
        """Ends what has run out, so that watchers hear of it without other calls."""

    @abstractmethod
    async def statistics(self) -> Statistics: ...

    @abstractmethod
    async def ping(self) -> None:
        """Raises ControlPlaneUnavailable where the registry cannot serve."""

    @abstractmethod
    async def close(self) -> None:
        """Ends all watches and lets go of what the registry holds."""
