"""What a pair costs: of two pairs the one of less cost is chosen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import msgspec

from kvxfer.instances import Instance


class Scorer(ABC):
    """The cost of a pair is the load of each instance plus what the two are to each other.

    All numbers are finite and follow from the arguments alone: every replica of the control plane
    comes to the same ones. `pair_parts` sums to no less where the distance is greater; the search
    skips far instances because of that. Models, layouts and free blocks are no matter of cost: a
    pair that does not match is none.
    """

    alone_tokens: int = 0
    """A request that may be aggregated takes no pair where a decode instance that serves requests
    alone lacks no more of its prompt than so many tokens."""

    @abstractmethod
    def load_parts(self, instance: Instance) -> Mapping[str, float]:
        """What speaks against an instance by itself, whichever side it takes."""

    @abstractmethod
    def pair_parts(
        self, distance: int, fabric_steps: int, prefix_tokens: int
    ) -> Mapping[str, float]:
        """What speaks against a pair.

        Its distance in steps (scheduler/topology.py), how many fabrics prefill would rather use,
        and, with a negative part, how many tokens of the prompt prefill has in its cache.
        """

    def decode_parts(self, _prefix_tokens: int) -> Mapping[str, float]:
        """What speaks against decode with so many tokens of the prompt in its cache: parts that are
        0 or negative, and 0 without any."""
        return {}

    def load(self, instance: Instance) -> float:
        """The sum of `load_parts`; asked once per heartbeat."""
        return sum(self.load_parts(instance).values())

    def pair(self, distance: int, fabric_steps: int, prefix_tokens: int) -> float:
        """The sum of `pair_parts`; asked some dozen times per request."""
        return sum(self.pair_parts(distance, fabric_steps, prefix_tokens).values())

    def decode(self, prefix_tokens: int) -> float:
        """The sum of `decode_parts`."""
        return sum(self.decode_parts(prefix_tokens).values())


class Weights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What each thing costs. The unit is one request in a queue."""

    running: float = 1.0
    """One request that is computed, or was handed over to decode since its last heartbeat."""
    waiting: float = 1.0
    """One request that is queued. Of requests that prefill computes or has queued, as many do not
    count as it has open transfers: these do."""
    reserved: float = 1.0
    """One transfer that was opened and not released: it is on its way, or under way."""
    tokens: float = 0.5
    """1,000 tokens that prefill has to compute for its open transfers."""
    occupancy: float = 0.0
    """A KV cache that is full; one that is half full costs half. With 0 it only decides between
    pairs of equal cost."""
    distance: float = 1.0
    """One step between the two: NUMA node, host, rack, zone."""
    fabric: float = 1.0
    """One fabric that prefill would rather use than the best one in common."""
    prefix: float = 0.5
    """1,000 tokens of the prompt that prefill has in its cache make a pair cheaper by this much:
    a request in a queue is taken to be one of 2,000 tokens."""
    decode_prefix: float = 0.05
    """1,000 tokens of the prompt that decode has in its cache: they are not moved, which takes a
    tenth of the time to compute them."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            weight = getattr(self, name)
            if not 0 <= weight <= 1e6:
                raise ValueError(f"{name} is {weight}; write 0 to 1000000")


class WeightedScorer(Scorer):
    """The sum of all things by their weights."""

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
        # What load_parts adds up to, without the dict: this is asked for every heartbeat.
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
    """Blocks that a new transfer may count on: of an instance where requests wait for blocks, all
    that are not reserved.

    A block that is reserved may already be in use too, so the two are not added up.
    """
    unreserved = instance.num_blocks - instance.reserved.blocks
    load = instance.load
    if load.free_blocks is None or load.queues:
        return unreserved
    return min(unreserved, load.free_blocks)


def occupancy(instance: Instance) -> float:
    """The share of the KV cache that is reserved or in use."""
    free = instance.load.free_blocks
    in_use = 0 if free is None else instance.num_blocks - free
    return max(in_use, instance.reserved.blocks) / instance.num_blocks
