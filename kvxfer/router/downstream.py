"""The client's side of a request: the answer, sent on as it arrives."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvxfer.router.door import Door
from kvxfer.web.answer import ClientLeft, while_connected
from kvxfer.web.wait_limit import WaitLimit


class Downstream:
    """An answer that is sent piece by piece, or in one. One task at a time.

    ClientLeft is raised if the client takes nothing for `stall_seconds`.
    """

    def __init__(self, send: Send, stall_seconds: float | None) -> None:
        self._send = send
        self.limit = WaitLimit(stall_seconds)
        self.headers: dict[str, str] = {}
        """Headers that are added to the answer's own."""
        self.begun = False
        """Whether status and headers are sent, so that no other answer is possible."""
        self.told = False
        """Whether more than comments is sent, so that the request cannot be tried again."""

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Sends status and headers, unless they are sent."""
        if self.begun:
            return
        self.begun = True
        told = {**headers, **self.headers}
        lines = [(name.lower().encode(), value.encode()) for name, value in told.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": lines})

    async def comment(self, part: bytes) -> None:
        """Sends what clients of a stream ignore, and proxies take for activity."""
        await self._part(part)

    async def send(self, part: bytes) -> None:
        self.told = True
        await self._part(part)

    async def answer(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        """Sends the whole answer."""
        await self.begin(status, {**headers, "Content-Length": str(len(content))})
        await self.send(content)

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _part(self, part: bytes) -> None:
        self.limit.begin()
        await self._send({"type": "http.response.body", "body": part, "more_body": True})
        self.limit.end()


Serve: TypeAlias = Callable[[Downstream], Awaitable[None]]


class Passage(Response):
    """An answer that is sent by the function that `take` returns for the request's body.

    An error before the first byte is raised, and answered as any other. If the client leaves, the
    function is cancelled, and the answer ends after it.
    """

    def __init__(
        self, take: Callable[[bytes], Serve], door: Door, stall_seconds: float | None
    ) -> None:
        self.background = None
        self._take = take
        self._door = door
        self._stall_seconds = stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        client = Downstream(send, self._stall_seconds)
        with self._door.entered() as read_body:
            serve = self._take(await read_body(receive))
            try:
                await while_connected(receive, _served(serve, client))
            except ClientLeft:
                if not client.begun:
                    raise  # it is counted as an answer 499


async def _served(serve: Serve, client: Downstream) -> None:
    try:
        async with client.limit:
            await serve(client)
    except TimeoutError:
        if client.limit.expired:
            raise ClientLeft from None
        raise
    await client.end()
