"""The routes that a large fleet asks most, answered without FastAPI's machinery."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Final

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvxfer.api.access import Guard, GuardedRoute
from kvxfer.api.context import ControlPlane
from kvxfer.api.problems import answer_error
from kvxfer.errors import KvxferError
from kvxfer.unreadable import UNREADABLE
from kvxfer.web.answer import ClientLeft

_JSON: Final = b"application/json"


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer. `content` is JSON, or empty."""

    status: int
    content: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()


class AnswerDirectly(ABC):
    """ASGI middleware that answers the requests of `route`, and passes all others on.

    It also passes on what it cannot read. FastAPI then reads the body again, and accepts it or
    names what is wrong, so this changes no answer.
    """

    method: str
    has_body = True

    def __init__(
        self, app: ASGIApp, route: GuardedRoute, guard: Guard, control_plane: ControlPlane
    ) -> None:
        self._app = app
        self._route = route
        self._guard = guard
        self.control_plane = control_plane

    @abstractmethod
    def match(self, path: str) -> Any:
        """Returns what `answer` needs of the path; None for a path of another route."""

    def read(self, content: bytes) -> Any:
        """Reads the body. Raises one of UNREADABLE, also for a body that only FastAPI accepts."""
        return content

    @abstractmethod
    async def answer(self, request: Request, found: Any, body: Any) -> Answer:
        """Answers a request. Raises KvxferError."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = None
        if scope["type"] == "http" and scope["method"] == self.method:
            found = self.match(scope["path"])
        if found is None or (self.has_body and not _is_json(scope)):
            await self._app(scope, receive, send)
            return
        scope["route"] = self._route  # for metrics and traces
        request = Request(scope, receive, send)
        content = b""
        try:
            self._guard.admit(request, self._route)
            if self.has_body:
                content = await _body(receive)
            body = self.read(content)
        except KvxferError as error:
            await answer_error(request, error)(scope, receive, send)
        except HTTPException:  # the body is too large: FastAPI meets the same error, and answers
            await self._app(scope, receive, send)
        except UNREADABLE:
            await self._app(scope, _again(content, receive), send)
        else:
            await self._answer(request, send, found, body)

    async def _answer(self, request: Request, send: Send, found: Any, body: Any) -> None:
        scope, receive = request.scope, request.receive
        try:
            answer = await self.answer(request, found, body)
        except KvxferError as error:
            await answer_error(request, error)(scope, receive, send)
        except ClientLeft as left:
            await Response(status_code=left.status_code)(scope, receive, send)
        else:
            await _send(send, answer)


def _is_json(scope: Scope) -> bool:
    """Whether the body is JSON of a declared length."""
    names = dict(scope["headers"])
    media_type = names.get(b"content-type", b"").partition(b";")[0].strip().lower()
    return media_type == _JSON and b"content-length" in names and b"transfer-encoding" not in names


async def _body(receive: Receive) -> bytes:
    """Reads the whole body, or as much of it as came before the client left."""
    content = b""
    more = True
    while more:
        message = await receive()
        content += message.get("body", b"")
        more = message.get("more_body", False)
    return content


def _again(content: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that first gives a body that was read already."""
    messages: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


async def _send(send: Send, answer: Answer) -> None:
    headers = list(answer.headers)
    if answer.content:
        headers += [
            (b"content-length", b"%d" % len(answer.content)),
            (b"content-type", _JSON),
        ]
    start = {"type": "http.response.start", "status": answer.status, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": answer.content})
