"""ImmCounters of a simulated engine: the writes that count, their grants, and revocation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvxfer.engine.native import native as compiled

if TYPE_CHECKING:
    from .link import End
    from .native import NativeEngine
    from .writes import Bytes

ASK_SECONDS = 0.150
_SLOT_BITS = 16
_SLOTS = 3


@dataclass(eq=False, slots=True)
class _Counter:
    writer: End | None
    live: bool = True
    closed: bool = False
    """True once no write for it can land."""
    count: int = 0
    copying: int = 0
    """The number of a GPU's copies that are under way."""
    total: int | None = None
    exact: bool = True
    grants: list[bytes] = field(default_factory=list)


class Counters:
    """One engine's counters, with the promises of the C++ ImmCounters, grants and revocations."""

    def __init__(self, native: NativeEngine) -> None:
        self._native = native
        self._counters: dict[int, _Counter] = {}
        self._allocated = 0
        self._granted: dict[bytes, tuple[Bytes, int]] = {}
        self._answered: dict[tuple[End, int], Any] = {}
        """The answers to send to peers that revoked an immediate, once no write with it is under
        way."""

    @property
    def live(self) -> int:
        return sum(not counter.closed for counter in self._counters.values())

    def allocate(self, writer: int | None) -> int:
        """Allocates a counter. A slot that is reused gets a new generation."""
        self._allocated += 1
        slot, generation = self._allocated % _SLOTS, 1 + self._allocated // _SLOTS
        imm = generation << _SLOT_BITS | slot
        self._counters[imm] = _Counter(self._native.ends.get(writer or 0))
        return imm

    def grant(self, imm: int, ranges: Any) -> list[bytes]:
        descriptors = []
        for region, offset, nbytes in ranges:
            name = self._native.new_name()
            self._granted[name] = (region.data[offset : offset + nbytes], imm)
            self._counters[imm].grants.append(name)
            descriptors.append(name)
        return descriptors

    def target(self, end: End, imm: int, grant: bytes) -> tuple[Bytes | None, str]:
        """Returns the memory that a write may go to, or why it may not."""
        target, for_imm = self._granted.get(grant, (None, 0))
        counter = self._counters.get(imm)
        if self._native.network.defects.lands_late and target is not None:
            return target, ""
        if counter is None or counter.closed or counter.writer is not end:
            return None, f"counter {imm:#x} is not live"
        if for_imm != imm:
            return None, "the region is not known, or granted to another immediate"
        return target, ""

    def add(self, imm: int) -> None:
        counter = self._counters.get(imm)
        if counter is not None and counter.live:
            counter.count += 1
            self._report(imm, counter)

    def value(self, imm: int) -> int:
        counter = self._counters.get(imm)
        return counter.count if counter is not None and counter.live else 0

    def expect(self, imm: int, total: int, at_least: bool) -> None:
        counter = self._counters.get(imm)
        if counter is None or not counter.live:
            raise compiled.Error("stale-counter", f"counter {imm:#x} is not live")
        counter.total, counter.exact = total, not at_least
        self._report(imm, counter)

    def release(self, imm: int, *, wait: bool = False) -> bool:
        """Releases a counter. Returns whether no write can land any more. If that is not known yet,
        a completion "released" follows.

        With `wait` the real engine blocks until then; never use it in an event loop.
        """
        counter = self._counters.get(imm)
        if counter is None or not counter.live:
            return True
        counter.live = False
        end = counter.writer
        complete = counter.total is not None and counter.count == counter.total
        network = self._native.network
        if counter.copying and not network.defects.forgets_copies:
            network.count("copies waited for")
            return False
        if complete or end is None or end.state == "lost" or not end.link.places_by_nic:
            self._close(imm, counter)
            return True
        network.oracle.require(
            not wait, f"{self._native.process.name} blocks until {end.name} stops writing"
        )
        network.count("asked to revoke")
        end.link.carry(end.index, lambda: end.other.native.counters.spare(end.other, imm))
        network.clock.after(ASK_SECONDS, lambda: self._reset(imm), self._native.process)
        return False

    def copy_begins(self, imm: int) -> None:
        if counter := self._counters.get(imm):
            counter.copying += 1

    def copy_ended(self, imm: int) -> None:
        if counter := self._counters.get(imm):
            counter.copying -= 1
            if not counter.live and not counter.copying:
                self.spared(imm)

    def spare(self, end: End, imm: int) -> None:
        """Handles a peer's revocation of an immediate. Answers once no write uses it."""
        if end.state == "lost":
            return
        end.revoked.add(imm)
        for operation in list(end.operations.values()):
            if operation.imm == imm:
                operation.fail("stale-counter", f"counter {imm:#x} is revoked")
        receiver = end.other

        def answer() -> None:
            end.link.carry(end.index, lambda: receiver.native.counters.spared(imm))

        self._answered[end, imm] = answer
        self.one_ended(end, imm)

    def one_ended(self, end: End, imm: int) -> None:
        """Answers a revocation if the last write with the immediate has ended."""
        answer = self._answered.get((end, imm))
        if answer is None or any(
            operation.imm == imm and operation.under_way for operation in end.operations.values()
        ):
            return
        del self._answered[end, imm]
        answer()

    def spared(self, imm: int) -> None:
        """Closes a counter: its writer has answered, or can no longer write."""
        counter = self._counters.get(imm)
        if counter is not None and not counter.closed:
            self._close(imm, counter)
            self._native.complete("released", imm)

    def forget_writer(self, end: End) -> None:
        """Closes the released counters of a fenced peer."""
        for imm, counter in list(self._counters.items()):
            if counter.writer is end and not counter.live and not counter.copying:
                self.spared(imm)
        for key in [key for key in self._answered if key[0] is end]:
            del self._answered[key]

    def _reset(self, imm: int) -> None:
        counter = self._counters.get(imm)
        if counter is None or counter.closed or counter.writer is None:
            return
        network, name = self._native.network, counter.writer.name
        network.note("paths reset", lambda: name)
        network.count("paths reset")
        self._close(imm, counter)
        counter.writer.reset_paths()
        self._native.complete("released", imm)

    def _close(self, imm: int, counter: _Counter) -> None:
        counter.live, counter.closed = False, True
        if not self._native.network.defects.lands_late:
            for name in counter.grants:
                del self._granted[name]
            del self._counters[imm]

    def _report(self, imm: int, counter: _Counter) -> None:
        if counter.total is None or counter.count < counter.total:
            return
        if counter.exact and counter.count > counter.total:
            text = f"{counter.count} writes arrived, {counter.total} were announced"
            self._native.complete("counter", imm, code="protocol-error", text=text)
        else:
            self._native.complete("counter", imm)
