"""Answers of workers in tests; and a router and workers on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

from kvxfer.client import ControlPlaneClient, Credentials
from kvxfer.instances import InstanceState, Role
from kvxfer.reference.worker.http_server import HttpServer
from kvxfer.router.app import create_app
from kvxfer.router.settings import RouterSettings
from kvxfer.web.answer import DONE, data_event
from kvxfer.web.listener import bind, url_of
from kvxfer.web.server import Server
from kvxfer.web.tls import ServerTls
from tests.network import Answer, Reply
from verify.polling import PATIENCE
from verify.processes.control_plane import worker

USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}


class RunningRouter:
    """`kvxfer router` in a thread of this process; `deadline` bounds its calls of the control
    plane."""

    def __init__(
        self,
        control_plane: str,
        *,
        credentials: Credentials | None = None,
        tls: ServerTls | None = None,
        deadline: float = 10.0,
        **settings: Any,
    ) -> None:
        client = ControlPlaneClient(
            control_plane, credentials=credentials or Credentials(), deadline=deadline
        )
        app = create_app(RouterSettings(**{"capacity_seconds": 20, **settings}), client)
        listener = bind("127.0.0.1", 0)
        self.url = url_of(listener, tls=tls is not None)
        self.stopping: asyncio.Event = app.state.stopping
        self._accepts = threading.Event()
        self._server = Server(app, listener, lambda _: self._accepts.set(), tls=tls)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> RunningRouter:
        self._thread.start()
        assert self._accepts.wait(PATIENCE), "the router did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()


@contextlib.asynccontextmanager
async def http_worker(
    control_plane: str,
    instance_id: str,
    role: Role,
    app: Any,
    credentials: Credentials | None = None,
) -> AsyncIterator[None]:
    """A worker on its own socket, as an application; it is ready."""
    with bind("127.0.0.1", 0) as listener:
        server = HttpServer(app)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        credentials = credentials or Credentials()
        async with ControlPlaneClient(control_plane, credentials=credentials) as client:
            spec = worker(instance_id, role, http_address=url_of(listener))
            await client.register(spec, state=InstanceState.READY)
        try:
            yield
        finally:
            server.should_exit = True
            await serving


def answers(status: int, content_type: str, content: bytes) -> Answer:
    async def answer(_body: dict[str, Any], reply: Reply) -> None:
        await reply.begin(status, content_type)
        await reply.write(content)

    return answer


def problem(status: int, code: str) -> Answer:
    content = json.dumps({"code": code, "detail": f"this is {code}"}).encode()
    return answers(status, "application/problem+json", content)


def _event(kind: str, *choices: dict[str, Any], **more: Any) -> bytes:
    told = {"id": "x", "object": kind, "created": 1, "model": "llama", "choices": choices}
    return data_event({**told, **more})


def chunk(text: str, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "token_ids": [7], "finish_reason": finish_reason}
    return _event("text_completion", choice)


def chat_chunk(finish_reason: str | None = None, **delta: str) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return _event("chat.completion.chunk", choice)


def whole(kind: str, choice: dict[str, Any], **more: Any) -> bytes:
    """Returns an answer in one piece."""
    told = {"id": "x", "object": kind, "created": 1, "model": "llama", "usage": USAGE}
    return json.dumps({**told, "choices": [{"index": 0, **choice}], **more}).encode()


def either(stream: bytes, one_piece: bytes) -> Answer:
    """Returns an answer that is a stream or in one piece, as the request asks."""
    streams = answers(200, "text/event-stream", stream)
    tells = answers(200, "application/json", one_piece)

    async def answer(body: dict[str, Any], reply: Reply) -> None:
        await (streams if body.get("stream") else tells)(body, reply)

    return answer


PREFILLS = answers(200, "application/json", b"{}")
USAGE_CHUNK = _event("text_completion", usage=USAGE)
COMPLETION = whole("text_completion", {"text": "ab", "token_ids": [7, 7], "finish_reason": "stop"})
DECODES = either(chunk("a") + chunk("b", "stop") + USAGE_CHUNK + DONE, COMPLETION)
CHATS = either(
    chat_chunk(role="assistant", content="")
    + chat_chunk(content="a")
    + chat_chunk("stop", content="b")
    + _event("chat.completion.chunk", usage=USAGE)
    + DONE,
    whole(
        "chat.completion",
        {"message": {"role": "assistant", "content": "ab"}, "finish_reason": "stop"},
    ),
)
