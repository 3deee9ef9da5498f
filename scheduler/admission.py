"""The requests that wait for a pair: which of them is next, and what wakes them."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, TypeAlias

from msgspec import Struct

from kvxfer.clock import Clock
from kvxfer.errors import KvxferError, NoCapacity
from kvxfer.instances import Instance
from kvxfer.scheduler import refusals
from kvxfer.scheduler.registry import Registry
from kvxfer.scheduler.transfers import already_open, open_transfer, try_transfer
from kvxfer.transfers import NOMINAL_PROMPT_TOKENS, Transfer, TransferRequest

OTHERS: Final = "other"
"""The tenant of all requests whose own has no weight."""

# All lines are looked at so often, whatever was told of room.
_LOOK_SECONDS: Final = 1.0
_LONGEST_RETRY_SECONDS: Final = 60
# A rate is that of the last so many.
_RATE_COUNTS: Final = 100

_Group: TypeAlias = tuple[int, str]
"""Priority and tenant; the requests of a group are served in the order in which they came."""
_LineKey: TypeAlias = tuple[str | None, int | None, bool]
"""Model, weights version, and whether one instance serves the whole request."""


class _Waiter(Struct, eq=False):
    request: TransferRequest
    line: _LineKey
    group: _Group
    number: int
    decided: asyncio.Future[Transfer]

    def transfer(self) -> Transfer | None:
        """What it was given, if anything."""
        done = self.decided.done() and not self.decided.cancelled()
        return self.decided.result() if done and self.decided.exception() is None else None


class _Line:
    """Who waits for the same instances."""

    def __init__(self) -> None:
        self.groups: dict[_Group, dict[int, _Waiter]] = {}
        # When the last ones got their pair.
        self.served: deque[float] = deque(maxlen=_RATE_COUNTS)

    def __len__(self) -> int:
        return sum(map(len, self.groups.values()))

    def per_second(self, now: float) -> float:
        """How many get a pair."""
        return len(self.served) / max(now - self.served[0], 1.0) if self.served else 0.0


class Admission:
    """Opens transfers; where there is no room, the request waits for its turn. One event loop.

    Next is a request of the lowest priority number; of these one of the tenant that was given the
    least for its weight; of these the first that came. What a tenant was given counts in prompt
    tokens, from where the one with the least stands when it comes: virtual token counters (Sheng
    et al., "Fairness in Serving Large Language Models", OSDI 2024). Where the next one finds no
    room, only those that wait for other models go before it.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        seconds: float,
        max_waiting: int,
        clock: Clock,
        tenants: Mapping[str, float] | None = None,
    ) -> None:
        """Every transfer is reserved for `seconds`. `tenants` are those with a share, and their
        weights; all others share one of weight 1."""
        self._registry = registry
        self._seconds = seconds
        self._max_waiting = max_waiting
        self._clock = clock
        self._weights = {OTHERS: 1.0, **(tenants or {})}
        self._lines: dict[_LineKey, _Line] = {}
        self._waiting = Counter[str]()
        self._given: dict[str, float] = {}
        self._last_number = 0
        # The lines whose next request may find room now.
        self._hopeful: set[_LineKey] = set()
        self._news = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        registry.room.listen(self._note_room)

    @property
    def waiting(self) -> Mapping[str, int]:
        """How many requests of each tenant wait."""
        return {tenant: self._waiting[tenant] for tenant in self._weights}

    async def open(self, request: TransferRequest) -> Transfer:
        """Reserves the best pair as soon as it is the request's turn, within its `wait_seconds`.

        Raises what Registry.choose does: NoCapacity at once where the request does not wait and
        others do, or where too many wait, and then with `retry_after_seconds`.
        """
        line = (request.model, request.weights_version, request.aggregated)
        if (opened := await already_open(self._registry, request)) is not None:
            return opened
        if not request.wait_seconds:
            if line in self._lines:
                raise self._full(line, "others wait, and this request does not")
            return await open_transfer(
                self._registry, request, seconds=self._seconds, clock=self._clock
            )
        if self._registry.find(request) is None:
            with suppress(NoCapacity):
                await self._registry.choose(request)  # raises what no wait can mend
        waiter = self._enter(request, line)
        try:
            async with asyncio.timeout(request.wait_seconds):
                return await waiter.decided
        except (TimeoutError, asyncio.CancelledError) as ended:
            transfer = waiter.transfer()
            if transfer is None and isinstance(ended, TimeoutError):
                raise await self._in_vain(request) from None
            if transfer is None:
                raise
            if isinstance(ended, TimeoutError):
                return transfer
            await self._give_back(transfer)
            raise
        finally:
            self._leave(waiter)

    def close(self) -> None:
        """Refuses all that wait."""
        for line in list(self._lines.values()):
            for group in list(line.groups.values()):
                for waiter in group.values():
                    _decide(waiter, refusals.stopping())

    async def _in_vain(self, request: TransferRequest) -> KvxferError:
        """What stands in the way of a request that has waited."""
        waited = f"no room within the {request.wait_seconds:g} s that the request waits"
        try:
            await self._registry.choose(request)
        except NoCapacity as error:
            return NoCapacity(f"{waited}: {error}", **error.details)
        except KvxferError as error:
            return error
        return NoCapacity(f"{waited}: others came first", reasons=["others came first"])

    async def _give_back(self, transfer: Transfer) -> None:
        with suppress(KvxferError):
            await self._registry.release(transfer.transfer_id)

    # --- who waits -----------------------------------------------------------------------------

    def _enter(self, request: TransferRequest, key: _LineKey) -> _Waiter:
        tenant = request.tenant if request.tenant in self._weights else OTHERS
        group = request.priority, tenant
        if self._waiting.total() >= self._max_waiting:
            self._make_place(key, group)
        if not self._waiting[tenant]:
            least = min((self._given[t] for t in +self._waiting), default=0.0)
            self._given[tenant] = max(self._given.get(tenant, 0.0), least)
        self._last_number += 1
        decided: asyncio.Future[Transfer] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(request, key, group, self._last_number, decided)
        line = self._lines.setdefault(key, _Line())
        line.groups.setdefault(group, {})[waiter.number] = waiter
        self._waiting[tenant] += 1
        self._hope(key)
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        return waiter

    def _leave(self, waiter: _Waiter) -> None:
        line = self._lines.get(waiter.line)
        group = {} if line is None else line.groups.get(waiter.group, {})
        if line is None or group.pop(waiter.number, None) is None:
            return
        self._waiting[waiter.group[1]] -= 1
        if not group:
            del line.groups[waiter.group]
        if not line.groups:
            del self._lines[waiter.line]
        else:
            self._hope(waiter.line)  # the next one may ask for less

    def _make_place(self, key: _LineKey, coming: _Group) -> None:
        """Refuses the last request of the tenant that has most waiting for its weight, of its worst
        priority; raises NoCapacity where that is the one that comes."""
        priority, tenant = coming
        counts = self._waiting + Counter({tenant: 1})
        largest = max(counts, key=lambda name: (counts[name] / self._weights[name], name == tenant))
        last = max(
            (
                (group[0], next(reversed(waiting)), waiting)
                for line in self._lines.values()
                for group, waiting in line.groups.items()
                if group[1] == largest
            ),
            key=lambda found: found[:2],
            default=None,
        )
        said = f"{self._waiting.total()} requests wait, as many as may"
        if last is None or (largest == tenant and last[0] <= priority):
            raise self._full(key, said)
        _, number, waiting = last
        displaced = waiting[number]
        _decide(displaced, self._full(displaced.line, said))
        self._leave(displaced)

    def _full(self, key: _LineKey, said: str) -> NoCapacity:
        """Says when to come again, by the rate at which those that wait get their turn."""
        line = self._lines.get(key)
        rate = 0.0 if line is None else line.per_second(self._clock.monotonic())
        seconds = _LONGEST_RETRY_SECONDS
        if line is not None and rate:
            seconds = min(math.ceil((len(line) + 1) / rate), seconds)
        ahead = 0 if line is None else len(line)
        return NoCapacity(
            f"no pair of instances can take the request now: {said}",
            reasons=[f"{ahead} requests wait before it; {rate:.1f} a second get a pair"],
            retry_after_seconds=float(seconds),
        )

    # --- whose turn it is ----------------------------------------------------------------------

    def _note_room(self, instance: Instance | None) -> None:
        if not self._lines:
            return
        for key in self._lines:
            if instance is None or instance.serves(key[0]):
                self._hope(key)

    def _hope(self, key: _LineKey) -> None:
        self._hopeful.add(key)
        self._news.set()

    async def _serve(self) -> None:
        """Runs while requests wait."""
        try:
            while self._lines:
                if not self._hopeful:
                    self._news.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_LOOK_SECONDS):
                            await self._news.wait()
                    if not self._hopeful:
                        self._hopeful.update(self._lines)
                waiter = self._next()
                if waiter is not None:
                    await self._try(waiter)
                    await asyncio.sleep(0)
        finally:
            self._serving = None
            self._hopeful.clear()
            self._given.clear()

    def _next(self) -> _Waiter | None:
        """The first of the lines that may have room."""
        self._hopeful.intersection_update(self._lines)
        heads = (
            (group[0], self._given[group[1]], next(iter(waiting.values())))
            for key in self._hopeful
            for group, waiting in self._lines[key].groups.items()
        )
        first = min(heads, key=lambda head: (*head[:2], head[2].number), default=None)
        return None if first is None else first[2]

    async def _try(self, waiter: _Waiter) -> None:
        try:
            transfer = await try_transfer(
                self._registry, waiter.request, seconds=self._seconds, clock=self._clock
            )
        except KvxferError as error:
            _decide(waiter, error)
            self._leave(waiter)
            return
        if transfer is None:
            self._hopeful.discard(waiter.line)
            return
        if waiter.decided.done():  # it has left meanwhile
            await self._give_back(transfer)
            return
        waiter.decided.set_result(transfer)
        tenant = waiter.group[1]
        tokens = waiter.request.prompt_tokens or NOMINAL_PROMPT_TOKENS
        self._given[tenant] += tokens / self._weights[tenant]
        self._lines[waiter.line].served.append(self._clock.monotonic())
        self._leave(waiter)


def _decide(waiter: _Waiter, error: KvxferError) -> None:
    if not waiter.decided.done():
        waiter.decided.set_exception(error)
