from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError


class RedisServer:
    """A real redis-server on a port of its own, which loses its data when it is killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port: int = listener.getsockname()[1]
        self.start()

    def start(self) -> None:
        command = shutil.which("redis-server")
        assert command, "redis-server is missing: apt-get install redis-server"
        where = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen([command, *where, "--save", ""], stdout=log)
        deadline = time.monotonic() + 20
        while not self._accepts():
            assert time.monotonic() < deadline, "redis-server did not start"
            time.sleep(0.02)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _accepts(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
            return True
        return False


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[Redis]:
    """A client of a Redis with nothing in it."""
    client = Redis(host="127.0.0.1", port=redis_server.port)
    await client.flushall()
    yield client
    with contextlib.suppress(RedisError):
        await client.aclose()
