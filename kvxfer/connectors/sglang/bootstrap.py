"""The HTTP server, beside SGLang's, at which decode finds a prefill instance, and its clients."""

from __future__ import annotations

import asyncio
import logging
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

import httpx2

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.connectors.sglang.introduction import (
    MAX_LENGTH,
    Introduction,
    sign_introduction,
    verify_introduction,
)
from kvxfer.connectors.sglang.settings import BackendSettings
from kvxfer.errors import ConnectFailed, Forbidden, KvxferError, TicketInvalid
from kvxfer.web.listener import bind

logger = logging.getLogger(__name__)

_PATH: Final = "/route"
_REQUEST_SECONDS: Final = 2.0
_REGISTER_SECONDS: Final = 30.0
_RETRY_SECONDS: Final = 0.25


class BootstrapServer:
    """A server that keeps the introduction of one prefill instance. It listens when created.

    `PUT /route` takes an introduction that the cluster has signed, unless the server has a later
    one; `GET /route` returns it to any client. It permits nothing: engines authenticate each other.
    """

    def __init__(self, host: str, port: int, settings: BackendSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._token: str | None = None
        self._epoch = 0
        server = ThreadingHTTPServer((host, port), _handler_of(self), bind_and_activate=False)
        server.socket.close()
        server.socket = bind(host, port)
        server.socket.setblocking(True)
        server.daemon_threads = True
        self._server = server
        self._thread = threading.Thread(
            target=server.serve_forever, name="kvxfer-bootstrap", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.socket.getsockname()[1])

    @property
    def token(self) -> str | None:
        return self._token

    def take(self, token: str) -> None:
        """Keeps an introduction. Raises TicketInvalid if the cluster has not signed it, or if it is
        older than the one that is kept."""
        about = verify_introduction(token, self._settings.keys, "the worker that registers")
        with self._lock:
            if about.epoch < self._epoch:
                raise TicketInvalid(
                    f"epoch {about.epoch} of {about.instance_id!r} is over: there is "
                    f"epoch {self._epoch}"
                )
            self._token, self._epoch = token, about.epoch

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler_of(owner: BootstrapServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_SECONDS

        def do_GET(self) -> None:
            if self.path == "/health":
                self._answer(HTTPStatus.OK, "ok")
            elif self.path.partition("?")[0] != _PATH:
                self._answer(HTTPStatus.NOT_FOUND, f"there is {_PATH} and /health")
            elif owner.token is None:
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "the prefill instance still starts")
            else:
                self._answer(HTTPStatus.OK, owner.token)

        def do_PUT(self) -> None:
            length = self.headers.get("Content-Length", "")
            digits = length.isdecimal() and len(length) <= len(str(MAX_LENGTH))
            if self.path != _PATH or not digits or int(length) > MAX_LENGTH:
                self._answer(HTTPStatus.BAD_REQUEST, f"PUT an introduction to {_PATH}")
                return
            try:
                owner.take(self.rfile.read(int(length)).decode("ascii", "replace"))
            except TicketInvalid as error:
                self._answer(HTTPStatus.FORBIDDEN, str(error))
            else:
                self._answer(HTTPStatus.OK, "ok")

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, status: HTTPStatus, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


def register(
    url: str, about: Introduction, settings: BackendSettings, *, clock: Clock = SYSTEM_CLOCK
) -> None:
    """Introduces this prefill instance to its bootstrap server as soon as the server listens.

    Raises Forbidden if it refuses, ConnectFailed if it does not answer within 30 s.
    """
    give_up = clock.monotonic() + _REGISTER_SECONDS
    while True:
        try:
            token = sign_introduction(about, settings.keys)
            answer = httpx2.put(url + _PATH, content=token, timeout=_REQUEST_SECONDS)
            if answer.status_code == HTTPStatus.OK:
                return
            raise Forbidden(f"the bootstrap server at {url} refuses: {answer.text[:500]}")
        except httpx2.HTTPError as error:
            if clock.monotonic() > give_up:
                raise ConnectFailed(
                    f"the bootstrap server at {url} did not answer within "
                    f"{_REGISTER_SECONDS:g} s ({error!r}); is the port free?"
                ) from error
            clock.sleep(_RETRY_SECONDS)


class Introductions:
    """The prefill instances that decode knows, by the address of their bootstrap servers. Loop
    only; any thread may use `known` and problem()."""

    def __init__(self, settings: BackendSettings, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.known: dict[str, Introduction] = {}
        self._settings = settings
        self._clock = clock
        self._problems: dict[str, tuple[float, KvxferError]] = {}
        self._asking: dict[str, asyncio.Task[Introduction]] = {}

    async def ask(self, address: str) -> Introduction:
        """Asks the address again. Concurrent calls share one request. Raises ConnectFailed and
        TicketInvalid."""
        asking = self._asking.get(address)
        if asking is None:
            asking = self._asking[address] = asyncio.create_task(self._ask(address))
            asking.add_done_callback(lambda _: self._asking.pop(address))
            # Keeps asyncio from reporting the failure of a task that is not awaited any more.
            asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(asking)

    async def _ask(self, address: str) -> Introduction:
        try:
            about = verify_introduction(
                await self._get(address), self._settings.keys, f"http://{address}"
            )
        except KvxferError as error:
            self.known.pop(address, None)
            self._problems[address] = (self._clock.monotonic(), error)
            raise
        self.known[address] = about
        return about

    def problem(self, address: str, since: float) -> KvxferError | None:
        """Returns the error of the last failure to ask the address since the time `since`."""
        when, error = self._problems.get(address, (0.0, None))
        return error if when >= since else None

    async def _get(self, address: str) -> str:
        # If machines are so busy that peers get more time, this request gets it too.
        seconds = max(_REQUEST_SECONDS, self._settings.peer_timeout)
        try:
            async with (
                httpx2.AsyncClient(timeout=seconds) as http,
                http.stream("GET", f"http://{address}{_PATH}") as answer,
            ):
                body = b""
                async for part in answer.aiter_bytes():
                    body += part
                    if len(body) > MAX_LENGTH:
                        break
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ConnectFailed(
                f"the bootstrap server of prefill at {address} does not answer ({error!r})"
            ) from error
        text = body.decode("ascii", "replace")
        if answer.status_code != HTTPStatus.OK:
            raise ConnectFailed(
                f"the bootstrap server of prefill at {address} answers "
                f"{answer.status_code}: {text[:200]}"
            )
        return text
