"""The control plane as workers, routers and the CLI call it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from kvxfer.errors import (
    ControlPlaneError,
    ControlPlaneUnavailable,
    InvalidArgument,
    KvxferError,
    LayoutMismatch,
    by_code,
)
from kvxfer.event_stream import EventParser, ServerSentEvent
from kvxfer.instances import (
    Change,
    Instance,
    InstanceSpec,
    InstanceState,
    Lease,
    Load,
    Role,
    Snapshot,
)
from kvxfer.transfers import Handshake, OpenedTransfer, Transfer

ENVIRONMENT: Final = "KVXFER_CONTROL_PLANE"
DEFAULT_URL: Final = "http://127.0.0.1:8080"

# A watch says something at least every 15 s; silence for this long is a dead connection.
_WATCH_SILENCE: Final = 45.0
_WATCH_RETRY: Final = 1.0
_PROBLEM_MEMBERS: Final = frozenset({"type", "title", "status", "detail", "code", "instance"})

T = TypeVar("T")


class ControlPlaneClient:
    """A connection pool to one control plane; belongs to one event loop.

    `url` is that of `kvxfer serve`; without it KVXFER_CONTROL_PLANE, then http://127.0.0.1:8080.
    `timeout` bounds each step of a request, in seconds. Proxy settings of the environment are not
    used: the control plane is part of the cluster.

    Every method raises the error of `kvxfer.errors` that the control plane names, and
    ControlPlaneUnavailable where nobody answers.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        timeout: float = 5.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = (url or os.environ.get(ENVIRONMENT) or DEFAULT_URL).rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise InvalidArgument(
                f"the control plane's URL is {self.url!r}; write it as http://HOST:PORT"
            )
        self._timeout = timeout
        try:
            self._http = httpx.AsyncClient(
                base_url=self.url, timeout=timeout, transport=transport, trust_env=False
            )
        except httpx.InvalidURL as error:
            raise InvalidArgument(
                f"the control plane's URL is {self.url!r} ({error}); write it as http://HOST:PORT"
            ) from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    # --- instances ---------------------------------------------------------------------------

    async def register(
        self,
        spec: InstanceSpec,
        *,
        state: InstanceState = InstanceState.JOINING,
        incarnation: str = "",
    ) -> Lease:
        """Begins a lease; `Registration` does this and keeps it. Raises InstanceExists."""
        body = {**msgspec.to_builtins(spec), "state": state.value, "incarnation": incarnation}
        return await self._call("POST", "/v1/instances", Lease, json=body)

    async def heartbeat(
        self,
        instance_id: str,
        epoch: int,
        *,
        state: InstanceState | None = None,
        load: Load | None = None,
    ) -> Lease:
        """Renews a lease. What is None stays as it was. Raises StaleEpoch."""
        body: dict[str, Any] = {"epoch": epoch}
        if state is not None:
            body["state"] = state.value
        if load is not None:
            body["load"] = msgspec.to_builtins(load)
        path = f"/v1/instances/{quote(instance_id, safe='')}/heartbeat"
        return await self._call("PUT", path, Lease, json=body)

    async def deregister(self, instance_id: str, epoch: int) -> None:
        """Ends a lease. Raises UnknownInstance or StaleEpoch."""
        path = f"/v1/instances/{quote(instance_id, safe='')}"
        await self._send("DELETE", path, params={"epoch": epoch})

    async def instances(
        self,
        *,
        role: Role | None = None,
        model: str | None = None,
        state: InstanceState | None = None,
    ) -> tuple[Instance, ...]:
        """The live instances that match, ordered by id."""
        asked = {"role": role, "model": model, "state": state}
        params = {name: value for name, value in asked.items() if value is not None}
        listed = await self._call("GET", "/v1/instances", _InstanceList, params=params)
        return listed.instances

    async def instance(self, instance_id: str) -> Instance:
        """Raises UnknownInstance."""
        return await self._call("GET", f"/v1/instances/{quote(instance_id, safe='')}", Instance)

    async def watch(self, last_event_id: int | None = None) -> AsyncIterator[Snapshot | Change]:
        """The changes of the fleet, without end; a Snapshot replaces all that was known.

        Connects again by itself and goes on where it was cut off. Raises ControlPlaneUnavailable
        only where the first connection fails.
        """
        connected = False
        while True:
            try:
                async with aclosing(self._watch_once(last_event_id)) as stream:
                    async for item in stream:
                        connected = True
                        if item is not None:
                            last_event_id = item.id
                            yield item
            except ControlPlaneUnavailable:
                if not connected:
                    raise
            await asyncio.sleep(_WATCH_RETRY)

    async def _watch_once(
        self, last_event_id: int | None
    ) -> AsyncGenerator[Snapshot | Change | None, None]:
        """One connection; None once it stands."""
        headers = {} if last_event_id is None else {"Last-Event-ID": str(last_event_id)}
        parser = EventParser()
        try:
            async with self._http.stream(
                "GET",
                "/v1/instances/watch",
                headers=headers,
                timeout=httpx.Timeout(self._timeout, read=_WATCH_SILENCE),
            ) as response:
                if not response.is_success:
                    await response.aread()
                    raise self._error(response)
                yield None
                async for chunk in response.aiter_bytes():
                    for event in parser.feed(chunk):
                        if (item := self._item(event)) is not None:
                            yield item
        except httpx.RequestError as error:
            raise self._unavailable(error) from error

    def _item(self, event: ServerSentEvent) -> Snapshot | Change | None:
        if event.event == "snapshot":
            return self._decode(event.data.encode(), Snapshot)
        if event.event == "change":
            return self._decode(event.data.encode(), Change)
        return None  # a kind that a later control plane sends

    # --- transfers ---------------------------------------------------------------------------

    async def shake_hands(self, prefill_id: str, decode_id: str) -> Handshake:
        """What would move between two instances. Raises UnknownInstance or LayoutMismatch."""
        body = {"prefill_id": prefill_id, "decode_id": decode_id}
        return await self._call("POST", "/v1/handshakes", Handshake, json=body)

    async def open_transfer(
        self,
        *,
        request_id: str | None = None,
        model: str | None = None,
        prompt_tokens: int | None = None,
    ) -> OpenedTransfer:
        """Reserves the best pair, each argument as in `TransferRequest`.

        Raises NoCapacity, whose `details["reasons"]` say what is missing, and PromptTooLong.
        """
        body = {"request_id": request_id, "model": model, "prompt_tokens": prompt_tokens}
        return await self._call("POST", "/v1/transfers", OpenedTransfer, json=body)

    async def transfer(self, transfer_id: str) -> Transfer:
        """Raises UnknownTransfer where it is not open."""
        return await self._call("GET", f"/v1/transfers/{quote(transfer_id, safe='')}", Transfer)

    async def release_transfer(self, transfer_id: str) -> None:
        """Gives a reservation back. Raises UnknownTransfer."""
        await self._send("DELETE", f"/v1/transfers/{quote(transfer_id, safe='')}")

    # --- the control plane itself ------------------------------------------------------------

    async def ready(self) -> None:
        """Returns where the control plane can serve; raises ControlPlaneUnavailable otherwise."""
        await self._send("GET", "/readyz")

    async def _call(self, method: str, path: str, answer: type[T], **request: Any) -> T:
        response = await self._send(method, path, **request)
        return self._decode(response.content, answer)

    async def _send(self, method: str, path: str, **request: Any) -> httpx.Response:
        try:
            response = await self._http.request(method, path, **request)
        except httpx.RequestError as error:
            raise self._unavailable(error) from error
        if not response.is_success:
            raise self._error(response)
        return response

    def _decode(self, content: bytes, answer: type[T]) -> T:
        try:
            return msgspec.json.decode(content, type=answer)
        except msgspec.DecodeError as error:
            raise ControlPlaneError(
                f"{self.url} answered something that is no {answer.__name__}: {error}; "
                "is it a kvxfer control plane of this version?"
            ) from error

    def _unavailable(self, error: httpx.RequestError) -> ControlPlaneUnavailable:
        cause = str(error) or type(error).__name__
        return ControlPlaneUnavailable(
            f"no control plane answers at {self.url} ({cause}); start one with `kvxfer serve`, "
            f"or name it with {ENVIRONMENT}"
        )

    def _error(self, response: httpx.Response) -> KvxferError:
        try:
            problem = msgspec.json.decode(response.content, type=dict[str, Any])
            code, detail = str(problem["code"]), str(problem["detail"])
        except (msgspec.DecodeError, KeyError):
            away = response.status_code in (502, 503, 504)
            kind = ControlPlaneUnavailable if away else ControlPlaneError
            return kind(
                f"{self.url} answered HTTP {response.status_code} without a problem document; "
                "is it a kvxfer control plane?"
            )
        details = {name: problem[name] for name in problem.keys() - _PROBLEM_MEMBERS}
        kind_of_error = by_code(code)
        if kind_of_error is LayoutMismatch:
            return LayoutMismatch(
                str(details.get("field")), details.get("prefill"), details.get("decode")
            )
        if issubclass(kind_of_error, ControlPlaneError):
            return kind_of_error(detail, **details)
        if kind_of_error is KvxferError:
            return ControlPlaneError(f"{self.url} refused: {detail} [{code}]", **details)
        return kind_of_error(detail)


class _InstanceList(msgspec.Struct):
    instances: tuple[Instance, ...]
