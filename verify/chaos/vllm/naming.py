"""The time until the failure of a request was named, in an engine's log or to its client."""

from __future__ import annotations

import asyncio
import enum
import math
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .load import Sent

_POLL_SECONDS: Final = 0.01
_NAMED: Final = re.compile(rb"request \S*?(chaos-\d+)\b\S* is not (?:received|sent): (.*)")
_UNANSWERED: Final = re.compile(r"connecting to .* took longer than allowed")
_SILENCE: Final = re.compile(r"no heartbeat for (\d+) ms")


class Cause(enum.Enum):
    """The cause of a request's failure."""

    FAULT = enum.auto()
    STALL = enum.auto()  # no fault: an engine got no core for as long as the peer timeout
    UNKNOWN = enum.auto()


@dataclass(slots=True)
class Fault:
    """A fault of the cluster, with its times."""

    name: str
    began: float
    ended: float = math.inf
    """The time when the frozen process was resumed, or the cluster was whole again."""
    over: float = math.inf
    """The time after which it causes no failure."""
    waits: bool = False
    """True if new requests wait until it has ended, and can fail only then."""


@dataclass(frozen=True, slots=True)
class Naming:
    """The cause of a failure, and the time until it was named."""

    seconds: float
    cause: Cause


class Logs:
    """The engines' logs, read as they grow. Loop only."""

    def __init__(self, logs: Iterable[Path]) -> None:
        self._read = dict.fromkeys(logs, 0)
        self.named: dict[str, tuple[float, str]] = {}
        """The time of the first report of each request's failure, and all reports of it."""

    async def follow(self) -> None:
        """Reads the logs until it is cancelled."""
        while True:
            self._look()
            await asyncio.sleep(_POLL_SECONDS)

    def _look(self) -> None:
        for log, begin in self._read.items():
            if not log.exists() or log.stat().st_size == begin:
                continue
            with log.open("rb") as file:
                file.seek(begin)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read[log] = begin + len(whole)
            for request_id, reason in _NAMED.findall(whole):
                name, said = request_id.decode(), reason.decode(errors="replace")
                first, others = self.named.get(name, (time.monotonic(), ""))
                self.named[name] = first, f"{others}; {said}" if others else said


def naming(sent: Sent, logged: tuple[float, str] | None, fault: Fault | None) -> Naming:
    """Returns the time from the cause of a failure until an engine's log or the router named it.

    The cause is the fault, or the request if it came after the fault. For a request that waited for
    a frozen engine, it is the moment when that engine was resumed.
    """
    named = sent.ended if logged is None else min(logged[0], sent.ended)
    if fault is None or sent.began > fault.over or named < fault.began:
        reason = f"{sent.failure} {logged[1] if logged else ''}"
        if silence := _SILENCE.search(reason):
            return Naming(int(silence[1]) / 1000, Cause.STALL)
        if _UNANSWERED.search(reason):
            return Naming(named - sent.began, Cause.STALL)
        return Naming(named - sent.began, Cause.UNKNOWN)
    causes = [sent.began, fault.began, *([fault.ended] if fault.waits else [])]
    return Naming(named - max(cause for cause in causes if cause <= named), Cause.FAULT)
