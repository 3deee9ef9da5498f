"""A simulated fleet: instances on virtual time over one network, and the requests to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvxfer.ticket import Ticket, sign_ticket

from . import contents
from .control_plane import ControlPlane
from .defects import NONE, Defects
from .network import Network
from .oracle import Oracle
from .process import KEY, Instance, Process
from .promises import Promises
from .requests import Part, Request
from .world import Violation, World

TICKET_SECONDS = 30.0
_NEVER_SECONDS = 60.0
_HONEST = {
    "ok", "aborted", "died", "TransferCancelled", "TransferRefused", "LeaseExpired",
    "PeerLost", "PeerTimeout", "PeerRestarted", "ConnectFailed", "DeadlineExceeded",
    "TicketInvalid", "TicketExpired", "BlockPoolExhausted", "EngineClosed",
    "StaleCounter", "ControlPlaneUnavailable",
}  # fmt: skip


class SimulatedFleet(World):
    """The whole fleet of one seed. Its owner drives it with run_until()."""

    def __init__(self, seed: int, defects: Defects = NONE, trace: bool = False) -> None:
        super().__init__(seed, defects, trace=trace)
        self.oracle = Oracle(self)
        self.network = Network(self)
        self.control_plane = ControlPlane(self)
        self.counts[self.model] += 1
        self.requests: list[Request] = []
        self.instances: list[Instance] = []
        self.processes: list[Process] = []
        self.steps = 0
        self._dead: list[Process] = []
        self._starts = 0
        self._open = 0
        self.promises = Promises(self, self.network)
        for role, layout in self.layouts.items():
            self.counts["pipeline stages"] += layout.pp_size > 1
            self.instances += [Instance(f"{role.value}{index}", role, layout) for index in range(2)]

    # --- time

    def run_until(self, done: Callable[[], bool], within: float = _NEVER_SECONDS) -> None:
        """Runs all due events, in random order if there are several, and lets time pass."""
        clock, end = self.clock, self.clock.now + within
        due: list[Process | None] = []
        while not done():
            self.steps += 1
            due.clear()
            now, following = clock.now, clock.due_at()
            if following <= now:
                due.append(None)
            for process in self.processes:
                if process.runs:
                    at = process.loop.due_at()
                    if at <= now:
                        due.append(process)
                    elif at < following:
                        following = at
            if due:
                self._run(due[0] if len(due) == 1 else self.rng.choice(due))
                if self.violations:
                    raise Violation(self.violations[0])
            elif following > end:
                raise Violation(f"it did not finish within {within} s of virtual time")
            else:
                clock.now = following

    def _run(self, process: Process | None) -> None:
        if process is None:
            self.clock.happen()
            return
        self.note("runs", lambda: process.name)
        process.loop.run_due()
        if process.loop.problems:
            raise Violation(f"{process.name}: {process.loop.problems[0]}")

    @property
    def fingerprint(self) -> tuple[Any, ...]:
        """A digest that differs if anything in the run differs."""
        return self.steps, self.clock.events, self.clock.now, self.rng.random()

    # --- instances

    def start(self, instance: Instance) -> None:
        """Starts the processes of an instance that has none, under its epoch."""
        instance.ranks = []
        for rank in range(instance.layout.num_ranks):
            self._starts += 1
            layout = instance.layout.of_rank(rank)
            process = Process(self, self.control_plane, instance, layout, self._starts)
            instance.ranks.append(process)
            self.network.hosts[process.name] = process
        self.processes = [rank for instance in self.instances for rank in instance.ranks]

    def kill(self, processes: Sequence[Process], silently: bool) -> None:
        for process in processes:
            if process.alive:
                self.note("killed", lambda process=process: process.name)
                process.kill(silently)
                self.network.killed(process, silently)
                self._dead.append(process)
                for part in self.parts_of(process):
                    part.outcome = "died"
                    self.ended(part)

    def restart(self, instance: Instance) -> None:
        """Starts new processes at the same addresses, with a new registration."""
        self.kill(instance.ranks, silently=False)
        instance.epoch += 1
        self.start(instance)

    def reregister(self, instance: Instance) -> None:
        """Gives the same processes a new epoch: their lease at the control plane was lost."""
        instance.epoch += 1
        for process in instance.ranks:
            process.epochs.append(instance.epoch)
        first = instance.ranks[0]  # the others get it from this one
        self._tell(first, lambda epoch=instance.epoch: first.endpoint.set_epoch(epoch))  # type: ignore[misc]

    def _tell(self, process: Process, event: Callable[[], object]) -> None:
        """Calls the process, as over HTTP: the call runs in the process's loop."""
        process.loop.call_soon(event)

    # --- requests

    def request(self, prefill: Instance, decode: Instance, **how: Any) -> Request:
        """Makes a new request. Its parts are not sent yet."""
        rng = self.rng
        bearer = how.pop("bearer", False)
        number = len(self.requests)
        ticket = Ticket(
            transfer_id=f"t{number}",
            request_id=f"r{number}",
            prefill_id=prefill.name,
            prefill_epoch=prefill.epoch,
            decode_id="" if bearer else decode.name,
            decode_epoch=0 if bearer else decode.epoch,
            expires_at=self.clock.wall() + how.pop("ticket_seconds", TICKET_SECONDS),
            issued_at=self.clock.wall(),
        )
        tokens = rng.randint(1, 8)
        request = Request(
            ticket=ticket,
            token=sign_ticket(ticket, KEY),
            prefill_addresses=[rank.address for rank in prefill.ranks],
            decode_address=decode.ranks[0].address,
            tokens=tokens,
            contents=contents.make(ticket.transfer_id, prefill.layout, tokens),
            window=rng.randint(1, 3),
            **how,
        )
        self.requests.append(request)
        self.oracle.tickets[request.id] = ticket
        if request.fault == "byte changed":
            self.oracle.to_damage.add(request.id)
        self.control_plane.open(request.id)
        return request

    def send(self, request: Request, instance: Instance) -> None:
        """Sends the request to the ranks of an instance that run."""
        for process in instance.ranks:
            if not (process.alive and process.ready):
                self.counts["request to no process"] += 1
                continue
            part = Part(request, process, self, self.oracle, self.ended)
            request.parts.append(part)
            self._open += 1
            part.begin()

    def abort(self, part: Part) -> None:
        """Aborts a part of a request: its client has left, or its engine gives up the request."""
        if not part.outcome and part.task is not None:
            self.note("aborted", lambda: f"{part.request.id} at {part.process.name}")
            part.task.cancel()
            self.promises.has_to_end(part)

    def ended(self, part: Part) -> None:
        """Handles the end of a part of a request. The other side must learn of it in time."""
        self._open -= 1
        self.counts[f"{part.side.value}: {part.outcome}"] += 1
        self.note("ended", lambda: f"{part.request.id} at {part.process.name}: {part.outcome}")
        damaged = part.outcome == "ChecksumMismatch" and part.request.id in self.oracle.damaged
        self.counts["byte changed"] += damaged
        self.require(damaged or part.outcome in _HONEST, f"{part.process.name}: {part.error!r}")
        if all(each.outcome for each in part.request.parts):
            # The router is told of the end, sooner or later.
            seconds = self.rng.choice([0.0, 1.0]) * self.rng.uniform(0, 0.1)
            self.clock.after(seconds, lambda: self.control_plane.end(part.request.id))
        if part.outcome == "ok" or part.complete:
            return
        at = self.clock.now
        for other in part.request.parts:
            if other.process.instance is part.process.instance:
                # Ranks learn of each other from their engine.
                self.clock.after(
                    self.rng.uniform(0, 0.05),
                    lambda other=other: self.abort(other),  # type: ignore[misc]
                    other.process,
                )
            elif (
                other.side is not part.side
                and not other.over_with(part)
                and part.linked_with(other)
            ):
                self.counts["has to be told"] += 1
                self.promises.has_to_hear(part, other, at)

    def stop(self, process: Process) -> None:
        """Stops a process. Its peers must learn of it if it lasts."""
        process.stop()
        self.network.stopped(process)
        at = self.clock.now
        for part in self.parts_of(process):
            for other in part.request.parts:
                if (
                    other.side is not part.side
                    and not other.over_with(part)
                    and part.linked_with(other)
                ):
                    self.promises.has_to_hear(part, other, at)

    def wake(self, process: Process) -> None:
        process.wake()
        self.network.woken(process)

    def parts_of(self, process: Process) -> list[Part]:
        return [
            part
            for request in self.requests
            for part in request.parts
            if part.process is process and not part.outcome
        ]

    @property
    def idle(self) -> bool:
        """Whether no request is being served."""
        return self._open == 0

    def close(self) -> None:
        """Makes every process leave in good order."""
        for process in self.processes:
            if process.alive:
                self._tell(process, process.leave)
        self.run_until(lambda: all(p.left for p in self.processes if p.alive))
        for process in self.processes:
            if not process.alive:
                continue
            tasks = process.loop.tasks
            self.require(not tasks, f"{process.name} has left with {tasks}")
            process.loop.close()

    def bury(self) -> None:
        """Frees all processes that still have resources, so that no part of the fleet runs
        later."""
        for process in dict.fromkeys([*self._dead, *self.processes]):
            process.alive = False
            if not process.loop.is_closed():
                self.network.bury(process)
                process.bury()
