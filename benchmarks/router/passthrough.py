"""The reference: a raw ASGI application that passes bodies and answers on, and reads neither.

It has the router's server and the router's HTTP client, and one worker.
"""

from __future__ import annotations

import argparse
from typing import Final

from starlette.types import Receive, Scope, Send

from benchmarks.router.asgi import begin, body_of, end, part, serve
from kvxfer.router.connections import WorkerConnections

_HEADERS: Final = {"Content-Type": "application/json", "Accept-Encoding": "identity"}


class PassThrough:
    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._http = WorkerConnections()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        url, content = self._worker + scope["path"], await body_of(receive)
        response = await self._http.send("POST", url, _HEADERS, content, decode=True)
        try:
            await begin(send, response.status_code, response.headers["content-type"].encode())
            async for content in response.aiter_raw():
                await part(send, content)
            await end(send)
        finally:
            await response.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", required=True, help="the URL of the worker")
    serve(PassThrough(parser.parse_args().worker))


if __name__ == "__main__":
    main()
