"""The cost of a pair: the pair of least cost is chosen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import msgspec

from kvxfer.instances import Instance


class Scorer(ABC):
    """The cost of a pair: the load of each instance, plus a cost of the two together.

    All numbers are finite and follow from the arguments alone, so every replica of the control
    plane computes the same. `pair_parts` sums to no less if the distance is greater: the search
    skips far instances because of that. Models, layouts and free blocks are not costs: a pair that
    does not match is no pair.
    """

    alone_tokens: int = 0
    """A request that may be aggregated goes to a decode instance that serves requests alone, and to
    no pair, if that instance lacks at most this many tokens of its prompt."""

    @abstractmethod
    def load_parts(self, instance: Instance) -> Mapping[str, float]:
        """Returns the costs of an instance by itself, on either side."""

    @abstractmethod
    def pair_parts(
        self, distance: int, fabric_steps: int, prefix_tokens: int
    ) -> Mapping[str, float]:
        """Returns the costs of a pair beside its loads.

        `distance` is in steps (scheduler/topology.py). `fabric_steps` is the number of fabrics that
        prefill prefers. `prefix_tokens` is the number of tokens of the prompt in prefill's cache;
        their part is negative.
        """

    def decode_parts(self, _prefix_tokens: int) -> Mapping[str, float]:
        """Returns the costs of decode with this many tokens of the prompt in its cache: parts that
        are 0 or negative, and 0 for no tokens."""
        return {}

    def load(self, instance: Instance) -> float:
        """Returns the sum of `load_parts`; called at each change of an instance."""
        return sum(self.load_parts(instance).values())

    def pair(self, distance: int, fabric_steps: int, prefix_tokens: int) -> float:
        """Returns the sum of `pair_parts`; called some dozen times per request."""
        return sum(self.pair_parts(distance, fabric_steps, prefix_tokens).values())

    def decode(self, prefix_tokens: int) -> float:
        """Returns the sum of `decode_parts`."""
        return sum(self.decode_parts(prefix_tokens).values())


class Weights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The weight of each cost. The unit is one request in a queue."""

    running: float = 1.0
    """One request that is computed, or was handed over to decode since its last heartbeat."""
    waiting: float = 1.0
    """One request that is queued. Requests of open transfers, which prefill computes or has queued,
    do not count: the transfers do."""
    reserved: float = 1.0
    """One transfer that was opened and is not released."""
    tokens: float = 0.5
    """1,000 tokens that prefill has to compute for its open transfers."""
    occupancy: float = 0.0
    """A KV cache that is full; one that is half full costs half. With 0 it only decides between
    pairs of equal cost."""
    distance: float = 1.0
    """One step between the two: NUMA node, host, rack, zone."""
    fabric: float = 1.0
    """One fabric that prefill prefers to the best one in common."""
    prefix: float = 0.5
    """1,000 tokens of the prompt that prefill has in its cache make a pair cheaper by this much:
    a request in a queue is taken to be one of 2,000 tokens."""
    decode_prefix: float = 0.05
    """1,000 tokens of the prompt that decode has in its cache: they are not moved. A move takes a
    tenth of the time to compute them."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            weight = getattr(self, name)
            if not 0 <= weight <= 1e6:
                raise ValueError(f"{name} is {weight}; write 0 to 1000000")


class WeightedScorer(Scorer):
    """A scorer that adds up all parts by their weights."""

    def __init__(self, weights: Weights | None = None) -> None:
        self.weights = weights or Weights()

    def load_parts(self, instance: Instance) -> Mapping[str, float]:
        weights, told = self.weights, instance.prefilling.transfers
        waiting = max(instance.load.waiting - told, 0)
        running = max(instance.load.running - max(told - instance.load.waiting, 0), 0)
        return {
            "running": weights.running * (running + instance.started),
            "waiting": weights.waiting * waiting,
            "tokens": weights.tokens * instance.prefilling.tokens / 1000,
            "reserved": weights.reserved * instance.reserved.transfers,
            "occupancy": weights.occupancy * occupancy(instance),
        }

    def pair_parts(
        self, distance: int, fabric_steps: int, prefix_tokens: int
    ) -> Mapping[str, float]:
        weights = self.weights
        return {
            "distance": weights.distance * distance,
            "fabric": weights.fabric * fabric_steps,
            "prefix": -weights.prefix * prefix_tokens / 1000,
        }

    def decode_parts(self, prefix_tokens: int) -> Mapping[str, float]:
        return {"decode_prefix": -self.weights.decode_prefix * prefix_tokens / 1000}

    def load(self, instance: Instance) -> float:
        # The sum of load_parts without the dict: this is called at each change of an instance.
        weights, load, prefilling = self.weights, instance.load, instance.prefilling
        running, waiting = load.running, load.waiting
        if prefilling.transfers:
            waiting = max(load.waiting - prefilling.transfers, 0)
            running = max(running - max(prefilling.transfers - load.waiting, 0), 0)
        cost = weights.running * (running + instance.started) + weights.waiting * waiting
        cost += weights.tokens * prefilling.tokens / 1000
        cost += weights.reserved * instance.reserved.transfers
        return cost + weights.occupancy * occupancy(instance) if weights.occupancy else cost


def available_blocks(instance: Instance) -> int:
    """Returns the blocks that a new transfer may count on: all that are not reserved, if requests
    wait for blocks on the instance.

    A reserved block may also be in use, so the two are not added up.
    """
    unreserved = instance.num_blocks - instance.reserved.blocks
    load = instance.load
    if load.free_blocks is None or load.queues:
        return unreserved
    return min(unreserved, load.free_blocks)


def occupancy(instance: Instance) -> float:
    """Returns the share of the KV cache that is reserved or in use."""
    free = instance.load.free_blocks
    in_use = 0 if free is None else instance.num_blocks - free
    return max(in_use, instance.reserved.blocks) / instance.num_blocks
