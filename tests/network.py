"""A control plane, a router and workers as applications of the test's own event loop, which reach
each other without a socket: on a virtual loop they run on its time."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import httpx2
from starlette.types import Receive, Scope, Send

from kvxfer.api.app import create_app as create_control_plane
from kvxfer.api.settings import Settings
from kvxfer.client import ControlPlaneClient, Credentials
from kvxfer.clock import Clock
from kvxfer.instances import InstanceState, Role
from kvxfer.router.app import create_app as create_router
from kvxfer.router.settings import RouterSettings
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.lease_policy import LeasePolicy
from kvxfer.web.answer import ClientLeft, while_connected
from tests.asgi import AsgiTransport
from tests.virtual_time import passes
from verify.processes.control_plane import CLUSTER_KEY, worker

CONTROL_PLANE = "http://control-plane"
ROUTER = "http://router"


class Network:
    """The applications that listen, by host, and clients of them. All have one clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.apps: dict[str, Any] = {}
        self.ahead: int | None = None
        """The number of messages of an answer that may wait for its reader."""

    def transport(self) -> AsgiTransport:
        """Returns the transport of one client, which closes it."""
        return AsgiTransport(self.apps, ahead=self.ahead)

    def http(self, url: str = "", **options: Any) -> httpx2.AsyncClient:
        """Returns a client that waits for ever unless `options` say otherwise."""
        options = {"timeout": None, **options}
        return httpx2.AsyncClient(base_url=url, transport=self.transport(), **options)

    def client(self, **options: Any) -> ControlPlaneClient:
        """Returns a client of the control plane."""
        options = {"credentials": Credentials(), **options}
        return ControlPlaneClient(
            CONTROL_PLANE, transport=self.transport(), clock=self.clock, **options
        )

    @contextlib.asynccontextmanager
    async def served(self, app: Any, host: str) -> AsyncIterator[None]:
        """Runs `app` at `host`, from its start to its stop, which lets its requests end."""
        async with app.router.lifespan_context(app):
            self.apps[host] = app
            try:
                yield
            finally:
                del self.apps[host]
                app.state.stopping.set()
                # Work that needs no time is done before a virtual clock moves.
                await passes(0.001)

    @contextlib.asynccontextmanager
    async def control_plane(
        self,
        *,
        lease_seconds: float = 6.0,
        silence_seconds: float = math.inf,
        **settings: Any,
    ) -> AsyncIterator[EmbeddedRegistry]:
        """Runs a new control plane at its URL."""
        registry = EmbeddedRegistry(
            LeasePolicy(lease_seconds), clock=self.clock, silence_seconds=silence_seconds
        )
        app = create_control_plane(
            Settings(cluster_key=CLUSTER_KEY, **settings), registry, clock=self.clock
        )
        async with self.served(app, "control-plane"):
            yield registry

    @contextlib.asynccontextmanager
    async def routed(
        self, *, credentials: Credentials | None = None, deadline: float = 10.0, **settings: Any
    ) -> AsyncIterator[httpx2.AsyncClient]:
        """Yields a client of a new router. `deadline` is that of the router's calls."""
        app = create_router(
            RouterSettings(**settings),
            self.client(credentials=credentials or Credentials(), deadline=deadline),
            clock=self.clock,
            workers=self.transport(),
        )
        async with self.served(app, "router"), self.http(ROUTER) as client:
            yield client

    async def join(
        self,
        instance_id: str,
        role: Role,
        answer: Answer,
        credentials: Credentials | None = None,
        others: Mapping[str, Answer] | None = None,
        **changes: Any,
    ) -> None:
        """Registers a worker that is ready; it answers requests for tokens with `answer`, and
        others by the end of their path."""
        host = f"{instance_id}:8000"
        self.apps[host] = worker_app(answer, others)
        spec = worker(instance_id, role, http_address=f"http://{host}", **changes)
        async with self.client(credentials=credentials or Credentials()) as client:
            await client.register(spec, state=InstanceState.READY)


class Reply:
    """An answer as a worker sends it, piece by piece."""

    def __init__(self, send: Send, path: str, headers: Mapping[str, str], content: bytes) -> None:
        self._send = send
        self.path, self.headers, self.content = path, headers, content
        """The path, headers and content of the request that it answers."""
        self.begun = False

    async def begin(self, status: int, content_type: str, **more: str) -> None:
        self.begun = True
        told = {"content-type": content_type, **more}
        headers = [(k.replace("_", "-").encode(), v.encode()) for k, v in told.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, content: bytes) -> None:
        await self._send({"type": "http.response.body", "body": content, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


Answer = Callable[[dict[str, Any], Reply], Awaitable[None]]


async def _not_found(_body: dict[str, Any], reply: Reply) -> None:
    await reply.begin(404, "text/plain")


async def _healthy(_body: dict[str, Any], reply: Reply) -> None:
    await reply.begin(200, "text/plain")


_OTHERS: dict[str, Answer] = {
    "/health": _healthy,
    **dict.fromkeys(("/tokenize", "/render", "/v1/models"), _not_found),
}


def worker_app(answer: Answer, others: Mapping[str, Answer] | None = None) -> Any:
    """Returns a worker that answers requests with `answer`, or with one of `others` if the path
    ends with its key. An answer is cancelled when the client leaves.

    If an answer sends nothing, the worker closes the connection.
    """
    by_ending = {**_OTHERS, **(others or {})}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        content, more = b"", True
        while more:
            message = await receive()
            content, more = content + message["body"], message["more_body"]
        try:
            body = json.loads(content)
        except ValueError:
            body = {}
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        path = scope["path"]
        reply = Reply(send, path, headers, content)
        chosen = next((a for ending, a in by_ending.items() if path.endswith(ending)), answer)

        async def answered() -> None:
            await chosen(body, reply)

        with contextlib.suppress(ClientLeft):
            await while_connected(receive, answered())
            if reply.begun:
                await reply.end()

    return app
