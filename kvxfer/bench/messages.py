"""The requests of the sender, and the receiver's answers.

Every request is answered by one message: the one its docstring names, or `Failed`.
"""

from __future__ import annotations

import msgspec

from kvxfer.bench.machine import End
from kvxfer.bench.pages import PageDraw


class Message(msgspec.Struct, frozen=True, tag=True):
    """The base of both directions."""


# --- requests --------------------------------------------------------------------------------


class OpenEngine(Message, frozen=True):
    """A request for an engine with the destination pool registered. -> EngineOpened"""

    fabrics: tuple[str, ...]
    cluster_key: bytes


class CloseEngine(Message, frozen=True):
    """-> Done"""


class NewCounters(Message, frozen=True):
    """-> Counters"""

    count: int


class AwaitArrivals(Message, frozen=True):
    """A wait until each of the new counters shows one write; it releases them. -> Times"""


class CheckWrites(Message, frozen=True):
    """A wait until the one new counter shows `total`, and a check that it shows no more and that
    the destination pool holds the draw's pages and nothing else; it wipes the pool. -> Done"""

    draw: PageDraw
    total: int


class ReadCpuSeconds(Message, frozen=True):
    """-> CpuSeconds"""


class CopyPages(Message, frozen=True):
    """A memcpy of the pages from a source pool of the receiver, checked like an engine's writes.
    -> Durations"""

    draw: PageDraw


class ReadPages(Message, frozen=True):
    """A process_vm_readv of the pages from the sender's source pool, checked alike. -> Durations"""

    draw: PageDraw
    pid: int
    address: int


class TcpListen(Message, frozen=True):
    """A request to listen for raw TCP connections. -> TcpPort"""


class TcpAccept(Message, frozen=True):
    """A request to accept the sender's raw TCP connection; a former one is closed. -> Done"""


class TcpReceive(Message, frozen=True):
    """The receiving side of `_probes.tcp_send`. -> Done"""

    nbytes: int
    times: int


class TcpPong(Message, frozen=True):
    """The receiving side of `_probes.tcp_ping`. -> Times"""

    message_bytes: int
    count: int
    spin: bool


class MailboxTake(Message, frozen=True):
    """The receiving side of `_probes.mailbox_post`. -> Times"""

    count: int
    spin: bool
    remote: tuple[int, int] | None


Request = (
    OpenEngine
    | CloseEngine
    | NewCounters
    | AwaitArrivals
    | CheckWrites
    | ReadCpuSeconds
    | CopyPages
    | ReadPages
    | TcpListen
    | TcpAccept
    | TcpReceive
    | TcpPong
    | MailboxTake
)

# --- requests of another host ------------------------------------------------------------------


class Greet(Message, frozen=True):
    """The first request, refused if the versions differ. -> Welcome"""

    end: End


class OpenPool(Message, frozen=True):
    """A request for a destination pool, registered; a former one is closed. -> PoolOpened"""

    pool_bytes: int


class StartEcho(Message, frozen=True):
    """A request to take a counter, and to answer each of `count` writes that it counts by a write
    without bytes to `engine_id`, with the immediate `imm`. -> Counters"""

    engine_id: str
    imm: int
    count: int


class EndEcho(Message, frozen=True):
    """A wait until all writes are answered, and a check that the first `nbytes` of the pool are
    those of the source pool. -> Done"""

    nbytes: int


class ReadNotices(Message, frozen=True):
    """-> Notices"""


class Leave(Message, frozen=True):
    """The last request. -> Done"""


# The requests that reach no other process's memory.
HostRequest = (
    Greet
    | OpenPool
    | NewCounters
    | CheckWrites
    | StartEcho
    | EndEcho
    | ReadNotices
    | TcpListen
    | TcpAccept
    | TcpReceive
    | Leave
)

# --- answers ---------------------------------------------------------------------------------


class Done(Message, frozen=True):
    pass


class Failed(Message, frozen=True):
    """The failure of a request; `code` is that of `kvxfer.errors`."""

    code: str
    message: str


class EngineOpened(Message, frozen=True):
    address: str
    descriptor: bytes


class Counters(Message, frozen=True):
    imms: list[int]


class Times(Message, frozen=True):
    """Nanoseconds of `time.monotonic_ns()`."""

    at_ns: list[int]


class CpuSeconds(Message, frozen=True):
    """User and system time of the receiver process so far."""

    seconds: float


class Durations(Message, frozen=True):
    """Nanoseconds of each request of a draw."""

    nanoseconds: list[int]


class TcpPort(Message, frozen=True):
    port: int


class Welcome(Message, frozen=True):
    end: End


class PoolOpened(Message, frozen=True):
    descriptor: bytes


class Notices(Message, frozen=True):
    """The notices of the receiver's engine since the greeting, such as "NIC mlx5_0 is down"."""

    texts: list[str]


Answer = (
    Done
    | Failed
    | EngineOpened
    | Counters
    | Times
    | CpuSeconds
    | Durations
    | TcpPort
    | Welcome
    | PoolOpened
    | Notices
)
