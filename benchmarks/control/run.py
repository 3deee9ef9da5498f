"""One run: registers a fleet, measures routes in turn with the empty route, and loses all data."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from benchmarks.control import fleet
from benchmarks.control.empty import PATH as EMPTY_PATH
from benchmarks.control.figures import (
    ControlReport,
    RegistryFigures,
    load_figure,
    route_figure,
)
from benchmarks.control.generator import Answers, request, send
from benchmarks.control.servers import Measured, control_plane, empty_server
from benchmarks.cpu import cpu_seconds
from kvxfer.bench.machine import this_machine
from kvxfer.bench.targets import CONTROL, HEARTBEAT, OPEN_TRANSFER
from verify.processes.redis_server import RedisServer

EMPTY: Final = "empty route"
_CREATED, _OK, _GONE, _STALE = 201, 200, 204, 409
# The pause between two rounds, in which the work of the first one ends.
_PAUSE_SECONDS: Final = 0.05

Step = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    instances: int = 10_000
    registries: Sequence[str] = tuple(CONTROL)
    connections: int = 16
    rounds: int = 16
    seconds: float = 0.4
    """The seconds of each route in each round."""


def run_bench(settings: Settings, step: Step) -> ControlReport:
    started_at, machine = datetime.now(UTC).isoformat(timespec="seconds"), this_machine()
    with _generator() as load:
        figures = [_measure(name, settings, load, step) for name in settings.registries]
    return ControlReport(
        started_at=started_at,
        machine=machine,
        connections=settings.connections,
        rounds=settings.rounds,
        round_seconds=settings.seconds,
        registries=figures,
    )


Load = Callable[[int, Sequence[bytes], int, float | None], Answers]


@contextlib.contextmanager
def _generator() -> Iterator[Load]:
    """Gives send(), in one separate process."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        yield lambda *arguments: pool.submit(send, *arguments).result()


def _measure(registry: str, settings: Settings, load: Load, step: Step) -> RegistryFigures:
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer()) if registry == "redis" else None
        url = registry if redis is None else redis.url
        server = stack.enter_context(control_plane(url, secrets.token_hex(32)))
        empty = stack.enter_context(empty_server())

        before = server.resident_bytes, _used(redis)
        registrations = [fleet.register(index) for index in range(settings.instances)]
        joined = load(server.port, registrations, settings.connections, None).expect(_CREATED)
        after = server.resident_bytes, _used(redis)
        step(f"{registry}: {settings.instances} instances registered")

        epochs = fleet.epochs(joined)
        rounds = _rounds(registry, settings, load, (server, empty), epochs, step)
        routes = [
            route_figure(route, rounds[route], rounds[EMPTY], target)
            for route, target in CONTROL[registry].items()
        ]
        again = _lose_data(settings, load, server, redis, epochs, registrations)
        step(f"{registry}: registered again")
        return RegistryFigures(
            registry=registry,
            instances=settings.instances,
            routes=routes,
            empty=load_figure(rounds[EMPTY]),
            registration_seconds=joined.seconds,
            reregistration_seconds=again,
            process_bytes_per_instance=(after[0] - before[0]) / settings.instances,
            redis_bytes_per_instance=(
                None if redis is None else (after[1] - before[1]) / settings.instances
            ),
        )


def _rounds(
    registry: str,
    settings: Settings,
    load: Load,
    servers: tuple[Measured, Measured],
    epochs: dict[str, int],
    step: Step,
) -> dict[str, list[Answers]]:
    """Measures every route for a moment in each round, in rotating order."""
    server, empty = servers
    work = [
        (EMPTY, empty, [request("POST", EMPTY_PATH)], _OK),
        (OPEN_TRANSFER, server, [fleet.OPEN_TRANSFER], _CREATED),
        (HEARTBEAT, server, fleet.heartbeats(epochs), _OK),
    ]
    found: dict[str, list[Answers]] = {route: [] for route, *_ in work}
    for number in range(settings.rounds):
        turn = number % len(work)
        for route, measured, requests, status in [*work[turn:], *work[:turn]]:
            gc.collect()
            time.sleep(_PAUSE_SECONDS)
            cpu = cpu_seconds(measured)
            answers = load(measured.port, requests, settings.connections, settings.seconds)
            answers.server_cpu_seconds = cpu_seconds(measured) - cpu
            found[route].append(answers.expect(status))
            if route == OPEN_TRANSFER:
                given_back = fleet.releases(answers.bodies)
                load(server.port, given_back, settings.connections, None).expect(_GONE)
        step(f"{registry}: round {number + 1} of {settings.rounds}")
    return found


def _lose_data(
    settings: Settings,
    load: Load,
    server: Measured,
    redis: RedisServer | None,
    epochs: dict[str, int],
    registrations: Sequence[bytes],
) -> float:
    """Returns the seconds from the restart of the empty registry until every instance is in it."""
    pairs = zip(fleet.heartbeats(epochs), registrations, strict=True)
    requests = [each for pair in pairs for each in pair]
    if redis is None:
        server.restart()
    else:
        redis.kill()
        redis.start()
    answers = load(server.port, requests, settings.connections, None).expect(_STALE, _CREATED)
    if answers.statuses[_CREATED] != settings.instances:
        raise RuntimeError(f"{answers.statuses[_CREATED]} of {settings.instances} are back")
    return answers.seconds


def _used(redis: RedisServer | None) -> int:
    if redis is None:
        return 0
    with redis.client() as client:
        return int(client.info("memory")["used_memory"])
