"""The prefill and decode workers of a simulation: queues, batches, networks."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from heapq import heapify, heappop, heappush
from typing import Final

from kvxfer.cached_blocks import CachedBlocks
from kvxfer.load_meter import LoadMeter
from kvxfer.scheduler.scaling.worker_model import BLOCK_TOKENS, WorkerModel
from kvxfer.transfers import Transfer

# Times are sums of floats: what is this few seconds away is due.
_ROUNDING: Final = 1e-9


class Request:
    """One request on its way through the fleet."""

    __slots__ = (
        "arrived",
        "counted",
        "decode",
        "first_token",
        "first_wait",
        "hashes",
        "joined",
        "output",
        "prefill",
        "prompt",
        "started",
        "transfer",
        "window",
    )

    prefill: PrefillWorker
    """The prefill worker that it was sent to."""
    decode: DecodeWorker

    def __init__(
        self,
        arrived: float,
        prompt: int,
        output: float,
        window: int,
        *,
        hashes: tuple[int, ...] = (),
        counted: bool = True,
    ) -> None:
        self.arrived = arrived
        self.prompt = prompt
        self.output = output
        self.window = window
        self.hashes = hashes
        self.counted = counted
        """True if it belongs to the workload, false if it fills up the fleet."""
        self.transfer: Transfer | None = None
        self.started = self.joined = self.first_token = self.first_wait = math.nan

    def blocks(self) -> float:
        """Returns the KV blocks that it takes at decode, on average over its stay."""
        return (self.prompt + self.output / 2) / BLOCK_TOKENS


class Worker:
    """A worker of either role."""

    def __init__(self, name: str, epoch: int, model: WorkerModel, now: float) -> None:
        self.name = name
        self.epoch = epoch
        self.model = model
        self.registered = now
        self.ready = False
        self.draining = False
        self.network_free = now
        """The time when its NICs have sent or received all that was given to them."""
        self.beating = False
        """True if its next heartbeat is on its way."""
        self.beats = -1
        """The number of its last heartbeat, or of that one."""
        self.meter: LoadMeter | None = None
        self.phase = 0.0
        """The place of its heartbeats in the interval, as a part of 1."""
        self.incoming = 0
        """Transfers that were opened with it and have not arrived."""
        self.stood_since = now

    @property
    def load(self) -> tuple[int, int]:
        """Requests that run and that wait."""
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        return not any(self.load) and not self.incoming

    def stood(self, now: float) -> float:
        """Returns the seconds that it was ready since the last call."""
        since, self.stood_since = self.stood_since, now
        return now - since if self.ready else 0.0


class PrefillWorker(Worker):
    """A worker that computes one prompt after the other, in the order of their arrival."""

    def __init__(self, name: str, epoch: int, model: WorkerModel, now: float) -> None:
        super().__init__(name, epoch, model, now)
        self.current: Request | None = None
        self.queue: deque[Request] = deque()
        self.cache: OrderedDict[int, None] = OrderedDict()
        """Hashes of prefixes, the most recently used last."""
        self.published = CachedBlocks()
        self._busy_until = now
        self._busy = 0.0

    @property
    def load(self) -> tuple[int, int]:
        return int(self.current is not None), len(self.queue)

    def began(self, now: float, seconds: float) -> None:
        """Notes that it computes for `seconds` from now on."""
        self._busy += seconds
        self._busy_until = now + seconds

    def computed(self, now: float) -> float:
        """Returns the seconds that it computed since the last call."""
        left = max(self._busy_until - now, 0.0)
        busy, self._busy = self._busy - left, left
        return busy

    def cached(self, hashes: tuple[int, ...]) -> int:
        """Returns how many of the first hashes are cached; all of them are afterwards."""
        cache, hits = self.cache, 0
        for number in hashes:
            if number not in cache:
                break
            hits += 1
        for number in hashes:
            cache[number] = None
            cache.move_to_end(number)
        self.published.add(hashes)
        return hits

    def evict(self, capacity: int) -> None:
        """Takes out the hashes beyond `capacity`, the least recently used first."""
        surplus = max(len(self.cache) - capacity, 0)
        self.published.remove([self.cache.popitem(last=False)[0] for _ in range(surplus)])


class DecodeWorker(Worker):
    """A worker with continuous batching: the requests of a batch get their next token at once,
    slower the more they are.

    `tokens` counts the tokens of a request that never leaves. A request that joins is done when
    `tokens` has grown by its output. So a step of the batch costs nothing: only a request that
    joins or leaves is an event.
    """

    def __init__(self, name: str, epoch: int, model: WorkerModel, now: float) -> None:
        super().__init__(name, epoch, model, now)
        self.batch: list[tuple[float, int, Request]] = []
        """A heap of (value of `tokens` when it is done, order of joining, request)."""
        self.queue: deque[Request] = deque()
        self.tokens = 0.0
        self.at = now
        self.held = 0.0
        """KV blocks in use."""
        self.due = math.inf
        """The time when the next request is done, if an event is on its way for that."""
        self._joined = 0

    @property
    def load(self) -> tuple[int, int]:
        return len(self.batch), len(self.queue)

    def advance(self, now: float, seconds_in_batch: list[float]) -> None:
        """Lets time pass, and adds it to `seconds_in_batch` at the size of the batch."""
        size = len(self.batch)
        if size:
            elapsed = now - self.at
            seconds_in_batch[size] += elapsed
            self.tokens += elapsed / self.model.itl(size)
        self.at = now

    def admit(self, now: float) -> list[Request]:
        """Begins the requests of the queue that fit, in their order, and returns them."""
        begun = []
        while self.queue and self._fits(self.queue[0]):
            request = self.queue.popleft()
            self.held += request.blocks()
            self._joined += 1
            request.joined = now
            request.first_token = now + self.model.itl(len(self.batch) + 1)
            heappush(self.batch, (self.tokens + request.output, self._joined, request))
            begun.append(request)
        return begun

    def _fits(self, request: Request) -> bool:
        if not self.batch:
            return True  # alone it has the whole cache
        blocks = self.held + request.blocks()
        return len(self.batch) < self.model.batch and blocks <= self.model.kv_blocks

    def leave(self) -> list[Request]:
        """Removes and returns the requests that have got their last token."""
        done: list[Request] = []
        if not self.batch:
            return done
        now = self.tokens + _ROUNDING / self.model.itl(len(self.batch))
        while self.batch and self.batch[0][0] <= now:
            _, _, request = heappop(self.batch)
            self.held -= request.blocks()
            done.append(request)
        return done

    def next_due(self) -> float:
        if not self.batch:
            return math.inf
        left = max(self.batch[0][0] - self.tokens, 0.0)
        return self.at + left * self.model.itl(len(self.batch))

    def drop(self, places: list[int]) -> None:
        """Takes requests out of the batch, by their places in it."""
        gone = set(places)
        for place in gone:
            self.held -= self.batch[place][2].blocks()
        self.batch = [entry for place, entry in enumerate(self.batch) if place not in gone]
        heapify(self.batch)
