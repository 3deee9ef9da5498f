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
    """The reasons why a transfer is no longer open."""

    RELEASED = "released"
    EXPIRED = "expired"
    INSTANCE_GONE = "instance-gone"


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts over the whole registry: its present content, and events since it began."""

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

    Each step is atomic. An instance whose lease has expired is gone for every later call, and so
    are its transfers; if many expire at once, watchers hear of them one after the other. Time in
    which no step was taken does not count against a lease. If most of a fleet or a zone would be
    gone shortly after such a time, leases are extended once by one lease (lease_guard.py).

    `secret` is the SHA-256 of what a caller shows as an instance's secret, "" for nothing. An
    instance that registered without a secret accepts any. None skips the check: the caller is no
    worker.

    If the registry cannot be reached, calls that change something raise ControlPlaneUnavailable.
    Calls that read are answered from the last known state, if any; `stale_seconds` is its age.
    """

    room: Room
    """The news of instances that can take more than before."""

    @abstractmethod
    async def open(self) -> None:
        """Starts the registry's tasks. Returns even if the registry cannot be reached yet."""

    @property
    @abstractmethod
    def stale_seconds(self) -> float | None:
        """The age of what is read, in seconds; None if it is current."""

    @abstractmethod
    async def register(
        self,
        spec: InstanceSpec,
        *,
        state: InstanceState = InstanceState.JOINING,
        incarnation: str = "",
        secret: str = "",
    ) -> Lease:
        """Begins a lease with a new epoch, greater than all earlier ones of this id.

        `incarnation` names the process that asks. A process that still holds the id itself (it did
        not see the answer to its registration) gets a new epoch; any other raises InstanceExists.
        `secret` replaces the one before.
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
        """Renews the lease. Ignores a state that lies behind the current one. None keeps the state
        or the load.

        Raises StaleEpoch if the id has no lease under this epoch, and Forbidden for another secret.
        """

    @abstractmethod
    async def publish_blocks(
        self, instance_id: str, epoch: int, update: BlockUpdate, *, secret: str | None = None
    ) -> PublishedBlocks:
        """Records the KV blocks that an instance has cached, until its registration ends.

        The call may be repeated, and renews no lease. Raises StaleEpoch or Forbidden.
        """

    @abstractmethod
    async def deregister(self, instance_id: str, epoch: int, *, secret: str | None = None) -> None:
        """Ends the lease. Raises UnknownInstance, StaleEpoch if a later epoch lives, or
        Forbidden."""

    @abstractmethod
    async def drain(
        self, instance_id: str, *, seconds: float, secret: str | None = None
    ) -> Instance:
        """Lets an instance finish its work for at most `seconds`, and gives it no new work.

        Its next lease says so; heartbeats renew the lease as before. A repeated drain sets a new
        deadline. Raises UnknownInstance or Forbidden.
        """

    @abstractmethod
    async def undrain(self, instance_id: str) -> Instance:
        """Cancels a drain. The instance is joining until its worker's next heartbeat reports that
        it is ready. An instance that does not drain stays as it is.

        Raises UnknownInstance, and InstanceLeaving if its worker has reported that it leaves.
        """

    @abstractmethod
    async def change_role(self, instance_id: str, role: Role) -> Instance:
        """Gives an instance another role. New transfers see it at once, the worker in its next
        lease; open transfers stay as they are. Raises UnknownInstance."""

    @abstractmethod
    async def require_secret(self, instance_id: str, secret: str) -> None:
        """Raises Forbidden for another secret than the instance's, or UnknownInstance."""

    @abstractmethod
    async def instance(self, instance_id: str) -> Instance:
        """Returns the live instance. Raises UnknownInstance."""

    @abstractmethod
    async def sent(self) -> Mapping[str, tuple[Traffic, ...]]:
        """Returns the latest `Load.sent` of each instance that sends KV cache. Instances and
        changes leave it out. The result may be a moment old."""

    @abstractmethod
    async def instances(self) -> tuple[Instance, ...]:
        """Returns every live instance, ordered by id."""

    @abstractmethod
    def watch(self, after: int | None = None) -> AsyncIterator[Snapshot | Change]:
        """Yields the changes after change `after`, until the registry closes.

        Begins with a Snapshot if `after` is None or too old. A Snapshot also comes in between if
        the reader was too slow. No change is left out or comes twice.
        """

    @abstractmethod
    async def choose(self, request: TransferRequest) -> Pair:
        """Returns the pair that PairIndex.choose gives; `reserve` has the last word.

        The data that it looks at may be a moment old. Raises NoCapacity or PromptTooLong only after
        a look at current data.
        """

    @abstractmethod
    def find(self, request: TransferRequest) -> Pair | None:
        """Finds as `choose` does in what is known here; returns None if that has no room."""

    @abstractmethod
    async def opened(self, transfer_id: str) -> Transfer | None:
        """Returns the open transfer of this id, as `choose` sees it, if there is one."""

    @abstractmethod
    async def reserve(
        self, transfer: Transfer, *, seconds: float, prefix_hashes: tuple[int, ...] = ()
    ) -> Transfer:
        """Counts a transfer against both of its instances for at most `seconds`. Its prompt, which
        has these hashes, is on its way to them: `find` and `choose` take it for cached there.

        Returns the transfer; if one of this id is open already, returns that and counts nothing.

        Raises StaleEpoch if an instance no longer lives under its epoch, and NoCapacity if one is
        not ready or its blocks are reserved by others.
        """

    @abstractmethod
    async def transfer(self, transfer_id: str) -> Transfer:
        """Returns the open transfer. Raises UnknownTransfer."""

    @abstractmethod
    async def transfers(self) -> tuple[Transfer, ...]:
        """Returns every open transfer, the oldest first."""

    @abstractmethod
    async def release(self, transfer_id: str) -> None:
        """Ends a transfer and gives back what it reserved. Raises UnknownTransfer."""

    @abstractmethod
    async def put_block_table(self, transfer_id: str, table: BlockTable) -> None:
        """Keeps decode's block table while the transfer is open. A repeated call changes nothing.

        Raises UnknownTransfer, and BlockTableExists if there is another one.
        """

    @abstractmethod
    async def block_table(self, transfer_id: str, *, wait_seconds: float = 0.0) -> BlockTable:
        """Waits for the block table of an open transfer and returns it.

        Raises UnknownTransfer, also as soon as the transfer ends, UnknownBlockTable after the wait,
        and ControlPlaneUnavailable if the registry cannot be reached: the last known state has no
        block tables.
        """

    @abstractmethod
    async def announce_update(self, request: AnnounceUpdate, *, seconds: float) -> UpdateStep:
        """Begins a weight update under a lease of `seconds`, which each report renews.

        When the lease ends, so does the update: as aborted if nothing is decided. Raises the errors
        of `weight_updates.announced`.
        """

    @abstractmethod
    async def report_update(self, update_id: str, report: ReportUpdate) -> UpdateStep:
        """Records a report of the coordinator, and renews the lease of an update under way.

        Raises UnknownWeightUpdate, and the errors of `weight_updates.reported`.
        """

    @abstractmethod
    async def decide_update(self, update_id: str, decision: Decision) -> UpdateStep:
        """Decides about an update. The first decision holds, and is returned.

        Raises UnknownWeightUpdate.
        """

    @abstractmethod
    async def update(self, update_id: str) -> WeightUpdate:
        """Returns the update. Raises UnknownWeightUpdate."""

    @abstractmethod
    async def updates(self, model: str | None = None) -> tuple[WeightUpdate, ...]:
        """Returns the updates under way and the last ones that ended, the newest first."""

    @abstractmethod
    async def sweep(self) -> None:
        """Ends what has expired, so that watchers hear of it without other calls."""

    @abstractmethod
    async def statistics(self) -> Statistics: ...

    @abstractmethod
    async def ping(self) -> None:
        """Raises ControlPlaneUnavailable if the registry cannot serve."""

    @abstractmethod
    async def close(self) -> None:
        """Ends all watches and releases what the registry holds."""
