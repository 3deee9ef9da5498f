"""The two clients, async and sync: one connection pool each, and the same methods."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar, overload

import httpx2
from tenacity import AsyncRetrying, Retrying

from kvxfer.client import calls
from kvxfer.client.answers import Answer, Failed, problem, read, unanswered, unavailable, whole
from kvxfer.client.calls import Call
from kvxfer.client.retries import policy
from kvxfer.client.watch import PATH as WATCH_PATH
from kvxfer.client.watch import SILENCE_SECONDS, WatchReader
from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.control_plane import Addresses, Credentials
from kvxfer.errors import ControlPlaneUnavailable
from kvxfer.instance_secret import HEADER as SECRET_HEADER
from kvxfer.instances import Change, Snapshot
from kvxfer.tracing.span import HEADER, current

_LEAST_TIMEOUT: Final = 0.01
# The calls of one client at once. For each call that waits, httpx2 looks at every connection: with
# hundreds of calls that takes longer than the calls.
MAX_CALLS: Final = 32
# Calls that the control plane keeps waiting have separate connections, without a limit.
_LIMITS: Final = httpx2.Limits(max_connections=None, max_keepalive_connections=None)

P = ParamSpec("P")
T = TypeVar("T")


class _Method(Generic[P, T]):
    """A method of both clients, made from the function that describes its call.

    It has the arguments of that function, and returns the call's value: at once with the sync
    client, as an awaitable with the other.
    """

    def __init__(self, describe: Callable[P, Call[T]]) -> None:
        self._describe = describe
        self.__doc__ = describe.__doc__

    @overload
    def __get__(self, client: None, owner: type) -> Callable[Concatenate[Any, P], Any]: ...
    @overload
    def __get__(
        self, client: ControlPlaneClient, owner: type
    ) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, client: SyncControlPlaneClient, owner: type) -> Callable[P, T]: ...
    def __get__(self, client: Any, owner: type) -> Any:
        if client is None:
            return self._unbound(owner)

        @functools.wraps(self._describe)
        def send(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client.send(self._describe(*args, **kwargs))

        return send

    def _unbound(self, owner: type) -> Callable[Concatenate[Any, P], Any]:
        """Returns the method as help() shows it."""

        def send(client: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
            return client.send(self._describe(*args, **kwargs))

        functools.update_wrapper(send, self._describe)
        described = inspect.signature(self._describe)
        client = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        returned = str(described.return_annotation).removeprefix("Call[").removesuffix("]")
        send.__dict__["__signature__"] = described.replace(
            parameters=[client, *described.parameters.values()],
            return_annotation=(
                f"Awaitable[{returned}]" if owner is ControlPlaneClient else returned
            ),
        )
        return send


class _Attempts(Generic[T]):
    """The attempts of one call. `timeout` bounds each, and all must end before `give_up`."""

    def __init__(
        self, call: Call[T], *, timeout: float, give_up: float, addresses: Addresses, clock: Clock
    ) -> None:
        self.call = call
        self._timeout = timeout + call.wait_seconds
        self._give_up = give_up
        self._addresses = addresses
        self._url = addresses.current
        self._clock = clock
        self._hurried = False
        self._refused: Failed | None = None

    def seconds(self) -> float:
        """Returns the seconds that each step of an attempt that begins now may take."""
        left = max(self._give_up - self._clock.monotonic(), _LEAST_TIMEOUT)
        if len(self._addresses.all) > 1 and not self.call.wait_seconds:
            left /= 2  # the rest is for another replica
        self._hurried = left < self._timeout / 2
        return min(self._timeout, left)

    def url(self) -> str:
        """Returns the address for an attempt that begins now."""
        self._url = self._addresses.current
        return self._url

    def read(self, response: httpx2.Response) -> Answer[T]:
        """Reads an answer. Raises Failed."""
        try:
            return read(response, self.call, self._url)
        except Failed as refused:
            self._refused = refused
            if isinstance(refused.error, ControlPlaneUnavailable):
                self._addresses.turn_from(self._url)
            raise

    def unanswered(self, error: httpx2.RequestError) -> Failed:
        """Returns the failure of an attempt without an answer.

        If the deadline left it less than half of the timeout, silence says little: if the attempt
        before was answered, that answer is the error.
        """
        if not isinstance(error, httpx2.PoolTimeout):
            self._addresses.turn_from(self._url)
        hurried = self._hurried and isinstance(error, httpx2.TimeoutException)
        if hurried and self._refused is not None:
            return self._refused
        self._refused = None
        return unanswered(error, self.call, self._url, hurried=hurried)


class _Client:
    """The common part of both clients: all but the sending."""

    def __init__(
        self,
        url: str | None,
        credentials: Credentials | None,
        timeout: float,
        deadline: float,
        transport: object,
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._addresses = Addresses(url)
        self._timeout = timeout
        self._deadline = deadline
        credentials = credentials or Credentials.from_environment()
        secured = transport is None and any(u.startswith("https://") for u in self._addresses.all)
        self._options: dict[str, Any] = {
            "timeout": timeout,
            "limits": _LIMITS,
            "transport": transport,
            "trust_env": False,
            "auth": credentials.auth(),
            # Without TLS there is nothing to verify; reading the system's CAs takes 20 ms.
            "verify": credentials.tls() if secured else False,
        }

    @property
    def url(self) -> str:
        """The address of the replica in use."""
        return self._addresses.current

    def _attempts(self, call: Call[T], seconds: float) -> _Attempts[T]:
        return _Attempts(
            call,
            timeout=self._timeout,
            give_up=self._clock.monotonic() + (seconds or self._timeout),
            addresses=self._addresses,
            clock=self._clock,
        )

    def _request(self, attempts: _Attempts[Any]) -> dict[str, Any]:
        call = attempts.call
        traced = current.get()
        headers = {} if traced is None else {HEADER: traced.traceparent}
        if call.known is not None:
            headers["If-None-Match"] = call.known[0]
        if call.secret is not None:
            headers[SECRET_HEADER] = call.secret
        return {
            "method": call.method,
            "url": attempts.url() + call.path,
            "params": dict(call.params) or None,
            "json": call.body,
            "headers": headers or None,
            "timeout": attempts.seconds(),
        }

    def _watch_options(self, reader: WatchReader) -> dict[str, Any]:
        return {
            "method": "GET",
            "url": self.url + WATCH_PATH,
            "headers": reader.connect(),
            "timeout": httpx2.Timeout(self._timeout, read=SILENCE_SECONDS),
        }

    register = _Method(calls.register)
    heartbeat = _Method(calls.heartbeat)
    publish_blocks = _Method(calls.publish_blocks)
    deregister = _Method(calls.deregister)
    instances = _Method(calls.instances)
    instance = _Method(calls.instance)
    drain = _Method(calls.drain)
    undrain = _Method(calls.undrain)
    change_role = _Method(calls.change_role)
    shake_hands = _Method(calls.shake_hands)
    open_transfer = _Method(calls.open_transfer)
    transfers = _Method(calls.transfers)
    transfer = _Method(calls.transfer)
    release_transfer = _Method(calls.release_transfer)
    put_block_table = _Method(calls.put_block_table)
    block_table = _Method(calls.block_table)
    announce_weight_update = _Method(calls.announce_weight_update)
    weight_updates = _Method(calls.weight_updates)
    weight_update = _Method(calls.weight_update)
    report_weight_update = _Method(calls.report_weight_update)
    decide_weight_update = _Method(calls.decide_weight_update)
    scale_plan = _Method(calls.scale_plan)
    overview = _Method(calls.overview)
    trace = _Method(calls.trace)
    ready = _Method(calls.ready)


class ControlPlaneClient(_Client):
    """A connection pool to one control plane, of one event loop. See `kvxfer.client`."""

    def __init__(
        self,
        url: str | None = None,
        *,
        credentials: Credentials | None = None,
        timeout: float = 5.0,
        deadline: float = 10.0,
        transport: httpx2.AsyncBaseTransport | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(url, credentials, timeout, deadline, transport, clock)
        self._http = httpx2.AsyncClient(**self._options)
        # Calls that wait are apart, so that no other call looks at their connections.
        self._waiting = httpx2.AsyncClient(**self._options)
        self._turns = asyncio.Semaphore(MAX_CALLS)

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
        await self._waiting.aclose()

    async def send(self, call: Call[T]) -> T:
        """Makes a call, within its deadline or the client's."""
        return (await self.ask(call)).value

    async def ask(self, call: Call[T]) -> Answer[T]:
        """Makes a call as `send` does; the answer also says how stale the value is."""
        return whole([page async for page in self.pages(call)])

    async def pages(
        self, call: Call[T], known: Sequence[Answer[T]] = ()
    ) -> AsyncGenerator[Answer[T], None]:
        """Yields the answer page by page. `known`: the pages of an earlier answer; those that still
        hold are not sent again."""
        for page in _pages_with(known):
            answer = await self._ask(_conditional(call, page))
            yield answer
            if answer.following is None or not call.paged:
                return
            call = replace(call, path=answer.following, params={})

    async def _ask(self, call: Call[T]) -> Answer[T]:
        seconds = self._deadline if call.deadline is None else call.deadline
        try:
            retrying = AsyncRetrying(**policy(seconds, self._clock), sleep=asyncio.sleep)
            return await retrying(self._attempt, self._attempts(call, seconds))
        except Failed as failed:
            raise failed.error from failed.__cause__

    async def _attempt(self, attempts: _Attempts[T]) -> Answer[T]:
        call = attempts.call
        try:
            async with self._turn(call, attempts.seconds()) as http:
                response = await http.request(**self._request(attempts))
        except httpx2.RequestError as error:
            raise attempts.unanswered(error) from error
        return attempts.read(response)

    @asynccontextmanager
    async def _turn(
        self, call: Call[Any], seconds: float
    ) -> AsyncGenerator[httpx2.AsyncClient, None]:
        if call.wait_seconds:
            yield self._waiting
            return
        try:
            async with asyncio.timeout(seconds):
                await self._turns.acquire()
        except TimeoutError as error:
            raise httpx2.PoolTimeout(f"{MAX_CALLS} calls were under way") from error
        try:
            yield self._http
        finally:
            self._turns.release()

    async def watch(
        self, last_event_id: int | None = None
    ) -> AsyncGenerator[Snapshot | Change, None]:
        """Yields the changes of the fleet, without end; a Snapshot replaces all that was known.

        Connects again by itself and resumes where it was cut off. Raises ControlPlaneUnavailable
        only if the first connection fails.
        """
        reader = WatchReader(self.url, last_event_id)
        while True:
            try:
                async with self._http.stream(**self._watch_options(reader)) as response:
                    if not response.is_success:
                        await response.aread()
                        raise problem(response, self.url)
                    async for chunk in response.aiter_bytes():
                        for item in reader.feed(chunk):
                            yield item
            except (httpx2.RequestError, ControlPlaneUnavailable) as error:
                asked = self.url
                self._addresses.turn_from(asked)
                if not reader.connected:
                    raise _as_unavailable(error, asked) from error
            await asyncio.sleep(reader.pause_seconds())


