"""The load generator: HTTP/1.1 over a few persistent connections, one request at a time on each.

A raw asyncio protocol in a separate process. It sends prepared bytes, and parses only the status
and the length of an answer. It reports its processor time, so that a run shows whether it was the
bottleneck.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Final

import msgspec

_HEAD_END: Final = b"\r\n\r\n"
_LENGTH: Final = b"content-length:"
_UNAVAILABLE: Final = 503
_RETRY_SECONDS: Final = 0.05
# Far longer than a working control plane takes for any answer.
_SILENCE_SECONDS: Final = 60.0


@dataclass(slots=True)
class Answers:
    """The answers to one load, and their times."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Processor seconds of the load generator."""
    server_cpu_seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    @property
    def per_second(self) -> float:
        return len(self.latencies) / self.seconds

    def expect(self, *statuses: int) -> Answers:
        """Returns itself. Raises RuntimeError if an answer had another status, as the figures would
        mean something else."""
        if set(self.statuses) - set(statuses):
            raise RuntimeError(f"answers were {dict(self.statuses)}, not only {statuses}")
        return self


def request(method: str, path: str, body: Any = None) -> bytes:
    """Returns the bytes of one request."""
    content = b"" if body is None else msgspec.json.encode(body)
    head = f"{method} {path} HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(content)}\r\n"
    if content:
        head += "content-type: application/json\r\n"
    return head.encode() + b"\r\n" + content


def send(port: int, requests: Sequence[bytes], connections: int, seconds: float | None) -> Answers:
    """Sends `requests` in turn, again and again, for `seconds`. Without `seconds` it sends each
    once, and repeats requests that are answered 503. Blocks: run it in a separate process."""
    return asyncio.run(_send(port, requests, connections, seconds))


async def _send(
    port: int, requests: Sequence[bytes], connections: int, seconds: float | None
) -> Answers:
    answers = Answers()
    cpu, began = time.process_time(), time.perf_counter()
    supply: Iterator[bytes] = iter(requests) if seconds is None else cycle(requests)
    load = _Load(supply, answers, None if seconds is None else began + seconds)
    loop = asyncio.get_running_loop()
    made = [
        (await loop.create_connection(lambda: _Connection(load), "127.0.0.1", port))[1]
        for _ in range(connections)
    ]
    try:
        for connection in made:
            connection.next()
        while True:
            answered = len(answers.latencies)
            _, waiting = await asyncio.wait([c.done for c in made], timeout=_SILENCE_SECONDS)
            if not waiting:
                break
            if answered == len(answers.latencies):
                raise RuntimeError(f"the server at port {port} is silent")
        for connection in made:
            connection.done.result()
    finally:
        for connection in made:
            connection.close()
    answers.seconds = time.perf_counter() - began
    answers.cpu_seconds = time.process_time() - cpu
    return answers


@dataclass(slots=True)
class _Load:
    """The state that all connections share."""

    supply: Iterator[bytes]
    answers: Answers
    stop_at: float | None
    again: deque[bytes] = field(default_factory=deque)

    def next(self) -> bytes | None:
        if self.stop_at is not None and time.perf_counter() >= self.stop_at:
            return None
        return self.again.popleft() if self.again else next(self.supply, None)


class _Connection(asyncio.Protocol):
    def __init__(self, load: _Load) -> None:
        self._load = load
        self._received = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def next(self) -> None:
        content = self._load.next()
        if content is None:
            self.done.set_result(None)
            return
        self._sent, self._began = content, time.perf_counter()
        self._transport.write(content)

    def data_received(self, data: bytes) -> None:
        received = self._received + data
        self._received = received
        head, found, body = received.partition(_HEAD_END)
        if not found or len(body) < _length(head):
            return
        self._received = b""
        status = int(head[9:12])
        if status == _UNAVAILABLE and self._load.stop_at is None:
            self._load.again.append(self._sent)
            asyncio.get_running_loop().call_later(_RETRY_SECONDS, self.next)
            return
        answers = self._load.answers
        answers.latencies.append(time.perf_counter() - self._began)
        answers.statuses[status] += 1
        answers.bodies.append(body)
        self.next()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the server closed a connection"))

    def close(self) -> None:
        self._transport.close()


def _length(head: bytes) -> int:
    _, found, rest = head.lower().partition(_LENGTH)
    return int(rest.partition(b"\r\n")[0]) if found else 0
