"""A simulated process of a group: a loop of steps over the real membership machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvxfer.moe.membership import Membership, first_view
from kvxfer.moe.messages import decode, encode
from kvxfer.moe.view_effects import Adopt, AskRank, Effect, Effects, End, Fence, Reply, Send
from kvxfer.moe.view_messages import View

from .exchange import Exchange
from .network import Connection

if TYPE_CHECKING:
    from .group import Group

_NEVER: Final = float("inf")
WAIT: Final = -1.0
"""The value that a loop yields to wait for the next event. Else it yields the seconds for which it
computes."""
JOIN_SECONDS: Final = 0.5
ORDERS: Final = {
    "one step": ((0, "srcw"),),
    "next dispatch first": ((1, "s"), (0, "rcw")),
    "next dispatch within": ((0, "rc"), (1, "s"), (0, "w")),
}
"""The calls of each turn, as (step relative to the received one, calls). s: dispatch_send,
r: dispatch_recv, c: combine_send, w: combine_recv."""


class Rank:
    """One process, from its start to its end. Events that lets() gets wait while it is frozen."""

    def __init__(self, group: Group, rank: int, *, newcomer: bool) -> None:
        self.group, self.rank = group, rank
        self.name = f"{rank}" if not newcomer else f"{rank}~{group.starts[rank]}"
        self.newcomer = newcomer
        view = None if newcomer else first_view(group.size)
        self.machine = Membership(rank, group.size, view, min_ranks=group.min_ranks)
        self.exchange = Exchange(self)
        self.connections: dict[int, Connection] = {}
        self.addresses: dict[int, Rank] = {}
        self.alive, self.frozen_at = True, _NEVER
        self.resumed_at = 0.0
        self.host_gone = False
        self.ended_at: float | None = None
        self.refuses = 0
        """The number of its next steps that it cannot begin."""
        self.left_out: set[int] = set()
        """The steps that no rank runs."""
        self._held: list[Callable[[], None]] = []
        self._arrived: list[tuple[Any, ...]] = []
        self._events: list[tuple[Any, ...]] = []
        self._asked: dict[int, Callable[[Any], None]] = {}
        self._waits = False
        self._main = self._life()
        group.network.connections[self] = []

    # --- acts of its host

    @property
    def runs(self) -> bool:
        return self.alive and self.frozen_at == _NEVER

    def lets(self, event: Callable[[], None]) -> bool:
        if self.alive and not self.runs:
            self._held.append(event)
        return self.runs

    def silent_since(self, peer: Rank) -> float:
        """Returns the time since which the other rank gets nothing from this one."""
        since = self.group.clock.now if not self.host_gone else self.frozen_at
        if self.runs:
            since = _NEVER
        elif self.alive:
            since = self.frozen_at
        return min(since, self.group.network.cut_since(self, peer))

    def freeze(self) -> None:
        self.frozen_at = self.group.clock.now
        self._fall_silent()

    def resume(self) -> None:
        self.frozen_at, self.resumed_at = _NEVER, self.group.clock.now
        held, self._held = self._held, []
        for event in held:
            if self.lets(event):
                event()
        self.wake()

    def kill(self, *, host: bool = False) -> None:
        """Kills the process. With `host` its host dies too, so no connection is closed."""
        self.alive = False
        if host:
            self.host_gone = True
            self.frozen_at = self.group.clock.now
            self._fall_silent()
        else:
            for connection in self.group.network.connections[self]:
                connection.end(self, silent=None)

    def _fall_silent(self) -> None:
        for connection in self.group.network.connections[self]:
            connection.watch(connection.other(self))

    # --- events

    def start(self) -> None:
        self._go_on()

    def meets(self, event: tuple[Any, ...]) -> None:
        self._arrived.append(event)
        self.wake()

    def wake(self) -> None:
        if self._waits and self.runs:
            self._go_on()

    def _go_on(self) -> None:
        if not self.runs:
            return
        self._waits = False
        seconds = next(self._main, None)
        if seconds is None:
            return
        self._waits = seconds == WAIT
        if not self._waits:
            self.group.clock.after(seconds, self._go_on, self)  # type: ignore[arg-type]

    def _drain(self) -> None:
        """Takes events as MoeExchange.events() does: marks lost ranks, and keeps all events."""
        arrived, self._arrived = self._arrived, []
        for event in arrived:
            if event[0] == "lost":
                rank = event[1].other(self).rank
                if self.connections.get(rank) is event[1]:
                    self.exchange.lost(rank)
        self._events += arrived

    def _take(self) -> None:
        """Passes all events to the machine."""
        self._drain()
        events, self._events = self._events, []
        for event in events:
            self._meet(*event)

    def _meet(self, kind: str, *rest: Any) -> None:
        machine = self.machine
        match kind:
            case "said":
                connection, data = rest
                sender = connection.other(self)
                if self.connections.get(sender.rank) is connection:
                    message = decode(data, sender.name)
                    self.group.trace(self, f"from {sender.name}: {message}")
                    self._do(machine.received(sender.rank, message))  # type: ignore[arg-type]
            case "lost":
                connection, silent = rest
                rank = connection.other(self).rank
                if self.connections.get(rank) is connection:
                    self.group.trace(self, f"lost {rank}{' (silent)' if silent else ''}")
                    self._do(machine.lose(rank, silent=silent))
            case "answer":
                rank, ask, answer = rest
                self.group.trace(self, f"{rank} answers {answer}")
                self._do(machine.answered(rank, ask, answer))
            case "asked":
                ask, reply = rest
                self.group.trace(self, f"is asked {ask}")
                self._asked[ask.rank] = reply
                self._do(machine.asked(ask))
            case "join":
                self.group.joining.hello(self, rest[0])
            case "joined":
                self._do(machine.newcomer(rest[0]))

    # --- effects

    def _do(self, effects: Effects) -> None:
        for effect in effects:  # it may be killed or frozen between two
            act = partial(self._do_one, effect)
            if self.lets(act):
                act()

    def _do_one(self, effect: Effect) -> None:
        group = self.group
        group.trace(self, f"{effect}")
        match effect:
            case Send(rank, message):
                if rank in self.connections and rank not in self.exchange.down:
                    self.connections[rank].say(self, encode(message))
                group.fate_of_sender(self, message)
            case Fence(rank):
                if rank in self.connections:
                    self.connections[rank].end(self, silent=None)
                self.exchange.lost(rank)
            case AskRank(rank, ask, pause):
                if rank in self.addresses:
                    group.ask(self, self.addresses[rank], ask, pause=pause)
                else:  # a newcomer has not met it
                    self.meets(("answer", rank, ask, None))
            case Reply(rank, answer):
                self._asked.pop(rank)(answer)
            case Adopt(view):
                self._adopt(view)
            case End(error):
                self.ended_at = group.clock.now
                group.count(f"ended: {error.code}")

    def _adopt(self, view: View) -> None:
        first = self.newcomer and self.exchange.next_step == 0
        for rank in view.members:
            if rank != self.rank and rank not in self.connections:
                self.exchange.lost(rank)
        self.group.oracle.adopts(self, view)
        for refusal in view.refused:
            self.group.oracle.leaves_out(self, refusal, view)
            self.left_out.add(refusal.step)
            self.exchange.leave_out(refusal.step)
        self.exchange.set_view(view, newcomer=first)

    # --- the loop

    def _life(self) -> Iterator[float]:
        if self.newcomer:
            yield from self._joins()
        yield from self._steps()
        yield self.group.random.uniform(0, 0.2)
        self.group.trace(self, "exits")
        self.kill()

    def _joins(self) -> Iterator[float]:
        clock, turn = self.group.clock, 0.0
        while True:
            self._take()
            yield from self._stopped()
            if self.machine.view is not None or self.machine.ended is not None:
                return
            if clock.now >= turn:
                self.group.joining.turn(self)
                turn = clock.now + JOIN_SECONDS
                clock.after(JOIN_SECONDS, self.wake, self)  # type: ignore[arg-type]
            yield WAIT

    def _steps(self) -> Iterator[float]:
        order = ORDERS[self.group.order]
        step = self.exchange.next_step
        if len(order) > 1:
            yield from self._one(step, "s")
        while self.machine.ended is None:
            for ahead, acts in order:
                for act in acts:
                    yield from self._one(step + ahead, act)
                    if self.machine.ended is not None:
                        return
            step += 1

    def _one(self, step: int, act: str) -> Iterator[float]:
        if self.machine.ended is not None or (act in "cw" and step in self.left_out):
            return
        match act:
            case "s":
                yield from self._boundary(step)
            case "r":
                yield from self._dispatched(step)
            case "c":
                self.exchange.answer(step)
            case "w":
                yield from self._combined(step)

    def _boundary(self, step: int) -> Iterator[float]:
        machine = self.machine
        while True:
            self._take()
            self._do(machine.boundary(step))
            yield from self._stopped()
            if machine.ended is not None:
                return
            if not machine.blocked:
                break
            yield WAIT
        if self.refuses:
            self.refuses -= 1
            yield from self._refuse(step)
        if machine.ended is not None:
            return
        if step in self.left_out:
            self.exchange.skip()
            return
        view = machine.view
        assert view is not None
        self.group.oracle.begins(self, step, view)
        assert self.exchange.dispatch(view) == step

    def _refuse(self, step: int) -> Iterator[float]:
        machine = self.machine
        if step in self.left_out:
            return
        self.group.trace(self, f"cannot begin step {step}")
        self.group.oracle.refuses(self, step)
        self._do(machine.refuse(step, "it cannot"))
        yield from self._stopped()
        while machine.blocked and machine.ended is None:
            yield WAIT
            self._take()
            self._do(machine.waiting(step))
            yield from self._stopped()
        if machine.ended is None:
            self.group.oracle.refused(self, step)

    def _dispatched(self, step: int) -> Iterator[float]:
        if step not in self.left_out:
            self.exchange.waits_for("dispatch", step)

        def done() -> bool:
            whole = step in self.left_out or self.exchange.dispatched(step)
            return self._may_complete() and whole

        yield from self._wait(done)
        self.exchange.waits_for("nothing", step)
        if self.machine.ended is None and step not in self.left_out:
            view = self.exchange.view(step)
            missing = self.exchange.receive(step)
            self.group.oracle.completes(self, step, view, missing)
            yield self.group.compute_seconds()

    def _may_complete(self) -> bool:
        return not self.machine.blocked or self.group.defects.completes_blocked

    def _combined(self, step: int) -> Iterator[float]:
        self.exchange.waits_for("combine", step)
        waits = not self.group.defects.deaf_in_combine
        yield from self._wait(lambda: self.exchange.combined(step), answers=waits)
        self.exchange.waits_for("nothing", step)
        if self.machine.ended is None:
            view = self.exchange.view(step)
            lost = {r for r in view.members if self.exchange.is_lost(r, step)}
            whole, missing = self.exchange.combine(step)
            self.group.oracle.combines(self, step, view, whole, missing, lost)

    def _stopped(self) -> Iterator[float]:
        """Waits while the process is frozen in the middle of its work."""
        while not self.runs:
            yield WAIT

    def _wait(self, done: Callable[[], bool], *, answers: bool = True) -> Iterator[float]:
        machine = self.machine
        while True:
            self._drain()
            if done():
                return
            self._take()
            if answers:
                self._do(machine.waiting(self.exchange.next_step))
            yield from self._stopped()
            if machine.ended is not None or done():
                return
            yield WAIT
