"""A way between two processes: delays, and the faults of the network."""

from __future__ import annotations

from collections.abc import Callable

from .process import Process
from .world import Placer, World


class Wire:
    """Both directions between two processes.

    A NIC places bytes even while the process is stopped, until its paths are reset. A GPU places
    them until the copy that the receiving engine has started is complete.
    """

    def __init__(self, world: World, processes: tuple[Process, Process]) -> None:
        self._world, self.processes = world, processes
        self.placer = world.placer
        self.fabric = "verbs" if self.places_by_nic else "tcp"
        self._cut_at: list[float | None] = [None, None]
        self._held_until = 0.0
        self.disturbed_at = 0.0
        """The time until which its messages are lost or late."""
        self._last = [0.0, 0.0]

    @property
    def places_by_nic(self) -> bool:
        return self.placer is Placer.NIC

    @property
    def places_by_gpu(self) -> bool:
        return self.placer is Placer.GPU

    def cut(self, direction: int) -> bool:
        """Drops everything that this end sends from now on. Returns whether that is new."""
        if self._cut_at[direction] is not None:
            return False
        self._cut_at[direction] = self.disturbed_at = self._world.clock.now
        return True

    def hold(self, seconds: float) -> None:
        """Delays everything that is sent in the next `seconds` until their end."""
        self._held_until = self.disturbed_at = self._world.clock.now + seconds

    def silent_since(self, direction: int) -> float | None:
        """Returns the time since which no heartbeat of this end arrives; None if they arrive."""
        process = self.processes[direction]
        times = (self._cut_at[direction], process.stopped_at, process.died_at)
        return min((at for at in times if at is not None), default=None)

    def carry(
        self,
        direction: int,
        arrive: Callable[[], None],
        *,
        ordered: bool = False,
        not_before: float = 0.0,
        needs_process: bool = True,
    ) -> float:
        """Calls `arrive` at the other end after a delay, unless the way is cut before. Returns the
        time of arrival."""
        if self._cut_at[direction] is not None:
            return 0.0
        clock = self._world.clock
        at = max(max(clock.now, self._held_until) + self._world.latency(), not_before)
        if ordered:
            at = self._last[direction] = max(at, self._last[direction])

        def arrived() -> None:
            if self._cut_at[direction] is None:
                arrive()

        process = self.processes[1 - direction] if needs_process else None
        clock.after(at - clock.now, arrived, process)
        return at
