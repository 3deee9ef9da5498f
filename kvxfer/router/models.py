"""The models of the fleet, by the names that requests may use."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import httpx2
import msgspec

from kvxfer.client import Answer, ControlPlaneClient, calls
from kvxfer.clock import Clock
from kvxfer.errors import ControlPlaneUnavailable, InvalidArgument, KvxferError, UnknownModel
from kvxfer.instances import Instance, InstanceState, Role
from kvxfer.router.connections import WorkerConnections
from kvxfer.router.settings import RouterSettings
from kvxfer.unreadable import UNREADABLE

_KEPT_SECONDS: Final = 1.0
# The longest wait for a worker to describe its models.
_CARD_SECONDS: Final = 2.0
# Names that are remembered after their instances have left.
_MOST_SEEN: Final = 4096

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _View:
    """The fleet of a moment ago, by the names that requests may use."""

    pages: Sequence[Answer[tuple[Instance, ...]]]
    models: frozenset[str]
    names: frozenset[str]
    """Models, aliases and adapters of all instances."""
    ready: Mapping[str, Instance]
    """The first ready instance that has a name."""
    prefill: Mapping[str, str]
    """The address of the first ready prefill instance that has a name."""

    @classmethod
    def of(cls, pages: Sequence[Answer[tuple[Instance, ...]]]) -> _View:
        fleet = [instance for page in pages for instance in page.value]
        ready: dict[str, Instance] = {}
        prefill: dict[str, str] = {}
        for each in fleet:
            if each.state is InstanceState.READY:
                for name in _names(each):
                    ready.setdefault(name, each)
                    if each.role is Role.PREFILL:
                        prefill.setdefault(name, each.http_address)
        models = frozenset(each.model for each in fleet)
        names = frozenset(name for each in fleet for name in _names(each))
        return cls(pages, models, names, ready, prefill)


class _Kept(Generic[T]):
    """A value that is asked for at most once a second, however many callers wait. Loop only."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, T]], clock: Clock) -> None:
        self._ask = ask
        self._clock = clock
        self._value: tuple[float, T] | None = None
        self._asking: asyncio.Task[T] | None = None

    async def get(self) -> T:
        if self._value is not None and self._value[0] > self._clock.monotonic():
            return self._value[1]
        if self._asking is None:
            # Many requests may wait for it, so it belongs to no request's trace.
            self._asking = asyncio.create_task(self._ask(), context=Context())
            self._asking.add_done_callback(self._asked)
        return await asyncio.shield(self._asking)

    def _asked(self, task: asyncio.Task[T]) -> None:
        self._asking = None
        # The callers that wait get its error.
        if not task.cancelled() and task.exception() is None:
            self._value = self._clock.monotonic() + _KEPT_SECONDS, task.result()


class FleetModels:
    """The models that the fleet serves, by the control plane. Memory is bounded. Loop only."""

    def __init__(
        self,
        control_plane: ControlPlaneClient,
        http: WorkerConnections,
        settings: RouterSettings,
        clock: Clock,
    ) -> None:
        self._control_plane = control_plane
        self._http = http
        self._settings = settings
        self._seen: dict[str, None] = {}
        self._last: _View | None = None
        self._view = _Kept(self._look, clock)
        self._cards = _Kept(self._describe, clock)

    def seen(self, model: str) -> None:
        """Remembers that instances run the model."""
        self._seen.pop(model, None)
        self._seen[model] = None
        if len(self._seen) > _MOST_SEEN:
            del self._seen[next(iter(self._seen))]

    async def prefill_worker(self, model: str) -> str | None:
        """Returns the address of a ready one that has the model; None if there is none, or the
        control plane does not answer."""
        with contextlib.suppress(KvxferError):
            return (await self._view.get()).prefill.get(model)
        return None

    async def only(self) -> str | None:
        """Returns the model for a request that names none; None if no instance is registered.
        Raises InvalidArgument if there are several models."""
        models = (await self._view.get()).models
        if len(models) > 1:
            raise InvalidArgument(
                f"model: the fleet serves {', '.join(sorted(models))}; name one of them",
                param="model",
            )
        return next(iter(models), None)

    async def require(self, model: str) -> None:
        """Raises UnknownModel if there are instances and none ever ran the model.

        A model that is missing only because the control plane lost its registry is not unknown.
        """
        if model in self._seen:
            return
        with contextlib.suppress(ControlPlaneUnavailable):
            view = await self._view.get()
            if view.names and model not in view.names:
                raise _unknown(model, view.models)

    async def cards(self) -> list[dict[str, Any]]:
        """Returns what requests may ask for: models, aliases and adapters of ready instances, as
        their own servers describe them."""
        return await self._cards.get()

    async def card(self, name: str) -> dict[str, Any]:
        """Returns the card of one name. Raises UnknownModel."""
        cards = {card["id"]: card for card in await self.cards()}
        if name not in cards:
            raise _unknown(name, cards)
        return cards[name]

    async def context_length(self, name: str) -> int | None:
        """Returns the limit of tokens of a prompt with its answer, as servers of the model or of
        the adapter report it; None if unknown."""
        with contextlib.suppress(KvxferError):
            cards = {card["id"]: card for card in await self.cards()}
            own = cards.get(name, {})
            base = cards.get(own.get("parent"), {})
            length = own.get("max_model_len") or base.get("max_model_len")
            return length if isinstance(length, int) else None
        return None

    async def _look(self) -> _View:
        before = self._last
        known = () if before is None else before.pages
        call = calls.instances()
        pages = [page async for page in self._control_plane.pages(call, known)]
        if before is None or [p.value for p in pages] != [p.value for p in known]:
            self._last = _View.of(pages)
            for name in self._last.names:
                self.seen(name)
        return self._last or _View.of(())

    async def _describe(self) -> list[dict[str, Any]]:
        first = (await self._view.get()).ready
        servers = sorted({each.http_address for each in first.values()})
        told = await asyncio.gather(*map(self._cards_of, servers))
        described = dict(zip(servers, told, strict=True))

        def place(name: str) -> tuple[str, int, str]:
            """Returns a sort key: a model, then its adapters, in the order of its server."""
            order = [*described[first[name].http_address]]
            return first[name].model, order.index(name) if name in order else len(order), name

        return [
            described[first[name].http_address].get(name)
            or {
                "id": name,
                "object": "model",
                "created": int(first[name].registered_at),
                "owned_by": "kvxfer",
            }
            for name in sorted(first, key=place)
        ]

    async def _cards_of(self, server: str) -> dict[str, dict[str, Any]]:
        headers = self._settings.headers_for_workers()
        with contextlib.suppress(TimeoutError, httpx2.HTTPError, TypeError, *UNREADABLE):
            async with asyncio.timeout(_CARD_SECONDS):
                answer = await self._http.get(f"{server}/v1/models", headers)
            if answer.is_success:
                cards = msgspec.json.decode(answer.content, type=dict[str, Any])["data"]
                return {card["id"]: card for card in cards if isinstance(card, dict)}
        return {}


def _unknown(model: str, names: Iterable[str]) -> UnknownModel:
    """Returns an error in vLLM's words."""
    return UnknownModel(
        f"The model `{model}` does not exist. Valid aliases: {', '.join(sorted(names))}.",
        param="model",
    )


def _names(instance: Instance) -> tuple[str, ...]:
    return (instance.model, *instance.load.models)
