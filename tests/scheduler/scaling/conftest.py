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


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a real redis-server with nothing in it."""
    command = shutil.which("redis-server")
    assert command, "redis-server is missing: apt-get install redis-server"
    folder: Path = tmp_path_factory.mktemp("redis")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    process = subprocess.Popen(
        [command, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""],
        stdout=(folder / "log").open("wb"),
    )
    try:
        wait_until_open(port)
        yield port
    finally:
        process.kill()
        process.wait()


def wait_until_open(port: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            assert time.monotonic() < deadline, "redis-server did not start"
            time.sleep(0.02)


@pytest.fixture
async def redis(redis_server: int) -> AsyncIterator[Redis]:
    client = Redis(host="127.0.0.1", port=redis_server)
    try:
        await client.flushall()
        yield client
    finally:
        with contextlib.suppress(RedisError):
            await client.aclose()
