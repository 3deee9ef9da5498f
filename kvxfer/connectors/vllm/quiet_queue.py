"""A plugin of vLLM (`vllm.general_plugins`): readers of its shared-memory queue sleep sooner.

A reader yields its core in a loop for a second after each message. So an engine that waits for a
transfer, with a few messages each tenth of a second, keeps a core per process busy. With
KVXFER_VLLM_QUEUE_SPIN_SECONDS a reader loops for that time only, then sleeps until the writer
signals the next message, as vLLM's own reader does after the second. A message to a reader that
sleeps costs the wake-up, some 0.1 ms. Without the variable nothing changes.
"""

from __future__ import annotations

import math
import os
from typing import Any, Final

VARIABLE: Final = "KVXFER_VLLM_QUEUE_SPIN_SECONDS"

# A reader looks this often for a message without a signal.
_LOOK_MS: Final = 100


def spin_seconds() -> float | None:
    """Returns the variable's value, or None if it is not set. Raises ValueError unless it is a
    number of seconds from 0 to 1."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= 1:
        raise ValueError(f"{VARIABLE} is {text!r}; use seconds from 0 to 1, such as 0.002")
    return seconds


def register() -> None:
    """Shortens the loop if the variable is set. vLLM calls this in each of its processes."""
    if (seconds := spin_seconds()) is not None:
        _spin_at_most(seconds)


def _spin_at_most(seconds: float) -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    class QuietCondition(shm_broadcast.SpinCondition):  # type: ignore[misc]
        busy_loop_s: float

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.busy_loop_s = min(self.busy_loop_s, seconds)

        def wait(self, timeout_ms: int | None = None) -> None:
            super().wait(_LOOK_MS if timeout_ms is None else min(timeout_ms, _LOOK_MS))

        def notify(self) -> None:
            # The socket has room for one signal and drops others. It notices only once a
            # millisecond that the last one has left, unless it is asked: the second of two signals
            # would be lost, and its message read when the reader next looks.
            self.local_notify_socket.getsockopt(shm_broadcast.zmq.EVENTS)
            super().notify()

    shm_broadcast.SpinCondition = QuietCondition
