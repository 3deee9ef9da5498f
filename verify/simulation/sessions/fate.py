"""The faults of a fleet in one seed: of its requests and of its machines."""

from __future__ import annotations

import collections
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvxfer.clock import CLOCK_LEEWAY
from kvxfer.instances import Role

from .defects import NONE, Defects
from .fleet import TICKET_SECONDS, SimulatedFleet
from .installation import installed
from .process import Instance
from .requests import Request
from .world import Violation

FAULTS: Final = (
    "killed", "rank killed", "host lost", "stopped briefly", "stopped long", "connection reset",
    "half open", "cut", "cut one way", "held up", "registered anew", "left",
    "control plane unavailable", "wall clock wrong",
)  # fmt: skip
REQUEST_FAULTS: Final = (
    "prefill aborted", "decode aborted", "prefill never comes", "decode never comes", "released",
    "sent twice", "two bearers", "byte changed",
)  # fmt: skip

_ABORTS: Final = ("prefill aborted", "decode aborted")
_COUNTED_LATER: Final = (*_ABORTS, "byte changed")
_HOW: Final = ("", "", "bearer", "brokered", "by offer")
_BUSY_SECONDS = 0.2
_HEALED_SECONDS = 3.0


@dataclass(frozen=True)
class Outcome:
    """The outcome of one seed. `violation` is empty if every promise was kept."""

    seed: int
    violation: str
    counts: collections.Counter[str]
    fingerprint: tuple[Any, ...]
    trace: tuple[str, ...]


def simulate(seed: int, defects: Defects = NONE, *, trace: bool = False) -> Outcome:
    """Runs the whole life of a fleet."""
    fleet = SimulatedFleet(seed, defects, trace)
    violation = ""
    with installed(fleet):
        try:
            _live(fleet)
        except Violation as broken:
            violation = str(broken)
        except Exception as error:
            violation = f"{type(error).__name__}: {error}, in {traceback.format_exc()}"
        finally:
            fingerprint = fleet.fingerprint
            lines = tuple(fleet.trace or ())
            fleet.bury()
    return Outcome(seed, violation, fleet.counts, fingerprint, lines)


def _live(fleet: SimulatedFleet) -> None:
    for instance in fleet.instances:
        fleet.start(instance)
    fleet.run_until(lambda: all(instance.ready for instance in fleet.instances))
    fleet.promises.look_at_leases(fleet.requests)
    fate = Fate(fleet)
    fate.plan()
    fleet.run_until(lambda: fate.over and fleet.idle)
    fate.heal()
    fleet.promises.check_nothing_left(fleet.processes)
    fate.probe()
    fleet.promises.check_nothing_left(fleet.processes)
    fleet.promises.check_forgotten(fleet.processes, fleet.requests[-1], transfers=1)
    fleet.close()


