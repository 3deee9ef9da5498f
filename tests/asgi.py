"""ASGI applications called in this process: no socket, so requests run on virtual time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx2

_log = logging.getLogger("tests.asgi")


class AsgiTransport(httpx2.AsyncBaseTransport):
    """A transport that calls the application of a request's host and streams its answer.

    `apps` maps "host" or "host:port" to an application; a missing host refuses the connection. A
    client that leaves early is a disconnect to the application, which continues, as under uvicorn,
    until the transport is closed. Its errors are logged. It waits while `ahead` of its messages are
    unread, as with full buffers of a connection.
    """

    def __init__(self, apps: Mapping[str, Any], *, ahead: int | None = None) -> None:
        self.apps = apps
        self._ahead = ahead
        self._running: set[asyncio.Task[None]] = set()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        app = self.apps.get(request.url.netloc.decode())
        if app is None:
            raise httpx2.ConnectError(f"nothing listens at {request.url.netloc.decode()}")
        exchange = _Exchange(request, self._ahead)
        timeout = request.extensions.get("timeout", {}).get("read")
        task = exchange.begin(app)
        self._running.add(task)
        task.add_done_callback(self._ended)
        try:
            async with asyncio.timeout(timeout):
                status, headers = await exchange.head()
        except TimeoutError:
            exchange.leave()
            raise httpx2.ReadTimeout("no answer in time", request=request) from None
        except BaseException:
            exchange.leave()
            raise
        return httpx2.Response(status, headers=headers, stream=exchange.body(timeout))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("an ASGI application failed", exc_info=task.exception())

    async def aclose(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


class _Exchange:
    """One request of an application, and what it has answered so far."""

    def __init__(self, request: httpx2.Request, ahead: int | None) -> None:
        self._request = request
        assert isinstance(request.stream, httpx2.AsyncByteStream)
        self._body: AsyncIterator[bytes] | None = aiter(request.stream)
        self._sent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._ahead = ahead
        self._has_room = asyncio.Event()
        self._gone = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def begin(self, app: Any) -> asyncio.Task[None]:
        url = self._request.url
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self._request.method,
            "scheme": url.scheme,
            "path": url.path,
            "raw_path": url.raw_path.split(b"?")[0],
            "query_string": url.query,
            "headers": [(name.lower(), value) for name, value in self._request.headers.raw],
            "server": (url.host, url.port or 80),
            "client": ("127.0.0.1", 40000),
            "root_path": "",
        }
        self._task = asyncio.create_task(self._run(app, scope))
        return self._task

    async def _run(self, app: Any, scope: dict[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._send)
        finally:
            self._sent.put_nowait(None)

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            chunk = await anext(self._body, None)
            if chunk is None:
                self._body = None
            return {"type": "http.request", "body": chunk or b"", "more_body": chunk is not None}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self._sent.put_nowait(message)
        if self._ahead is not None and self._sent.qsize() >= self._ahead:
            self._has_room.clear()
            if not self._gone.is_set():
                await self._has_room.wait()
        await asyncio.sleep(0)  # An application that only sends lets others run.

    async def _next(self) -> dict[str, Any]:
        message = await self._sent.get()
        self._has_room.set()
        if message is None:
            assert self._task is not None
            await self._task  # Raises the application's error, if any.
            raise httpx2.RemoteProtocolError("the application ended without an answer")
        return message

    async def head(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        start = await self._next()
        assert start["type"] == "http.response.start", start
        return start["status"], list(start.get("headers", []))

    def body(self, timeout: float | None) -> httpx2.AsyncByteStream:
        return _Body(self, timeout)

    async def chunks(self, timeout: float | None) -> AsyncIterator[bytes]:
        more = True
        while more:
            try:
                async with asyncio.timeout(timeout):
                    message = await self._next()
            except TimeoutError:
                raise httpx2.ReadTimeout("no data in time", request=self._request) from None
            assert message["type"] == "http.response.body", message
            more = message.get("more_body", False)
            if chunk := message.get("body", b""):
                yield chunk

    def leave(self) -> None:
        self._gone.set()
        self._has_room.set()


class _Body(httpx2.AsyncByteStream):
    def __init__(self, exchange: _Exchange, timeout: float | None) -> None:
        self._exchange = exchange
        self._timeout = timeout

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._exchange.chunks(self._timeout):
            yield chunk

    async def aclose(self) -> None:
        self._exchange.leave()
