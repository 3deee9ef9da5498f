"""The limits that `kvxfer bench` measures beside the engine: memcpy, process_vm_readv and TCP on
this host without an engine.

Pools are C-contiguous; page p of a pool starts p * page_bytes into it. Times are
nanoseconds of CLOCK_MONOTONIC, the clock of `time.monotonic_ns()`. Every function releases the
GIL while it works, raises OSError if the system refuses or the other side is silent for ten
seconds, ValueError for page lists of unequal length, IndexError for a page outside its pool.
"""

import mmap

import numpy as np
from numpy.typing import NDArray

MAILBOX_BYTES: int
"""Size of the shared memory that `mailbox_post` and `mailbox_take` map; it starts zeroed."""

MAIL_PAGE_OFFSET: int
"""The offset of the page in the mailbox."""

MAIL_PAGE_BYTES: int
"""Size of the mailbox's page: 4 KiB."""

READV_BATCH: int
"""Pages per process_vm_readv call."""

def copy_pages(
    src: NDArray[np.uint8],
    src_pages: NDArray[np.int64],
    dst: NDArray[np.uint8],
    dst_pages: NDArray[np.int64],
    page_bytes: int,
) -> int:
    """Copies the pages with one memcpy each on this thread; returns the nanoseconds."""

def read_pages(
    pid: int,
    src_address: int,
    src_bytes: int,
    src_pages: NDArray[np.int64],
    dst: NDArray[np.uint8],
    dst_pages: NDArray[np.int64],
    page_bytes: int,
) -> int:
    """Reads the pages out of process `pid`, whose pool of `src_bytes` starts at `src_address`,
    with process_vm_readv, READV_BATCH pages a call; returns the nanoseconds."""

def allow_reader(pid: int) -> None:
    """Lets process `pid` read this one's memory if Yama restricts it."""

def tcp_send(fd: int, nbytes: int, times: int, buffer: NDArray[np.uint8]) -> list[int]:
    """Sends `nbytes`, `times` times, from one buffer over a connected, blocking socket. Returns for
    each time the nanoseconds from the first send until the receiver has acknowledged everything."""

def tcp_receive(fd: int, nbytes: int, times: int, buffer: NDArray[np.uint8]) -> None:
    """The receiving side of `tcp_send`."""

def tcp_ping(fd: int, message_bytes: int, count: int, gap_ns: int, spin: bool) -> list[int]:
    """Sends `count` messages, each after the one before was acknowledged and `gap_ns` have passed.
    Returns the time at which each was given to the kernel."""

def tcp_pong(fd: int, message_bytes: int, count: int, spin: bool) -> list[int]:
    """The receiving side of `tcp_ping`. Returns the time at which each message arrived."""

def mailbox_post(mailbox: mmap.mmap, count: int, gap_ns: int, spin: bool) -> list[int]:
    """Announces the mailbox's page `count` times, each after the one before was taken and `gap_ns`
    have passed. Returns the time of each announcement."""

def mailbox_take(
    mailbox: mmap.mmap, count: int, spin: bool, remote: tuple[int, int] | None = None
) -> list[int]:
    """The receiving side of `mailbox_post`: copies the page out of the mailbox, or with
    process_vm_readv out of process `remote[0]` at address `remote[1]`. Returns the time at which
    each copy was complete."""
