"""A simulated process of a group: a loop of steps over the real membership machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from kvxfer.moe.membership import Membership, first_view
from kvxfer.moe.messages import decode, encode
from kvxfer.moe.view_effects import Adopt, AskRank, Effect, Effects, End, Fence, Reply, Send
from kvxfer.moe.view_messages import View

from . import asking, joining
from .network import WAIT, Process
from .oracle import Oracle
from .world import ORDERS, World

JOIN_SECONDS: Final = 0.5


class Rank(Process):
    """A process whose loop runs the steps of a rank."""

    def __init__(self, world: World, oracle: Oracle, rank: int, *, newcomer: bool) -> None:
        name = f"{rank}" if not newcomer else f"{rank}~{world.starts[rank]}"
        view = None if newcomer else first_view(world.size)
        machine = Membership(rank, world.size, view, min_ranks=world.min_ranks)
        super().__init__(world.network, rank, name, machine, newcomer=newcomer)
        self._world, self._oracle = world, oracle
        self._events: list[tuple[Any, ...]] = []
        self._asked: dict[int, Callable[[Any], None]] = {}
        self.main = self._life()

    # --- events

    def _drain(self) -> None:
        """Takes events as MoeExchange.events() does: marks lost ranks, and keeps all events."""
        arrived, self.arrived = self.arrived, []
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
                    self._world.trace(self, f"from {sender.name}: {message}")
                    self._do(machine.received(sender.rank, message))  # type: ignore[arg-type]
            case "lost":
                connection, silent = rest
                rank = connection.other(self).rank
                if self.connections.get(rank) is connection:
                    self._world.trace(self, f"lost {rank}{' (silent)' if silent else ''}")
                    self._do(machine.lose(rank, silent=silent))
            case "answer":
                rank, ask, answer = rest
                self._world.trace(self, f"{rank} answers {answer}")
                self._do(machine.answered(rank, ask, answer))
            case "asked":
                ask, reply = rest
                self._world.trace(self, f"is asked {ask}")
                self._asked[ask.rank] = reply
                self._do(machine.asked(ask))
            case "join":
                newcomer = rest[0]
                if joining.accepts(self._world, self, newcomer):
                    self._do(machine.newcomer(newcomer.rank))
                    joining.tell(self, newcomer)
            case "joined":
                self._do(machine.newcomer(rest[0]))

    # --- effects

    def _do(self, effects: Effects) -> None:
        for effect in effects:  # it may be killed or frozen between two
            act = partial(self._do_one, effect)
            if self.lets(act):
                act()

    def _do_one(self, effect: Effect) -> None:
        world = self._world
        world.trace(self, f"{effect}")
        match effect:
            case Send(rank, message):
                if rank in self.connections and rank not in self.exchange.down:
                    self.connections[rank].say(self, encode(message))
                world.fate_of_sender(self, message)
            case Fence(rank):
                if rank in self.connections:
                    self.connections[rank].end(self, silent=None)
                self.exchange.lost(rank)
            case AskRank(rank, ask, pause):
                if rank in self.addresses:
                    asking.ask(world, self, self.addresses[rank], ask, pause=pause)
                else:  # a newcomer has not met it
                    self.meets(("answer", rank, ask, None))
            case Reply(rank, answer):
                self._asked.pop(rank)(answer)
            case Adopt(view):
                self._adopt(view)
            case End(error):
                world.count(f"ended: {error.code}")

    def _adopt(self, view: View) -> None:
        first = self.newcomer and self.exchange.next_step == 0
        for rank in view.members:
            if rank != self.rank and rank not in self.connections:
                self.exchange.lost(rank)
        self._oracle.adopts(self, view)
        for refusal in view.refused:
            self._oracle.leaves_out(self, refusal, view)
            self.left_out.add(refusal.step)
            self.exchange.leave_out(refusal.step)
        self.exchange.set_view(view, newcomer=first)

    # --- the loop

    def _life(self) -> Iterator[float]:
        if self.newcomer:
            yield from self._joins()
        yield from self._steps()
        yield self._world.random.uniform(0, 0.2)
        self._world.trace(self, "exits")
        self.kill()

    def _joins(self) -> Iterator[float]:
        clock, turn = self._world.clock, 0.0
        while True:
            self._take()
            yield from self._stopped()
            if self.machine.view is not None or self.machine.ended is not None:
                return
            if clock.now >= turn:
                if joining.turn(self._world, self):
                    self._do(self.machine.announce())
                turn = clock.now + JOIN_SECONDS
                clock.after(JOIN_SECONDS, self.wake, self)
            yield WAIT

    def _steps(self) -> Iterator[float]:
        order = ORDERS[self._world.order]
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
        self._oracle.begins(self, step, view)
        assert self.exchange.dispatch(view) == step

    def _refuse(self, step: int) -> Iterator[float]:
        machine = self.machine
        if step in self.left_out:
            return
        self._world.trace(self, f"cannot begin step {step}")
        self._oracle.refuses(self, step)
        self._do(machine.refuse(step, "it cannot"))
        yield from self._stopped()
        while machine.blocked and machine.ended is None:
            yield WAIT
            self._take()
            self._do(machine.waiting(step))
            yield from self._stopped()
        if machine.ended is None:
            self._oracle.refused(self, step)

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
            self._oracle.completes(self, step, view, missing)
            yield self._world.compute_seconds()

    def _may_complete(self) -> bool:
        return not self.machine.blocked or self._world.defects.completes_blocked

    def _combined(self, step: int) -> Iterator[float]:
        self.exchange.waits_for("combine", step)
        waits = not self._world.defects.deaf_in_combine
        yield from self._wait(lambda: self.exchange.combined(step), answers=waits)
        self.exchange.waits_for("nothing", step)
        if self.machine.ended is None:
            view = self.exchange.view(step)
            lost = {r for r in view.members if self.exchange.is_lost(r, step)}
            whole, missing = self.exchange.combine(step)
            self._oracle.combines(self, step, view, whole, missing, lost)

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
