"""The instances and open transfers that a registry knows, kept consistent with each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from msgspec.structs import replace

from kvxfer.instances import Instance, InstanceState, Prefilling, Reserved, Role
from kvxfer.scheduler.pair_index import PairIndex
from kvxfer.scheduler.pairing import Pair
from kvxfer.scheduler.room import Room
from kvxfer.scheduler.scoring import Scorer
from kvxfer.transfers import Transfer, TransferRequest


class Fleet:
    """The instances and transfers, in one event loop. Reservations follow from the transfers."""

    def __init__(self, scorer: Scorer | None = None, room: Room | None = None) -> None:
        self._instances: dict[str, Instance] = {}
        self._transfers: dict[str, Transfer] = {}
        self._held: dict[str, set[str]] = {}
        self._index = PairIndex(scorer=scorer, room=room)

    def get(self, instance_id: str) -> Instance | None:
        return self._instances.get(instance_id)

    def transfer(self, transfer_id: str) -> Transfer | None:
        return self._transfers.get(transfer_id)

    def transfers(self) -> tuple[Transfer, ...]:
        """Returns every open transfer, the oldest first."""
        return tuple(sorted(self._transfers.values(), key=lambda t: t.created_at))

    @property
    def open_transfers(self) -> int:
        return len(self._transfers)

    def held_by(self, instance_id: str) -> Collection[str]:
        """Returns the ids of the open transfers of an instance."""
        return tuple(self._held[instance_id])

    def put(self, instance: Instance) -> None:
        """Adds a registration without transfers, or updates the record of a known one."""
        before = self._instances.get(instance.instance_id)
        if before is None or before.epoch != instance.epoch:
            self._held[instance.instance_id] = set()
            reserved, prefilling = Reserved(), Prefilling()
        else:
            reserved, prefilling = before.reserved, before.prefilling
        if (instance.reserved, instance.prefilling) != (reserved, prefilling):
            instance = replace(instance, reserved=reserved, prefilling=prefilling)
        self._instances[instance.instance_id] = instance
        self._index.put(instance)

    def remove(self, instance_id: str) -> Instance:
        """Removes an instance, whose transfers must have ended."""
        self._index.remove(instance_id)
        del self._held[instance_id]
        return self._instances.pop(instance_id)

    def publish(self, instance_id: str, added: bytes, removed: bytes, *, reset: bool) -> int:
        """Publishes as PrefixIndex.publish does. Raises KeyError for an unknown instance."""
        if instance_id not in self._instances:
            raise KeyError(instance_id)
        return self._index.publish(instance_id, added, removed, reset=reset)

    def open(self, transfer: Transfer) -> None:
        """Counts a transfer against its instances, unless it is already counted."""
        self._transfers[transfer.transfer_id] = transfer
        self._count(transfer, 1)

    def sent(self, transfer: Transfer, prefix_hashes: tuple[int, ...]) -> None:
        """Notes that the prompt is on its way, unless the transfer has ended already."""
        if transfer.transfer_id in self._transfers:
            self._index.sent(transfer, prefix_hashes)

    def end(self, transfer_id: str, *, released: bool = False) -> Transfer:
        """Gives back what a transfer reserved; a released one counts as started on decode."""
        transfer = self._transfers.pop(transfer_id)
        self._count(transfer, -1)
        self._index.ended(transfer_id)
        decode = self._instances.get(transfer.decode.instance_id)
        if released and decode is not None and decode.epoch == transfer.decode.epoch:
            self.put(replace(decode, started=decode.started + 1))
        return transfer

    def snapshot(self) -> tuple[Instance, ...]:
        """Returns every instance, ordered by id."""
        return tuple(self._instances[instance_id] for instance_id in sorted(self._instances))

    def census(self) -> Counter[tuple[Role, InstanceState]]:
        return Counter((i.role, i.state) for i in self._instances.values())

    def choose(self, request: TransferRequest) -> Pair:
        """Chooses as PairIndex.choose does."""
        return self._index.choose(request)

    def find(self, request: TransferRequest) -> Pair | None:
        """Finds as PairIndex.find does."""
        return self._index.find(request)

    def _count(self, transfer: Transfer, sign: int) -> None:
        for party, _ in transfer.sides:
            instance = self._instances.get(party.instance_id)
            if instance is None or instance.epoch != party.epoch:
                continue
            held = self._held[party.instance_id]
            if (transfer.transfer_id in held) == (sign > 0):
                continue
            (held.add if sign > 0 else held.remove)(transfer.transfer_id)
            instance = counted(instance, transfer, sign)
            self._instances[party.instance_id] = instance
            self._index.put(instance)


def counted(instance: Instance, transfer: Transfer, sign: int) -> Instance:
    """Returns the instance with one transfer more, or with one less if `sign` is -1."""
    reserved, prefilling = instance.reserved, instance.prefilling
    reserved = Reserved(
        transfers=reserved.transfers + sign,
        blocks=reserved.blocks + sign * transfer.blocks_on(instance.instance_id),
    )
    if instance.instance_id == transfer.prefill.instance_id:
        prefilling = Prefilling(
            transfers=prefilling.transfers + sign,
            tokens=prefilling.tokens + sign * transfer.tokens_to_compute,
        )
    return replace(instance, reserved=reserved, prefilling=prefilling)
