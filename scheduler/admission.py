"""The requests that wait for a pair: which of them is next, and what wakes them."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left, insort
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
"""The tenant that stands for all tenants without a weight."""

# Seconds between looks at all lines while no room is reported.
_LOOK_SECONDS: Final = 1.0
_LONGEST_RETRY_SECONDS: Final = 60
# A rate is measured over at most this many requests.
_RATE_COUNTS: Final = 100

_Group: TypeAlias = tuple[int, str]
"""Priority and tenant; the requests of a group are served in the order in which they came."""
_Came: TypeAlias = tuple[float, int]
"""The time of arrival, less the time waited before, and a number: no two are equal."""
_LineKey: TypeAlias = tuple[str | None, int | None, bool]
"""Model, weights version, and whether one instance serves the whole request."""


class _Waiter(Struct, eq=False):
    request: TransferRequest
    line: _LineKey
    group: _Group
    came: _Came
    decided: asyncio.Future[Transfer]

    def transfer(self) -> Transfer | None:
        """Returns the transfer that the request was given, if any."""
        done = self.decided.done() and not self.decided.cancelled()
        return self.decided.result() if done and self.decided.exception() is None else None


class _Line:
    """The requests that wait for the same instances."""

    def __init__(self) -> None:
        # The requests of each group, in the order in which they came.
        self.groups: dict[_Group, list[_Waiter]] = {}
        # The times at which the last requests got their pair.
        self.served: deque[float] = deque(maxlen=_RATE_COUNTS)

    def __len__(self) -> int:
        return sum(map(len, self.groups.values()))

    def per_second(self, now: float) -> float:
        """Returns the number of requests that get a pair per second."""
        return len(self.served) / max(now - self.served[0], 1.0) if self.served else 0.0


class Admission:
    """A queue of requests, which opens their transfers in turn. One event loop.

    The next request is one of the lowest priority number; among these, one of the tenant that was
    given the least for its weight; among these, the one that has waited longest. What a tenant was
    given counts in prompt tokens. A tenant that begins to wait starts from the least count of those
    that wait, if its count is lower: virtual token counters (Sheng et al., "Fairness in Serving
    Large Language Models", OSDI 2024). If the next request finds no room, only requests of other
    lines overtake it.
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
        """Reserves every transfer for `seconds`. `tenants` maps the tenants with a share to their
        weights; all others together have weight 1."""
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
        """The number of waiting requests of each tenant."""
        return {tenant: self._waiting[tenant] for tenant in self._weights}

    async def open(self, request: TransferRequest) -> Transfer:
        """Reserves the best pair as soon as it is the request's turn, within its `wait_seconds`.

        Raises the errors of Registry.choose. Raises NoCapacity with `retry_after_seconds` at once
        if too many requests wait, or if others wait and this one does not.
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
                await self._registry.choose(request)  # raises errors that no wait can mend
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
        """Refuses all waiting requests."""
        for line in list(self._lines.values()):
            for group in list(line.groups.values()):
                for waiter in group:
                    _decide(waiter, refusals.stopping())

    async def _in_vain(self, request: TransferRequest) -> KvxferError:
        """Returns the error for a request that has waited in vain."""
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

    # --- the waiting requests ------------------------------------------------------------------

    def _enter(self, request: TransferRequest, key: _LineKey) -> _Waiter:
        tenant = request.tenant if request.tenant in self._weights else OTHERS
        group = request.priority, tenant
        self._last_number += 1
        came = self._clock.monotonic() - request.waited_seconds, self._last_number
        self._make_place(key, group, came)
        if not self._waiting[tenant]:
            least = min((self._given[t] for t in +self._waiting), default=0.0)
            self._given[tenant] = max(self._given.get(tenant, 0.0), least)
        decided: asyncio.Future[Transfer] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(request, key, group, came, decided)
        line = self._lines.setdefault(key, _Line())
        insort(line.groups.setdefault(group, []), waiter, key=_came)
        self._waiting[tenant] += 1
        self._hope(key)
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        return waiter

    def _leave(self, waiter: _Waiter) -> None:
        line = self._lines.get(waiter.line)
        group = [] if line is None else line.groups.get(waiter.group, [])
        place = bisect_left(group, waiter.came, key=_came)
        if line is None or group[place : place + 1] != [waiter]:
            return
        del group[place]
        self._waiting[waiter.group[1]] -= 1
        if not group:
            del line.groups[waiter.group]
        if not line.groups:
            del self._lines[waiter.line]
        else:
            self._hope(waiter.line)  # the next request may ask for less

    def _make_place(self, key: _LineKey, coming: _Group, came: _Came) -> None:
        """Makes sure that a place is left for a request that comes.

        A tenant whose waiting requests fill its share of the places, while others wait, loses its
        last request of its worst priority. Otherwise, if no place is left, the tenant with the most
        waiting requests for its weight loses its last one. Raises NoCapacity if the request to
        lose is the one that comes.

        A tenant thus takes no place that another would take back from a request that has waited.
        """
        priority, tenant = coming
        counts = self._waiting + Counter({tenant: 1})
        of_all = self._weights[tenant] / sum(self._weights[name] for name in counts)
        if counts[tenant] > math.ceil(self._max_waiting * of_all):
            loser = tenant
        elif counts.total() > self._max_waiting:
            loser = max(
                counts, key=lambda name: (counts[name] / self._weights[name], name == tenant)
            )
        else:
            return
        last = max(
            (
                waiting[-1]
                for line in self._lines.values()
                for group, waiting in line.groups.items()
                if group[1] == loser
            ),
            key=lambda waiter: (waiter.group[0], waiter.came),
            default=None,
        )
        of_tenant = " of its tenant" if len(counts) > 1 else ""
        said = f"{self._waiting[loser]} requests{of_tenant} wait, which is the limit"
        if last is None or (loser == tenant and (last.group[0], last.came) < (priority, came)):
            raise self._full(key, said)
        _decide(last, self._full(last.line, said))
        self._leave(last)

    def _full(self, key: _LineKey, said: str) -> NoCapacity:
        """Returns the refusal. The time to retry follows from the rate at which pairs are given."""
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

    # --- the next request ----------------------------------------------------------------------

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
        """Returns the next request of the lines that may have room."""
        self._hopeful.intersection_update(self._lines)
        heads = (
            (group[0], self._given[group[1]], waiting[0])
            for key in self._hopeful
            for group, waiting in self._lines[key].groups.items()
        )
        first = min(heads, key=lambda head: (*head[:2], head[2].came), default=None)
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
        if waiter.decided.done():  # the request left meanwhile
            await self._give_back(transfer)
            return
        waiter.decided.set_result(transfer)
        tenant = waiter.group[1]
        tokens = waiter.request.prompt_tokens or NOMINAL_PROMPT_TOKENS
        self._given[tenant] += tokens / self._weights[tenant]
        self._lines[waiter.line].served.append(self._clock.monotonic())
        self._leave(waiter)


def _came(waiter: _Waiter) -> _Came:
    return waiter.came


def _decide(waiter: _Waiter, error: KvxferError) -> None:
    if not waiter.decided.done():
        waiter.decided.set_exception(error)
