"""A forked process has the engines of its parent, and none of their threads."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable

from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.engine.synchronous import SynchronousEngine
from kvxfer.moe import AllToAll, MoeShape

KEY = "0123456789abcdef" * 2
HANG_SECONDS = 30.0


def ends(child: Callable[[], None]) -> bool:
    """Whether a forked process that calls it ends well."""
    pid = os.fork()
    if pid == 0:
        child()
        os._exit(0)
    deadline = SYSTEM_CLOCK.monotonic() + HANG_SECONDS
    while SYSTEM_CLOCK.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status == 0
        SYSTEM_CLOCK.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def test_a_forked_process_may_drop_engines_of_its_parent() -> None:
    engines = [SynchronousEngine(cluster_key=KEY, fabrics=["tcp"])]

    def drop() -> None:
        engines.clear()
        gc.collect()

    assert ends(drop)
    engines[0].close()


def test_a_forked_process_may_drop_groups_of_its_parent() -> None:
    shape = MoeShape(experts=2, top_k=1, hidden=64, max_tokens=4)
    groups = [AllToAll(shape, rank=0, ranks=1, cluster_key=KEY, addresses=[""], torch=False)]

    def drop() -> None:
        groups.clear()
        gc.collect()

    assert ends(drop)
    groups[0].close()
