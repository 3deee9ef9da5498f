"""`kvxfer serve` with a watched event loop: its work between two looks, 5 ms apart.

KVXFER_BENCH_TURNS names the file for the figures, which is written every second.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from kvxfer.api import app
from kvxfer.cli import main

_LOOK_SECONDS: Final = 0.005
_WRITE_SECONDS: Final = 1.0
_sweep = app._sweep


class Turns:
    """The looks at the event loop: its processor time between two, and its delay."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._cpu: list[float] = []
        self._late: list[float] = []
        self._loop = asyncio.get_running_loop()
        self._looked = self._written = self._loop.time()
        self._used = time.thread_time()
        self._look()

    def _look(self) -> None:
        now, used = self._loop.time(), time.thread_time()
        self._cpu.append(used - self._used)
        self._late.append(max(now - self._looked - _LOOK_SECONDS, 0.0))
        if now - self._written > _WRITE_SECONDS:
            self._written = now
            self._file.write_bytes(msgspec.json.encode([self._cpu, self._late]))
        self._looked, self._used = self._loop.time(), time.thread_time()
        self._loop.call_later(_LOOK_SECONDS, self._look)


async def _watched(*arguments: Any) -> None:
    turns = Turns(Path(os.environ["KVXFER_BENCH_TURNS"]))
    await _sweep(*arguments)
    del turns


if __name__ == "__main__":
    app._sweep = _watched
    main()
