"""A fleet for ten minutes on real Redis, with two replicas: heartbeats with traffic and adapters,
cached prefixes, a replica that is killed, and half of the fleet cut off.

It prints figures, and has no targets: two cores carry the replicas, Redis and the fleet together.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.table import Table

from benchmarks.control import fleet
from benchmarks.control.generator import request
from benchmarks.control.servers import Measured
from benchmarks.cpu import cpu_seconds
from kvxfer.cli.output import err, out
from verify.polling import eventually
from verify.processes.redis_server import RedisServer

_LEASE: Final = 30.0
_INTERVAL: Final = _LEASE / 3
_ADAPTERS: Final = 1000
_TOKENS: Final = 450_000
_TOKENS_PER_HASH: Final = 64
_PER_UPDATE: Final = 1024
_CONNECTIONS: Final = 8  # to each replica


@dataclass(slots=True)
class Instance:
    index: int
    epoch: int = 0
    due: float = 0.0
    silent: bool = False

    @property
    def name(self) -> str:
        return fleet.instance_id(self.index)

    def heartbeat(self) -> bytes:
        load = {
            "running": self.index % 5,
            "free_blocks": 8192 - self.index % 999,
            "models": [fleet.MODEL, f"adapter-{self.index % _ADAPTERS}"],
            "sent": [
                {
                    "to": fleet.instance_id(self.index + n),
                    "fabric": "verbs",
                    "bytes_per_second": 1e9,
                }
                for n in range(1, 5)
            ],
        }
        path = f"/v1/instances/{self.name}/heartbeat"
        return request("PUT", path, {"epoch": self.epoch, "load": load})

    def publish(self, hashes: list[str]) -> bytes:
        body = {"epoch": self.epoch, "added": hashes}
        return request("POST", f"/v1/instances/{self.name}/blocks", body)


class Replica:
    """Connections of the fleet to one control plane."""

    def __init__(self, url: str, figures: Path) -> None:
        self.figures = figures
        self.server = _serve(url, figures)
        self.idle: asyncio.Queue[_Wire] = asyncio.Queue()

    async def open(self) -> None:
        for _ in range(_CONNECTIONS):
            wire = _Wire(*await asyncio.open_connection("127.0.0.1", self.server.port))
            self.idle.put_nowait(wire)

    async def ask(self, content: bytes) -> tuple[int, bytes]:
        """Sends a request. Raises OSError if the replica is gone."""
        wire = await self.idle.get()
        try:
            return await wire.ask(content)
        except (OSError, EOFError, ValueError) as error:
            raise ConnectionError(str(error)) from error
        finally:
            self.idle.put_nowait(wire)  # one that is broken fails again


@dataclass(slots=True)
class _Wire:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, content: bytes) -> tuple[int, bytes]:
        self.writer.write(content)
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        return int(head[9:12]), await self.reader.readexactly(int(length or 0))


def _serve(redis: str, figures: Path) -> Measured:
    options = ["--port", "0", "--json", "--registry", redis, "--lease-seconds", str(_LEASE)]
    variables = {"KVXFER_CLUSTER_KEY": "ab" * 32, "KVXFER_TOKENS_FILE": ""}
    return Measured(
        *("benchmarks.control.watched", "serve", *options),
        environment={**variables, "KVXFER_BENCH_TURNS": str(figures)},
    )


class Run:
    def __init__(self, options: argparse.Namespace, redis: RedisServer, folder: Path) -> None:
        self.options = options
        self.redis = redis
        self.replicas = [Replica(redis.url, folder / f"turns-{n}") for n in range(2)]
        self.fleet = [Instance(index) for index in range(options.instances)]
        self.statuses: Counter[str] = Counter()
        self.latencies: list[float] = []
        self.figures: dict[str, Any] = {"instances": options.instances, "seconds": options.seconds}

    async def run(self) -> None:
        for replica in self.replicas:
            await replica.open()
        began = time.monotonic()
        await self._each(self._register)
        self.figures["joined, s"] = round(time.monotonic() - began, 1)
        for each in self.fleet:
            each.due = time.monotonic() + random.uniform(0, _INTERVAL)
        end = time.monotonic() + self.options.seconds
        beating = [asyncio.create_task(self._beat(n, end)) for n in range(2 * _CONNECTIONS)]
        await self._phases(end)
        await asyncio.gather(*beating)
        await self._conclude()

    async def _phases(self, end: float) -> None:
        share = self.options.seconds / 10
        await self._steady("alone", share)
        self.figures["Redis, MB, without prefixes"] = self._memory()
        await self._prefixes(5 * share)
        await self._kill_one()
        await self._cut_off(end)

    async def _steady(self, name: str, seconds: float) -> None:
        beats, cpu = self.statuses["heartbeat 200"], sum(map(_cpu, self.replicas))
        await asyncio.sleep(seconds)
        beats = self.statuses["heartbeat 200"] - beats
        cpu = sum(map(_cpu, self.replicas)) - cpu
        self.figures[f"heartbeats per second, {name}"] = round(beats / seconds)
        self.figures[f"heartbeats per second of a core, {name}"] = round(beats / cpu)

    async def _prefixes(self, seconds: float) -> None:
        """Publishes prefixes. Half of the hashes of each instance are shared by all."""
        hashes = _TOKENS // _TOKENS_PER_HASH
        shared = [_hash() for _ in range(hashes // 2)]
        chosen = self.fleet[: self.options.cached]
        before = self._used()
        began = time.monotonic()
        for number, each in enumerate(chosen):
            mine = [*shared, *(_hash() for _ in range(hashes - len(shared)))]
            for start in range(0, hashes, _PER_UPDATE):
                update = each.publish(mine[start : start + _PER_UPDATE])
                await self._ask(each, "blocks", update)
            behind = began + seconds * (number + 1) / len(chosen) - time.monotonic()
            await asyncio.sleep(max(behind, 0))
        taken = self._used() - before
        log = self._log()
        self.figures["prefixes: instances"] = len(chosen)
        self.figures["prefixes: seconds"] = round(time.monotonic() - began)
        self.figures["prefixes: bytes in Redis per cached token"] = round(
            taken / len(chosen) / _TOKENS, 3
        )
        self.figures["the log, MB"] = round(log / 1e6, 1)

    async def _kill_one(self) -> None:
        replica = self.replicas[1]
        replica.server.kill()
        killed = time.monotonic()
        self.replicas[1] = fresh = await asyncio.to_thread(
            Replica, self.redis.url, replica.figures.with_name("turns-2")
        )
        await fresh.open()
        await eventually(lambda: _is_ready(fresh))
        self.figures["killed replica ready again, s"] = round(time.monotonic() - killed, 1)
        await self._steady("with prefixes, after the kill", self.options.seconds / 10)

    async def _cut_off(self, end: float) -> None:
        """Silences half of the fleet for longer than a lease; then all come back at once."""
        half = self.fleet[::2]
        for each in half:
            each.silent = True
        await asyncio.sleep(_LEASE + _INTERVAL)
        now = time.monotonic()
        for each in half:
            each.silent, each.due = False, now
        await eventually(lambda: all(each.due > now for each in half), end - now, pause=0.1)
        self.figures["half of the fleet back, s"] = round(time.monotonic() - now, 1)

    async def _each(self, step: Any) -> None:
        waiting = iter(self.fleet)

        async def some() -> None:
            for each in waiting:
                await step(each)

        await asyncio.gather(*(some() for _ in range(2 * _CONNECTIONS)))

    async def _register(self, each: Instance) -> None:
        body = await self._ask(each, "register", fleet.register(each.index))
        each.epoch = msgspec.json.decode(body)["epoch"]

    async def _beat(self, share: int, end: float) -> None:
        mine = self.fleet[share :: 2 * _CONNECTIONS]
        while (now := time.monotonic()) < end:
            due = [each for each in mine if each.due <= now and not each.silent]
            for each in due:
                began = time.monotonic()
                body = await self._ask(each, "heartbeat", each.heartbeat())
                self.latencies.append(time.monotonic() - began)
                if b"stale-epoch" in body:
                    await self._register(each)
                each.due = max(each.due + _INTERVAL, time.monotonic())
            await asyncio.sleep(0.01)

    async def _ask(self, each: Instance, what: str, content: bytes) -> bytes:
        """Asks the instance's replica, then the other."""
        for attempt in range(2):
            replica = self.replicas[(each.index + attempt) % 2]
            try:
                status, body = await replica.ask(content)
            except OSError:
                self.statuses[f"{what} without an answer"] += 1
                continue
            self.statuses[f"{what} {status}"] += 1
            return body
        return b""

    async def _conclude(self) -> None:
        _, text = await self.replicas[0].ask(request("GET", "/metrics"))
        lost = text.partition(b"\nkvxfer_leases_expired_total ")[2].partition(b"\n")[0]
        self.figures["leases expired"] = int(float(lost or 0))
        self.figures["of them cut off"] = len(self.fleet[::2])
        for n, replica in enumerate(self.replicas):
            turns = replica.figures.read_bytes()
            cpu, late = msgspec.json.decode(turns, type=tuple[list[float], list[float]])
            self.figures[f"replica {n}: processor between looks 5 ms apart, ms: p99, max"] = _ms(
                cpu
            )
            self.figures[f"replica {n}: late by, ms: p99, max"] = _ms(late)
            self.figures[f"replica {n}: resident, MB"] = round(replica.server.resident_bytes / 1e6)
        p50 = round(1000 * statistics.median(self.latencies), 1)
        self.figures["heartbeat, ms: p50, p99, max"] = [p50, *_ms(self.latencies)]
        self.figures["answers"] = dict(self.statuses)

    def _used(self) -> int:
        """Returns the memory beside the log, whose size is bounded."""
        with self.redis.client() as client:
            return int(client.info("memory")["used_memory"]) - self._log()

    def _log(self) -> int:
        with self.redis.client() as client:
            return int(client.memory_usage("kvxfer:log", samples=0) or 0)

    def _memory(self) -> float:
        with self.redis.client() as client:
            return round(client.info("memory")["used_memory"] / 1e6, 1)


async def _is_ready(replica: Replica) -> bool:
    status, _ = await replica.ask(request("GET", "/readyz"))
    return status == 200


def _cpu(replica: Replica) -> float:
    return cpu_seconds(replica.server)


def _hash() -> str:
    return f"{random.getrandbits(64):016x}"


def _p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def _ms(values: list[float]) -> list[float]:
    return [round(1000 * each, 1) for each in (_p99(values), max(values))]


@contextlib.contextmanager
def _running(options: argparse.Namespace) -> Iterator[Run]:
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer() as redis,
        contextlib.ExitStack() as stack,
    ):
        run = Run(options, redis, Path(folder))
        stack.callback(lambda: [replica.server.close() for replica in run.replicas])
        yield run


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench SUITE=control-endurance", description=__doc__)
    parser.add_argument("--instances", type=int, default=10_000)
    parser.add_argument("--cached", type=int, default=1000, help="instances with whole caches")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with _running(options) as run, err.status(f"{options.seconds:.0f} s"):
        asyncio.run(run.run())
    if options.json:
        out.print_json(data=run.figures)
        return
    table = Table("figure", "value")
    for name, value in run.figures.items():
        table.add_row(name, str(value))
    out.print(table)


if __name__ == "__main__":
    main()
