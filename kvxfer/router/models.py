"""The models of the fleet, by the names that requests may use."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from contextvars import Context
from typing import Any, Final

import httpx2
import msgspec

from kvxfer.client import ControlPlaneClient
from kvxfer.clock import Clock
from kvxfer.errors import ControlPlaneUnavailable, KvxferError
from kvxfer.instances import Instance, InstanceState, Role
from kvxfer.router.connections import WorkerConnections
from kvxfer.router.errors import InvalidRequest, UnknownModel
from kvxfer.router.settings import RouterSettings
from kvxfer.unreadable import UNREADABLE

_KEPT_SECONDS: Final = 1.0
# Within which workers describe their models.
_CARD_SECONDS: Final = 2.0


class FleetModels:
    """What the control plane says that the fleet serves. Loop only."""

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
        self._clock = clock
        self._seen: set[str] = set()
        self._fleet: tuple[float, tuple[Instance, ...]] | None = None
        self._asking: asyncio.Task[tuple[Instance, ...]] | None = None

    def seen(self, model: str) -> None:
        """A pair was reserved for the model."""
        self._seen.add(model)

    async def prefill_worker(self, model: str) -> str | None:
        """The address of one that has the model and is ready; None where there is none, or the
        control plane does not say."""
        with contextlib.suppress(KvxferError):
            for each in await self._instances():
                ready = each.state is InstanceState.READY and each.role is Role.PREFILL
                if ready and model in _names(each):
                    return each.http_address
        return None

    async def only(self) -> str | None:
        """The model of a request that names none; None where no instance is registered. Raises
        InvalidRequest where there are several."""
        models = {instance.model for instance in await self._instances()}
        if len(models) > 1:
            raise InvalidRequest(
                f"model: the fleet serves {', '.join(sorted(models))}; name one of them", "model"
            )
        return next(iter(models), None)

    async def require(self, model: str) -> None:
        """Raises UnknownModel where there are instances and none ever ran the model.

        A fleet that comes back to a control plane which lost its memory is no reason.
        """
        if model in self._seen:
            return
        with contextlib.suppress(ControlPlaneUnavailable):
            instances = await self._instances()
            names = {name for each in instances for name in _names(each)}
            self._seen |= names
            if names and model not in names:
                raise _unknown(model, {each.model for each in instances})

    async def cards(self) -> list[dict[str, Any]]:
        """What requests may ask for, by name: models, aliases and adapters of ready instances, as
        their own servers describe them."""
        instances = await self._instances()
        ready = [each for each in instances if each.state is InstanceState.READY]
        first = {name: each for each in reversed(ready) for name in _names(each)}
        self._seen.update(first)
        servers = sorted({each.http_address for each in first.values()})
        told = await asyncio.gather(*map(self._cards_of, servers))
        described = dict(zip(servers, told, strict=True))

        def place(name: str) -> tuple[str, int, str]:
            """A model comes before its adapters: in the order of its server."""
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

    async def card(self, name: str) -> dict[str, Any]:
        """That of one name. Raises UnknownModel."""
        cards = {card["id"]: card for card in await self.cards()}
        if name not in cards:
            raise _unknown(name, cards)
        return cards[name]

    async def _cards_of(self, server: str) -> dict[str, dict[str, Any]]:
        headers = self._settings.headers_for_workers()
        with contextlib.suppress(TimeoutError, httpx2.HTTPError, TypeError, *UNREADABLE):
            async with asyncio.timeout(_CARD_SECONDS):
                answer = await self._http.get(f"{server}/v1/models", headers)
            if answer.is_success:
                cards = msgspec.json.decode(answer.content, type=dict[str, Any])["data"]
                return {card["id"]: card for card in cards if isinstance(card, dict)}
        return {}

    async def _instances(self) -> tuple[Instance, ...]:
        """The fleet of a moment ago: many requests at once ask for it once."""
        if self._fleet is not None and self._fleet[0] > self._clock.monotonic():
            return self._fleet[1]
        if self._asking is None:
            # Many requests wait for it, so that it belongs into the trace of none.
            self._asking = asyncio.create_task(self._ask(), context=Context())
            self._asking.add_done_callback(self._asked)
        return await asyncio.shield(self._asking)

    async def _ask(self) -> tuple[Instance, ...]:
        found = await self._control_plane.instances()
        self._fleet = (self._clock.monotonic() + _KEPT_SECONDS, found)
        return found

    def _asked(self, task: asyncio.Task[tuple[Instance, ...]]) -> None:
        self._asking = None
        if not task.cancelled():
            task.exception()  # those who wait for it have it


def _unknown(model: str, names: Iterable[str]) -> UnknownModel:
    """In vLLM's words."""
    return UnknownModel(
        f"The model `{model}` does not exist. Valid aliases: {', '.join(sorted(names))}."
    )


def _names(instance: Instance) -> tuple[str, ...]:
    return (instance.model, *instance.load.models)
