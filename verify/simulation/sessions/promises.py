"""The promises of a simulated fleet, during the run and at its end.

No process waits for a dead one, no session outlives its lease, and nothing is left over.
"""

from __future__ import annotations

from collections.abc import Sequence

from .network import Network
from .process import Process
from .requests import Part, Request
from .world import World

TOLD_SECONDS = 1.0
_LEASE_SLACK = 2.0
_LOOK_SECONDS = 0.25


class Promises:
    """The promises of one fleet. The oracle checks the bytes."""

    def __init__(self, world: World, network: Network) -> None:
        self._world, self._network = world, network
        self._clock = world.clock
        self._late: dict[Part, float] = {}

    def has_to_hear(self, part: Part, other: Part, since: float) -> None:
        """Requires that `other`, while it runs, soon learns that `part` has ended or was stopped,
        unless `part` continues or has every byte."""
        process = other.process
        disturbed = [
            link.disturbed_at
            for link in self._network.links
            if {end.native.process for end in link.ends} == {process, part.process}
        ]
        told_by = max([since, process.woke_at, *disturbed]) + TOLD_SECONDS

        def look() -> None:
            if (
                other.over_with(part)
                or not process.runs
                or (part.process.runs and (part.complete or not part.outcome))
            ):
                return
            if process.woke_at > since or self._clock.now < told_by - 1e-9:
                self.has_to_hear(part, other, max(since, process.woke_at))
                return
            self._world.require(
                False,
                f"{TOLD_SECONDS} s after the end of {part.request.id} at {part.process.name} "
                f"({part.outcome or 'stopped'}), {process.name} has not learned of it: its session "
                f"is {other.session.state}",
            )

        self._clock.after(max(told_by - self._clock.now, 0), look)

    def has_to_end(self, part: Part) -> None:
        """Requires that the task of `part`, which was aborted, ends."""
        aborted_at = self._clock.now

        def look() -> None:
            since = max(aborted_at, part.process.woke_at)
            if part.outcome or not part.process.runs:
                return
            if self._clock.now - since < _LEASE_SLACK:
                self._clock.after(_LOOK_SECONDS, look)
                return
            text = f"{part.request.id} at {part.process.name} continues although it was aborted"
            self._world.require(False, text)

        self._clock.after(_LEASE_SLACK, look)

    def look_at_leases(self, requests: Sequence[Request]) -> None:
        """Checks repeatedly that no session outlives its lease."""
        late = self._late
        for request in requests:
            for part in request.parts:
                session = part.session
                if part.over or not part.process.runs or session.lease_remaining > 0.001:
                    late.pop(part, None)
                    continue
                since = max(late.setdefault(part, self._clock.now), part.process.woke_at)
                self._world.require(
                    self._clock.now - since < _LEASE_SLACK,
                    f"{request.id} at {part.process.name} is {session.state} long after its lease",
                )
        self._clock.after(_LOOK_SECONDS, lambda: self.look_at_leases(requests))

    def check_forgotten(
        self, processes: Sequence[Process], last: Request, *, transfers: int
    ) -> None:
        """Checks that endpoints remember at most `transfers` transfers: they forget expired
        tickets."""
        for process in processes:
            remembered = len(process.endpoint._ledger)
            if process.endpoint._ledger._used.keys() & {last.id}:
                self._world.require(
                    remembered <= transfers, f"{process.name} remembers {remembered} transfers"
                )

    def check_nothing_left(self, processes: Sequence[Process]) -> None:
        """Checks that, after the last request, every block is free and nothing waits."""
        for process in processes:
            process.pool.check()
            endpoint, engine = process.endpoint, process.engine
            native = self._network.engines[process]
            pairs = list(endpoint._connections)
            left = {
                "blocks": process.pool.num_blocks - process.pool.num_free,
                "prefill sessions": len(endpoint._prefill_side._sessions),
                "early offers": len(endpoint._prefill_side._early),
                "decode sessions": len(endpoint._decodes),
                "expectations": len(endpoint._expected_offers),
                "control-plane calls": len(endpoint._brokered._tasks),
                "transfers of pairs": sum(len(pair.decodes) for pair in pairs),
                "expected offers": sum(
                    not expected.connection.peer.alive and expected.error is None
                    for expected in endpoint._expected_offers._expected.values()
                ),
                "counters": native.counters.live,
                "operations": sum(len(end.operations) for end in native.ends.values()),
                "operations of the front": len(engine._operations) + len(engine._finished_early),
                "revocations": len(engine._revoking),
                "pairs without a peer": len(pairs) - len(engine.peers),
                "peers without a connection": len(engine.peers)
                - sum(end.state == "up" for end in native.ends.values()),
                "unsent messages": sum(len(pair._outbox._waiting) for pair in pairs),
                "tasks": len(process.loop.tasks) - 1 - (process.following is not None),
            }
            wrong = {what: count for what, count in left.items() if count}
            self._world.require(not wrong, f"{process.name} has left: {wrong}")
