"""A simulated fleet: instances on virtual time over one network, the requests to them, and what
has to be true in between and at the end."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import jwt

import kvxfer.engine.engine
import kvxfer.ticket
from kvxfer.instances import Role
from kvxfer.kv.layout import KvLayout
from kvxfer.ticket import Ticket, sign_ticket

from . import contents, native
from .clock import Clock
from .control_plane import ControlPlane
from .defects import NONE, Defects
from .network import Network
from .oracle import Oracle, Violation
from .process import KEY, Process
from .requests import Part, Request

TICKET_SECONDS = 30.0
TOLD_SECONDS = 1.0
_LEASE_SLACK = 2.0
_LOOK_SECONDS = 0.25
_NEVER_SECONDS = 60.0
_MODEL = KvLayout(num_layers=2, num_kv_heads=2, head_size=4, dtype="uint8", block_size=2)
_HONEST = {
    "ok", "aborted", "died", "TransferCancelled", "TransferRefused", "LeaseExpired", "PeerLost", "PeerTimeout",
    "PeerRestarted", "ConnectFailed", "DeadlineExceeded", "TicketInvalid", "TicketExpired",
    "BlockPoolExhausted", "EngineClosed", "StaleCounter", "UnknownPeer", "ControlPlaneUnavailable",
}  # fmt: skip


@dataclass(eq=False)
class Instance:
    """Ranks with one id and, at any time, one epoch."""

    name: str
    role: Role
    layout: KvLayout
    epoch: int = 1
    ranks: list[Process] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        return all(rank.runs and rank.ready for rank in self.ranks)


class Fleet:
    """Everything of one seed. Whoever owns it drives it by run_until()."""

    def __init__(self, seed: int, defects: Defects = NONE, trace: bool = False) -> None:
        self.rng = random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.clock = Clock()
        self.trace: list[str] | None = [] if trace else None
        self.oracle = Oracle()
        self.network = Network(
            self.clock, self.rng, self.oracle, defects, self.counts, self.note
        )
        self.control_plane = ControlPlane(self.network)
        self.num_blocks = self.rng.choice([4, 6, 12])
        self.lease_seconds = self.rng.choice([0.3, 2.0, 5.0])
        self.requests: list[Request] = []
        self.instances: list[Instance] = []
        self.processes: list[Process] = []
        self.steps = 0
        self._dead: list[Process] = []
        self._starts = 0
        self._open = 0
        self._log = _Log(self)
        for role in (Role.PREFILL, Role.DECODE):
            layout = replace(
                _MODEL,
                block_size=self.rng.choice([2, 2, 4]),
                order=self.rng.choice(["NHD", "HND"]),
                kv=self.rng.choice(["separate", "interleaved"]),
                tp_size=self.rng.choice([1, 1, 1, 2]),
            )
            self.instances += [
                Instance(f"{role.value}{index}", role, layout) for index in range(2)
            ]

    # --- time

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """The real code runs on this fleet's time and over its engines."""
        shim = native.module(lambda options: self._native(options.name))
        logger = logging.getLogger("kvxfer")
        level = logger.level
        with (
            self.clock.installed(),
            mock.patch.object(kvxfer.engine.engine, "native", shim),
            mock.patch.object(kvxfer.engine.engine, "Memory", native.Memory),
            mock.patch.object(kvxfer.ticket, "jwt", _signatures),
            self.network.defects.installed(),
        ):
            logger.addHandler(self._log)
            logger.setLevel(logging.WARNING)
            try:
                yield
            finally:
                logger.removeHandler(self._log)
                logger.setLevel(level)

    def run_until(self, done: Callable[[], bool], within: float = _NEVER_SECONDS) -> None:
        """Runs whatever is due, in a random order where several are, and lets time pass."""
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
                if self.oracle.violations:
                    raise Violation(self.oracle.violations[0])
            elif following > end:
                raise Violation(f"within {within} s of virtual time nothing came to an end")
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

    def note(self, what: str, of: Callable[[], str]) -> None:
        """A line of the trace, which is made only where there is one."""
        if self.trace is not None:
            self.trace.append(f"{self.clock.now - 1000:.9f} {what}: {of()}")

    @property
    def fingerprint(self) -> tuple[Any, ...]:
        """Differs where anything at all went another way."""
        return self.steps, self.clock.events, self.clock.now, self.rng.random()

    # --- instances

    def start(self, instance: Instance) -> None:
        """The processes of an instance that has none, under its epoch."""
        instance.ranks = []
        for rank in range(instance.layout.tp_size):
            self._starts += 1
            layout = replace(instance.layout, tp_rank=rank)
            process = Process(self, instance, layout, self._starts)
            instance.ranks.append(process)
            self.network.hosts[process.name] = process
        self.processes = [rank for instance in self.instances for rank in instance.ranks]

    def kill(self, processes: Sequence[Process], silently: bool) -> None:
        for process in processes:
            if process.alive:
                self.note("killed", lambda process=process: process.name)
                process.kill(silently)
                self._dead.append(process)
                for part in self.parts_of(process):
                    part.outcome = "died"
                    self.ended(part)

    def restart(self, instance: Instance) -> None:
        """Other processes at the same addresses, registered anew."""
        self.kill(instance.ranks, silently=False)
        instance.epoch += 1
        self.start(instance)

    def reregister(self, instance: Instance) -> None:
        """The control plane has lost the lease: the same processes under another epoch."""
        instance.epoch += 1
        for process in instance.ranks:
            process.epochs.append(instance.epoch)
            self._tell(process, lambda process=process: process.endpoint.set_epoch(instance.epoch))  # type: ignore[misc]

    def _native(self, name: str) -> native.NativeEngine:
        return native.NativeEngine(self.network, self.network.hosts[name])

    def _tell(self, process: Process, event: Callable[[], object]) -> None:
        """Over HTTP, or whatever it is: in the process's loop."""
        process.loop.call_soon(event)

    # --- requests

    def request(self, prefill: Instance, decode: Instance, **how: Any) -> Request:
        """A new request, whose parts are not sent yet."""
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
        )
        tokens = rng.randint(1, 8)
        request = Request(
            ticket=ticket,
            token=sign_ticket(ticket, KEY),
            prefill_addresses=[rank.address for rank in prefill.ranks],
            decode_address=decode.ranks[0].address,
            tokens=tokens,
            contents=contents.make(ticket.transfer_id, _MODEL, tokens),
            **how,
        )
        self.requests.append(request)
        self.oracle.requests[request.id] = request
        self.control_plane.open(request.id)
        return request

    def send(self, request: Request, instance: Instance) -> None:
        """The request reaches an instance, if there is one."""
        for process in instance.ranks:
            if not (process.alive and process.ready):
                self.counts["request to nobody"] += 1
                continue
            part = Part(request, process, self)
            request.parts.append(part)
            self._open += 1
            part.begin()

    def abort(self, part: Part) -> None:
        """Its client has gone, or its engine gives it up."""
        if not part.outcome and part.task is not None:
            self.counts[f"{part.side.value} aborted"] += 1
            self.note("aborted", lambda: f"{part.request.id} at {part.process.name}")
            part.task.cancel()

    def ended(self, part: Part) -> None:
        """A part of a request has ended: the other side has to hear of it in time."""
        self._open -= 1
        self.counts[f"{part.side.value}: {part.outcome}"] += 1
        self.note("ended", lambda: f"{part.request.id} at {part.process.name}: {part.outcome}")
        self.oracle.require(part.outcome in _HONEST, f"{part.process.name}: {part.error!r}")
        if all(each.outcome for each in part.request.parts):
            # The router is told of the end, sooner or later.
            seconds = self.rng.choice([0.0, 1.0]) * self.rng.uniform(0, 0.1)
            self.clock.after(seconds, lambda: self.control_plane.end(part.request.id))
        if part.outcome == "ok" or part.complete:
            return
        at = self.clock.now
        for other in part.request.parts:
            if other.process.instance is part.process.instance:
                # Ranks hear of each other from their engine.
                self.clock.after(
                    self.rng.uniform(0, 0.05),
                    lambda other=other: self.abort(other),  # type: ignore[misc]
                    other.process,
                )
            elif other.side is not part.side and not other.over and part.linked_with(other):
                self.counts["has to be told"] += 1
                self._look_after(part, other, at)

    def stopped(self, process: Process) -> None:
        """A process is stopped: so long, and its peers take it for lost."""
        at = self.clock.now
        for part in self.parts_of(process):
            for other in part.request.parts:
                if other.side is not part.side and not other.over and part.linked_with(other):
                    self._look_after(part, other, at)

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

    # --- what has to be true

    def _look_after(self, part: Part, other: Part, since: float) -> None:
        """`part` has ended or been stopped: `other` knows of it soon, while it runs at all."""
        process = other.process
        disturbed = [
            link.disturbed_at
            for link in self.network.links
            if {end.native.process for end in link.ends} == {process, part.process}
        ]
        told_by = max([since, process.woke_at, *disturbed]) + TOLD_SECONDS

        def look() -> None:
            if other.over or not process.runs or (not part.outcome and part.process.runs):
                return
            if process.woke_at > since or self.clock.now < told_by - 1e-9:
                self._look_after(part, other, max(since, process.woke_at))
                return
            self.oracle.require(
                False,
                f"{TOLD_SECONDS} s after the end of {part.request.id} at {part.process.name} "
                f"({part.outcome or 'stopped'}), {process.name} has not heard of it: its session "
                f"is {other.session.state}",
            )

        self.clock.after(max(told_by - self.clock.now, 0), look)

    def look_at_leases(self) -> None:
        """No session outlives its lease. Again and again."""
        late = self.__dict__.setdefault("_late", {})
        for request in self.requests:
            for part in request.parts:
                session = part.session
                if part.over or not part.process.runs or session.lease_remaining > 0.001:
                    late.pop(part, None)
                    continue
                since = max(late.setdefault(part, self.clock.now), part.process.woke_at)
                self.oracle.require(
                    self.clock.now - since < _LEASE_SLACK,
                    f"{request.id} at {part.process.name} is {session.state} long after its lease",
                )
        self.clock.after(_LOOK_SECONDS, self.look_at_leases)

    def check_forgotten(self, transfers: int) -> None:
        """What is remembered of tickets ends with them: those of so many transfers are left."""
        for process in self.processes:
            remembered = len(process.endpoint._ledger)
            if process.endpoint._ledger._used.keys() & {self.requests[-1].id}:
                self.oracle.require(
                    remembered <= transfers, f"{process.name} remembers {remembered} transfers"
                )

    def check_nothing_left(self) -> None:
        """After the last request: every block is free and nobody waits for anything."""
        for process in self.processes:
            process.pool.check()
            endpoint, engine = process.endpoint, process.engine
            pairs = list(endpoint._pairs)
            left = {
                "blocks": process.pool.num_blocks - process.pool.num_free,
                "prefill sessions": len(endpoint._rendezvous._sessions),
                "early offers": len(endpoint._rendezvous._early),
                "decode sessions": len(endpoint._decodes),
                "expectations": len(endpoint._expectations),
                "errands": len(endpoint._brokered._errands),
                "sessions of pairs": sum(len(pair.prefills) + len(pair.decodes) for pair in pairs),
                "expected offers": sum(
                    not expected.pair.peer.alive and expected.error is None
                    for expected in endpoint._expectations._expected.values()
                ),
                "counters": process.native.counters.live,
                "operations": sum(len(end.operations) for end in process.native.ends.values()),
                "operations of the front": len(engine._operations) + len(engine._finished_early),
                "revocations": len(engine._revoking),
                "pairs without a peer": len(pairs) - len(engine.peers),
                "peers without a connection": len(engine.peers)
                - sum(end.state == "up" for end in process.native.ends.values()),
                "tasks": len(process.loop.tasks) - 1,
            }
            wrong = {what: count for what, count in left.items() if count}
            self.oracle.require(not wrong, f"{process.name} has left: {wrong}")

    def close(self) -> None:
        """Everybody leaves in good order; what died is taken apart."""
        for process in self.processes:
            if process.alive:
                self._tell(process, process.leave)
        self.run_until(lambda: all(p.left for p in self.processes if p.alive))
        for process in self.processes:
            if not process.alive:
                continue
            tasks = process.loop.tasks
            self.oracle.require(not tasks, f"{process.name} has left with {tasks}")
            process.loop.close()

    def bury(self) -> None:
        """Nothing of a fleet that was stopped in the middle is heard of again."""
        for process in {*self._dead, *self.processes}:
            process.alive = False
            if not process.loop.is_closed():
                process.bury()


class _Signatures:
    """PyJWT, which looks at each token once: that takes most of the time otherwise."""

    PyJWTError = jwt.PyJWTError

    def __init__(self) -> None:
        self.get_unverified_header = functools.lru_cache(maxsize=64)(jwt.get_unverified_header)
        self._decode = functools.lru_cache(maxsize=64)(self._verify)

    def decode(self, token: str, key: bytes, *, algorithms: list[str], **how: Any) -> Any:
        return self._decode(token, key, algorithms[0], how["issuer"])

    def _verify(self, token: str, key: bytes, algorithm: str, issuer: str) -> Any:
        how: Any = {"verify_exp": False}
        return jwt.decode(token, key, algorithms=[algorithm], issuer=issuer, options=how)


_signatures = _Signatures()


class _Log(logging.Handler):
    """An honest fleet warns of nothing."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(logging.WARNING)
        self._fleet = fleet

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info is not None:
            text += f": {record.exc_info[1]!r}"
        self._fleet.oracle.violations.append(text)
