"""A forked process has the engines of its parent, and none of their threads."""

from __future__ import annotations

import gc
import os
import select
import signal
from collections.abc import Callable
from typing import Final

from kvxfer.engine.synchronous import SynchronousEngine
from kvxfer.moe import AllToAll, MoeShape

KEY: Final = "0123456789abcdef" * 2
HANG_SECONDS: Final = 30.0


def ends(child: Callable[[], None]) -> bool:
    """Whether a forked process that calls it ends well."""
    pid = os.fork()
    if pid == 0:
        child()
        os._exit(0)
    ended = os.pidfd_open(pid)
    hangs = select.poll()
    hangs.register(ended, select.POLLIN)
    if not hangs.poll(HANG_SECONDS * 1000):
        os.kill(pid, signal.SIGKILL)
    os.close(ended)
    _, status = os.waitpid(pid, 0)
    return status == 0


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
