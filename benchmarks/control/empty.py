"""The reference: a FastAPI application with one empty route, on the control plane's HTTP server."""

from __future__ import annotations

import asyncio
import json

from fastapi import FastAPI

from kvxfer.web.listener import bind
from kvxfer.web.server import Server

PATH = "/empty"

app = FastAPI()
app.state.stopping = asyncio.Event()


@app.post(PATH)
async def empty() -> None:
    pass


def main() -> None:
    """Serves the application on a free port. Prints the URL as `kvxfer serve --json` does."""

    def announce(url: str) -> None:
        print(json.dumps({"url": url}), flush=True)

    Server(app, bind("127.0.0.1", 0), announce).serve_forever()


if __name__ == "__main__":
    main()
