"""The limit: a FastAPI application with one route that does nothing, on the same uvicorn."""

from __future__ import annotations

import json
import sys

import uvicorn
from fastapi import FastAPI

from kvxfer.web.listener import BACKLOG, bind, url_of

PATH = "/empty"

app = FastAPI()


@app.post(PATH)
async def empty() -> None:
    pass


def main() -> None:
    """Serves it on a free port, whose URL it prints as `kvxfer serve --json` does."""
    listener = bind("127.0.0.1", 0)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, backlog=BACKLOG
    )
    sys.stdout.write(json.dumps({"url": url_of(listener)}) + "\n")
    sys.stdout.flush()
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