class Fate:
    """The events of a fleet and their times, planned from its seed."""

    def __init__(self, fleet: SimulatedFleet) -> None:
        self._fleet = fleet
        self._rng = fleet.rng
        self._pending = 0

    @property
    def over(self) -> bool:
        return self._pending == 0

    def plan(self) -> None:
        rng = self._rng
        for _ in range(rng.randint(3, 8)):
            self._at(rng.uniform(0, _BUSY_SECONDS), self._request)
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            fault = rng.choice(FAULTS)
            self._at(rng.uniform(0, 1.5 * _BUSY_SECONDS), lambda fault=fault: self._fault(fault))

    def heal(self) -> None:
        """Makes every process run again, and waits until cut connections are detected."""
        fleet = self._fleet
        for instance in fleet.instances:
            for process in instance.ranks:
                process.clock.wall_wrong = 0.0
                if process.alive and process.stopped_at is not None:
                    fleet.wake(process)
            if not all(process.alive for process in instance.ranks):
                fleet.restart(instance)
        self._wait(_HEALED_SECONDS)

    def probe(self) -> None:
        """Checks that a pair of instances works, after all faults and the end of every ticket."""
        fleet = self._fleet
        self._wait(TICKET_SECONDS + CLOCK_LEEWAY)
        prefill, decode = (
            self._rng.choice(self._instances(role)) for role in (Role.PREFILL, Role.DECODE)
        )
        request = fleet.request(prefill, decode, lease_seconds=5.0)
        fleet.send(request, prefill)
        fleet.send(request, decode)
        fleet.run_until(lambda: fleet.idle)
        outcomes = {part.process.name: part.outcome for part in request.parts}
        fleet.require(
            set(outcomes.values()) == {"ok"},
            f"after all faults {request.id} ends with {outcomes}",
        )
        self._wait(0.1)

    def _wait(self, seconds: float) -> None:
        until = self._fleet.clock.now + seconds
        self._at(seconds, lambda: None)
        self._fleet.run_until(lambda: self._fleet.clock.now >= until)

    def _at(self, seconds: float, event: Callable[[], None]) -> None:
        self._pending += 1

        def happen() -> None:
            self._pending -= 1
            event()

        self._fleet.clock.after(seconds, happen)

    def _instances(self, role: Role) -> list[Instance]:
        return [instance for instance in self._fleet.instances if instance.role is role]

    # --- requests

    def _request(self) -> None:
        fleet, rng = self._fleet, self._rng
        fault = rng.choice(REQUEST_FAULTS) if rng.random() < 0.35 else ""
        if fault == "byte changed" and fleet.checksums is None:
            fault = ""  # without checksums it is not detected
        prefill = rng.choice(self._instances(Role.PREFILL))
        decode = rng.choice(self._instances(Role.DECODE))
        alone = prefill.layout.num_ranks == decode.layout.num_ranks == 1
        how = "bearer" if fault == "two bearers" else rng.choice(_HOW)
        if how == "brokered" and not alone:
            how = ""
        request = fleet.request(
            prefill,
            decode,
            bearer=how == "bearer",
            brokered=how == "brokered",
            by_offer=how == "by offer",
            lease_seconds=rng.choice([0.05, 1.0, 5.0]),
            ticket_seconds=rng.choice([0.05 - CLOCK_LEEWAY] + [TICKET_SECONDS] * 3),
            fault=fault,
        )
        fleet.counts["requests"] += 1
        fleet.counts[how or "direct"] += 1
        if fault and fault not in _COUNTED_LATER:
            fleet.counts[fault] += 1
        fleet.note("request", lambda: f"{request.id} {prefill.name} {decode.name} {how} {fault}")
        if fault != "prefill never comes":
            self._send(request, prefill)
        if fault != "decode never comes":
            self._send(request, decode)
        if fault == "sent twice":
            self._send(request, rng.choice([prefill, decode]))
        if fault == "two bearers":
            [other] = [each for each in self._instances(Role.DECODE) if each is not decode]
            self._send(request, other)
        if fault in _ABORTS:
            of = prefill if fault == "prefill aborted" else decode
            self._at(rng.uniform(0, 0.08), lambda: self._abort(request, of))

    def _send(self, request: Request, to: Instance) -> None:
        seconds = self._rng.choice([0.0, 1.0]) * self._rng.uniform(0, 0.05)
        self._at(seconds, lambda: self._fleet.send(request, to))

    def _abort(self, request: Request, of: Instance) -> None:
        for part in request.parts:
            if part.process.instance is of and not part.outcome:
                self._fleet.counts[request.fault] += 1
                self._fleet.abort(part)

    # --- faults

    def _fault(self, what: str) -> None:
        fleet, rng = self._fleet, self._rng
        instance = rng.choice(fleet.instances)
        links = fleet.network.live_links()
        link = rng.choice(links) if links else None
        match what:
            case "killed" | "rank killed" | "host lost" | "left":
                if not instance.ready:
                    return
                one = rng.randrange(len(instance.ranks))
                some = instance.ranks[one : one + 1] if what == "rank killed" else instance.ranks
                if what == "left":
                    for process in some:
                        process.loop.call_soon(process.leave)
                else:
                    fleet.kill(some, silently=what == "host lost")
                self._at(rng.uniform(0.005, 0.3), lambda: self._restart(instance))
            case "stopped briefly" | "stopped long":
                process = rng.choice(instance.ranks)
                if not (process.runs and process.ready):
                    return
                fleet.stop(process)
                long = what == "stopped long"
                seconds = rng.uniform(0.8, 2.5) if long else rng.uniform(0.001, 0.4)
                self._at(seconds, lambda: self._wake(process))
            case "registered anew":
                if not instance.ready:
                    return
                fleet.reregister(instance)
            case "wall clock wrong":
                clock = rng.choice(instance.ranks).clock
                clock.wall_wrong = rng.uniform(-60, 60)
                if rng.random() < 0.7:
                    self._at(rng.uniform(0.02, 0.3), lambda: setattr(clock, "wall_wrong", 0.0))
            case "control plane unavailable":
                fleet.control_plane.away = True
                self._at(rng.uniform(0.01, 1.0), self._control_plane_is_back)
            case _ if link is None:
                return
            case "connection reset":
                fleet.network.reset(link)
            case "half open":
                fleet.network.half_open(link, rng.randrange(2))
            case "cut":
                fleet.network.cut(link, None)
            case "cut one way":
                fleet.network.cut(link, rng.randrange(2))
            case "held up":
                link.hold(rng.uniform(0.01, 0.4))
        fleet.counts[what] += 1
        fleet.note("fault", lambda: f"{what}: {instance.name}, {link and link.ends[0].name}")

    def _restart(self, instance: Instance) -> None:
        if not any(process.alive and process.stopped_at is not None for process in instance.ranks):
            self._fleet.restart(instance)

    def _control_plane_is_back(self) -> None:
        self._fleet.control_plane.away = False

    def _wake(self, process: Any) -> None:
        if process.alive and process.stopped_at is not None:
            self._fleet.note("woken", lambda: process.name)
            self._fleet.wake(process)
