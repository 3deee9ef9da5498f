"""One-sided writes of the simulated engines. Each group is posted, read, placed and acknowledged
independently, in any order."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from .contents import Array
from .engine import End
from .oracle import Oracle
from .world import Placer


class Stage(enum.Enum):
    QUEUED = "queued"  # not read yet; can be withdrawn
    ON_ITS_WAY = "on its way"
    ENDED = "ended"


@dataclass(eq=False, slots=True)
class Write:
    """Neighbouring pages as one write. `transfer` is the transfer whose blocks it was posted
    from."""

    source: Array
    grant: bytes
    offset: int
    transfer: str


@dataclass(eq=False, slots=True)
class Group:
    """Writes with one common immediate. They keep their order; the last one carries it."""

    writes: list[Write]
    stage: Stage = Stage.QUEUED
    counted: bool = False
    paths: int = 0
    """The number of resets of the paths before it was sent."""
    copied_at: float = 0.0
    """The time at which a GPU has placed the arrived writes, one after the other."""


class PostedOperation:
    """One submission. It ends when all its groups have ended."""

    def __init__(self, end: End, oracle: Oracle, ident: int, imm: int, timeout: float) -> None:
        self.end = end
        self.id = ident
        self.imm = imm
        self.groups: list[Group] = []
        self._code, self._text = "ok", ""
        self._left = 0
        self._world, self._oracle = end.native.world, oracle
        self._deadline = timeout

    def post(self, writes: list[Write]) -> None:
        size = self._world.group_writes
        self.groups = [Group(writes[at : at + size]) for at in range(0, len(writes), size)]
        self._left = len(self.groups)
        self.end.operations[self.id] = self
        for group in self.groups:
            self._queue(group)
        if not self.groups:
            self._end()
        expire = "not delivered before its deadline"
        process = self.end.native.process
        self._world.clock.after(
            self._deadline, lambda: self.fail("deadline-exceeded", expire), process
        )

    @property
    def unread(self) -> list[Group]:
        return [group for group in self.groups if group.stage is Stage.QUEUED]

    @property
    def under_way(self) -> bool:
        return any(group.stage is Stage.ON_ITS_WAY for group in self.groups)

    def fail(self, code: str, text: str) -> None:
        """Withdraws groups that were not read yet. The operation ends when the rest has ended."""
        if self.id not in self.end.operations:
            return
        if self._code == "ok":
            self._code, self._text = code, text
        for group in self.unread:
            self._finish(group)

    def abandon(self, code: str, text: str) -> None:
        """Ends the operation at once, as the peer is lost: nothing more is read."""
        if self._code == "ok":
            self._code, self._text = code, text
        for group in self.groups:
            group.stage = Stage.ENDED
        self._end()

    def requeue(self) -> None:
        """Sends groups that had not arrived over the new paths, after a reset."""
        for group in self.groups:
            lost = group.stage is Stage.ON_ITS_WAY and group.paths < self.end.paths
            if group.stage is Stage.QUEUED or (lost and not group.counted):
                group.stage = Stage.QUEUED
                self._queue(group)

    def _queue(self, group: Group) -> None:
        link = self.end.link
        # A NIC sends posted writes even while its process is stopped.
        world = self._world
        process = None if link.places_by_nic and self.end.paths == 0 else self.end.native.process
        world.clock.after(world.posting_delay(), lambda: self._send(group), process)

    def _send(self, group: Group) -> None:
        end, link = self.end, self.end.link
        if group.stage is not Stage.QUEUED or not end.native.process.alive:
            return
        if end.opened != end.paths:
            return  # sent when the reset is answered
        if self.imm in end.revoked:
            self._refused(group, f"counter {self.imm} is revoked")
            return
        for write in group.writes:
            self._oracle.reads(end.native.process, write.transfer, write.source)
        group.stage, group.paths = Stage.ON_ITS_WAY, end.paths
        paths = end.paths
        before = 0.0
        for write in group.writes:
            data = write.source.copy()

            def arrive(write: Write = write, data: Array = data) -> None:
                if paths == end.other.paths and group.stage is not Stage.QUEUED:
                    self._arrive(group, write, data)

            at = link.carry(
                end.index, arrive, not_before=before, needs_process=not link.places_by_nic
            )
            before = 0.0 if self._world.defects.splits_groups else at

    def _arrive(self, group: Group, write: Write, data: Array) -> None:
        receiver = self.end.other
        world = self._world
        native = receiver.native
        if not native.process.alive:
            return
        if receiver.state == "lost" and not world.defects.lands_late:
            return
        target, refusal = native.counters.target(receiver, self.imm, write.grant)
        if target is None or write.offset + len(data) > len(target):
            text = refusal or f"{write.offset}+{len(data)} leaves the grant"
            world.note("refused", lambda: f"{self.end.name} {write.transfer}: {text}")
            self._acknowledge(group, text)
            return
        place = target[write.offset : write.offset + len(data)]
        if self.end.link.places_by_gpu:
            native.counters.copy_begins(self.imm)
            now = world.clock.now
            group.copied_at = max(group.copied_at, now) + world.latency() / 4
            end_copy = lambda: self._end_copy(group, write, data, place)  # noqa: E731
            world.clock.after(group.copied_at - now, end_copy)
        else:
            self._place(group, write, data, place)

    def _end_copy(self, group: Group, write: Write, data: Array, place: Array) -> None:
        """Ends a GPU's copy: places the bytes, even after a revocation, unless the process died."""
        if self.end.other.native.process.alive:
            self._place(group, write, data, place)
            self.end.other.native.counters.copy_ended(self.imm)

    def _place(self, group: Group, write: Write, data: Array, place: Array) -> None:
        world, native = self._world, self.end.other.native
        world.note(
            "landed", lambda: f"{self.end.name} {write.transfer} {self.imm:#x} {len(data)} B"
        )
        self._oracle.lands(self.end.native.process, native.process, write.transfer, place)
        place[:] = data
        self._oracle.damages(write.transfer, place)
        if write is not group.writes[-1]:
            return
        group.counted = True
        count = lambda: native.counters.add(self.imm)  # noqa: E731
        if self.end.link.places_by_gpu and self.end.other.state == "lost":
            return
        if self.end.link.placer is Placer.ENGINE:
            count()
        else:
            world.clock.after(world.latency() / 4, count, native.process)
        self._acknowledge(group, "")

    def _acknowledge(self, group: Group, refusal: str) -> None:
        def heard() -> None:
            if group.stage is not Stage.ON_ITS_WAY:
                return
            if refusal:
                self._refused(group, refusal)
            else:
                self._finish(group)

        self.end.link.carry(1 - self.end.index, heard)

    def _refused(self, group: Group, text: str) -> None:
        if self._code == "ok":
            self._code, self._text = "stale-counter", text
        self._finish(group)

    def _finish(self, group: Group) -> None:
        group.stage = Stage.ENDED
        self._left -= 1
        self.end.native.counters.one_ended(self.end, self.imm)
        if not self._left:
            self._end()

    def _end(self) -> None:
        if self.end.operations.pop(self.id, None) is not None:
            self.end.native.complete("write", self.id, self.end.peer_id, self._code, self._text)


def runs(source_pages: Any, target_pages: Any, page: int) -> list[tuple[int, int, int]]:
    """Returns pages as (source, destination, bytes); neighbours on both sides are joined, as in
    C++."""
    joined: list[tuple[int, int, int]] = []
    for source, target in zip(source_pages.tolist(), target_pages.tolist(), strict=True):
        if joined:
            before, at, length = joined[-1]
            if before + length == source and at + length == target:
                joined[-1] = (before, at, length + page)
                continue
        joined.append((source, target, page))
    return joined