class SyncControlPlaneClient(_Client):
    """A connection pool to one control plane, for threads. See `kvxfer.client`."""

    def __init__(
        self,
        url: str | None = None,
        *,
        credentials: Credentials | None = None,
        timeout: float = 5.0,
        deadline: float = 10.0,
        transport: httpx2.BaseTransport | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(url, credentials, timeout, deadline, transport, clock)
        self._http = httpx2.Client(**self._options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def send(self, call: Call[T]) -> T:
        """Makes a call, within its deadline or the client's."""
        return self.ask(call).value

    def ask(self, call: Call[T]) -> Answer[T]:
        """Makes a call as `send` does; the answer also says how stale the value is."""
        return whole(list(self.pages(call)))

    def pages(
        self, call: Call[T], known: Sequence[Answer[T]] = ()
    ) -> Generator[Answer[T], None, None]:
        """Yields the answer page by page, as `ControlPlaneClient.pages` does."""
        for page in _pages_with(known):
            answer = self._ask(_conditional(call, page))
            yield answer
            if answer.following is None or not call.paged:
                return
            call = replace(call, path=answer.following, params={})

    def _ask(self, call: Call[T]) -> Answer[T]:
        seconds = self._deadline if call.deadline is None else call.deadline
        try:
            retrying = Retrying(**policy(seconds, self._clock), sleep=self._clock.sleep)
            answer: Answer[T] = retrying(self._attempt, self._attempts(call, seconds))
            return answer
        except Failed as failed:
            raise failed.error from failed.__cause__

    def _attempt(self, attempts: _Attempts[T]) -> Answer[T]:
        try:
            response = self._http.request(**self._request(attempts))
        except httpx2.RequestError as error:
            raise attempts.unanswered(error) from error
        return attempts.read(response)

    def watch(self, last_event_id: int | None = None) -> Generator[Snapshot | Change, None, None]:
        """Yields the changes of the fleet, as `ControlPlaneClient.watch` does."""
        reader = WatchReader(self.url, last_event_id)
        while True:
            try:
                with self._http.stream(**self._watch_options(reader)) as response:
                    if not response.is_success:
                        response.read()
                        raise problem(response, self.url)
                    for chunk in response.iter_bytes():
                        yield from reader.feed(chunk)
            except (httpx2.RequestError, ControlPlaneUnavailable) as error:
                asked = self.url
                self._addresses.turn_from(asked)
                if not reader.connected:
                    raise _as_unavailable(error, asked) from error
            self._clock.sleep(reader.pause_seconds())


def _pages_with(known: Sequence[Answer[T]]) -> Iterator[Answer[T] | None]:
    """Yields the known pages, then None for ever."""
    return itertools.chain(known, itertools.repeat(None))


def _conditional(call: Call[T], known: Answer[T] | None) -> Call[T]:
    if known is None or known.etag is None:
        return replace(call, known=None)
    return replace(call, known=(known.etag, known.value))


def _as_unavailable(error: Exception, url: str) -> Exception:
    return unavailable(error, url) if isinstance(error, httpx2.RequestError) else error
