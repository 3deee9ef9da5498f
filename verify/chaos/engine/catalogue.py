"""The faults of two workers, and the fabrics that they apply to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from verify.chaos.link import Damage

from .worker import NUM_BLOCKS

Role: TypeAlias = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one side or, without a victim, of the network between both."""

    act: str
    victim: Role | None = None

    def __str__(self) -> str:
        return self.act if self.victim is None else f"{self.act} {self.victim}"


def _of_both(*acts: str) -> tuple[Fault, ...]:
    return tuple(Fault(act, role) for act in acts for role in get_args(Role))


# kill: SIGKILL. freeze: SIGSTOP until the other side has given up. stall: SIGSTOP for less than the
# heartbeats' timeout, while the other side cancels and reuses its blocks.
PROCESS: Final = _of_both("kill", "freeze", "stall")
# The process gets no more memory from the system; then the other side cancels.
MEMORY: Final = _of_both("no memory")
# The wall clock is wrong.
CLOCK: Final = _of_both("clock")
# half-open: cut off, then killed, so that the peer does not learn of it.
NETWORK: Final = (
    *(Fault(damage) for damage in get_args(Damage)),
    *_of_both("half-open"),
)
# The ports at both ends are down. Connections that do not use them stay.
PORTS: Final = (Fault("port down"),)
# SIGSTOP for less than the heartbeats' timeout; neither side gives up.
PAUSE: Final = _of_both("pause")


@dataclass(frozen=True, slots=True)
class Fabric:
    """The fabric of a pair of workers, and its faults."""

    name: str
    engine: str
    faults: tuple[Fault, ...]
    linked: bool = False
    """Each worker is in a network namespace."""
    small_buffers: bool = False
    most_blocks: int = NUM_BLOCKS
    """The most blocks of a transfer."""


FABRICS: Final = {
    fabric.name: fabric
    for fabric in (
        Fabric("local", "local", PROCESS + MEMORY + CLOCK),
        Fabric("tcp", "tcp", PROCESS + MEMORY + CLOCK + NETWORK, linked=True),
        # The socket buffers are always full. After a pause Linux resends the bytes that had no room
        # only every 0.2 s: the 32 MiB of all blocks took over 20 s on busy processors.
        Fabric(
            "tcp 4 KiB", "tcp", PROCESS + PAUSE, linked=True, small_buffers=True, most_blocks=32
        ),
        Fabric("verbs", "verbs", PROCESS + PORTS),
    )
}
