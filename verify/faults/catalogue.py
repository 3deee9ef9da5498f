"""What can happen to two workers, and over which fabrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from .link import Damage
from .worker import NUM_BLOCKS

Role: TypeAlias = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one side or, without a victim, to the network between both."""

    act: str
    victim: Role | None = None

    def __str__(self) -> str:
        return self.act if self.victim is None else f"{self.act} {self.victim}"


def _of_both(*acts: str) -> tuple[Fault, ...]:
    return tuple(Fault(act, role) for act in acts for role in get_args(Role))


# kill: SIGKILL. freeze: SIGSTOP until the other has given it up. stall: SIGSTOP for a moment that
# heartbeats forgive, in which the other cancels and reuses its blocks.
PROCESS: Final = _of_both("kill", "freeze", "stall")
# The system gives the process no more memory, and then the other one cancels.
MEMORY: Final = _of_both("no memory")
# The time of day is another one.
CLOCK: Final = _of_both("clock")
# half-open: cut off, and killed while nobody hears of it.
NETWORK: Final = (
    *(Fault(damage) for damage in get_args(Damage)),
    *_of_both("half-open"),
)
# The ports of both ends; connections that do not need them stay.
PORTS: Final = (Fault("port down"),)
# SIGSTOP for a moment that heartbeats forgive, with nobody giving up.
PAUSE: Final = _of_both("pause")


@dataclass(frozen=True, slots=True)
class Fabric:
    """Where workers meet, and what can happen to them there."""

    name: str
    engine: str
    faults: tuple[Fault, ...]
    linked: bool = False
    """Each in its own network namespace."""
    small_buffers: bool = False
    most_blocks: int = NUM_BLOCKS
    """Of a transfer."""


FABRICS: Final = {
    fabric.name: fabric
    for fabric in (
        Fabric("local", "local", PROCESS + MEMORY + CLOCK),
        Fabric("tcp", "tcp", PROCESS + MEMORY + CLOCK + NETWORK, linked=True),
        # Socket buffers that are full all the time. After a pause Linux sends again what had no
        # room, 0.2 s after 0.2 s: the 32 MiB of all blocks took over 20 s on busy processors.
        Fabric(
            "tcp 4 KiB", "tcp", PROCESS + PAUSE, linked=True, small_buffers=True, most_blocks=32
        ),
        Fabric("verbs", "verbs", PROCESS + PORTS),
    )
}
