"""The common parts of this benchmark's raw ASGI applications: a server, a body, an answer."""

from __future__ import annotations

import json

import uvicorn
from starlette.types import ASGIApp, Receive, Send

from kvxfer.web.listener import BACKLOG, KEEP_ALIVE_SECONDS, bind, url_of


def serve(app: ASGIApp) -> None:
    """Serves `app` on a free port until SIGTERM, as kvxfer's servers are served: uvicorn on uvloop
    and httptools. Prints the URL as `kvxfer router --json` does."""
    listener = bind("127.0.0.1", 0)
    print(json.dumps({"url": url_of(listener)}), flush=True)
    config = uvicorn.Config(
        app,
        lifespan="off",
        loop="uvloop",
        http="httptools",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )
    uvicorn.Server(config).run(sockets=[listener])


async def body_of(receive: Receive) -> bytes:
    """Returns the whole body of a request."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def begin(send: Send, status: int, content_type: bytes) -> None:
    headers = [(b"content-type", content_type)]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def part(send: Send, content: bytes) -> None:
    await send({"type": "http.response.body", "body": content, "more_body": True})


async def end(send: Send, content: bytes = b"") -> None:
    await send({"type": "http.response.body", "body": content, "more_body": False})
