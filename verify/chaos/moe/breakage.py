"""Kills or stops the calling process, at once or in the middle of its next call."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

from kvxfer.clock import SYSTEM_CLOCK

Act = Literal["kill", "freeze"]

CALLS: Final = ("dispatch_send", "dispatch_recv", "compute", "combine_send", "combine_recv")
PHASES: Final = (
    *(f"{when} {call}" for call in CALLS for when in ("before", "in")),
    "sends Flush",
    "hears Flush",
    "sends View",
)
"""The last three belong to the agreement on a view."""
_SIGNALS: Final = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
_MOST_SECONDS: Final = 0.002
"""The latest time after the begin of a call at which the process breaks in it."""


class Fault(NamedTuple):
    """A fault of one rank. `nth` is the step, or the number of the agreement's message. `share` is
    the delay after the begin of a call, as a share of _MOST_SECONDS."""

    act: Act
    phase: str
    nth: int
    share: float


class _Event(ctypes.Structure):
    """sigevent of timer_create()."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    )


class _Times(ctypes.Structure):
    """itimerspec."""

    _fields_ = (("interval", ctypes.c_long * 2), ("value", ctypes.c_long * 2))


class Breakage:
    """A fault that breaks this process once, if it is armed. Just before, it calls `tell` with the
    time."""

    def __init__(
        self, fault: Fault | None, armed: Callable[[], bool], tell: Callable[[float], None]
    ) -> None:
        self._fault, self._armed, self._tell = fault, armed, tell
        self._messages = 0

    def at(self, call: str, step: int) -> None:
        """Breaks the process if the fault is at this call, which is about to begin."""
        if self._fault is None or step < self._fault.nth or not self._armed():
            return
        if self._fault.phase == f"before {call}":
            self._break()
        elif self._fault.phase == f"in {call}":
            self._break_soon(max(1e-6, self._fault.share * _MOST_SECONDS))

    def message(self, way: str, message: object) -> None:
        """Breaks the process if the fault is at this message, which it is about to send or has
        received."""
        if self._fault is None or self._fault.phase != f"{way} {type(message).__name__}":
            return
        self._messages += 1
        if self._messages >= self._fault.nth and self._armed():
            self._break()

    def watch(self, mesh: Any, handler: Any) -> None:
        """Calls message() for all messages of a rank."""
        send, heard = mesh.send, handler.heard

        def sends(rank: int, message: object) -> None:
            self.message("sends", message)
            send(rank, message)

        def hears(rank: int, message: object) -> None:
            self.message("hears", message)
            heard(rank, message)

        mesh.send, handler.heard = sends, hears

    def _break(self) -> None:
        assert self._fault is not None
        number, self._fault = _SIGNALS[self._fault.act], None
        self._tell(SYSTEM_CLOCK.monotonic())
        signal.pthread_kill(threading.get_ident(), number)

    def _break_soon(self, seconds: float) -> None:
        """Breaks the process by a timer of the kernel, which also interrupts native code."""
        assert self._fault is not None
        number, self._fault = _SIGNALS[self._fault.act], None
        libc = ctypes.CDLL(None, use_errno=True)
        timer = ctypes.c_void_p()
        event = _Event(number=number, notify=0)
        times = _Times(value=(0, int(seconds * 1e9)))
        self._tell(SYSTEM_CLOCK.monotonic() + seconds)
        if libc.timer_create(1, ctypes.byref(event), ctypes.byref(timer)) or libc.timer_settime(
            timer, 0, ctypes.byref(times), None
        ):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
