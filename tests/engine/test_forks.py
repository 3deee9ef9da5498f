"""A forked process has its parent's engines, and none of their threads. It may release them; every
other use fails with an error that says why."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest

from kvxfer.engine import Engine, PolledEngine
from kvxfer.engine.native import error_of, native
from kvxfer.engine.synchronous import SynchronousEngine
from kvxfer.errors import EngineClosed
from kvxfer.moe import AllToAll, MoeShape
from kvxfer.weights.holdings import Holdings
from kvxfer.weights.trainer import Trainer

KEY: Final = "0123456789abcdef" * 2
HANG_SECONDS: Final = 30.0


def ends(child: Callable[[], None]) -> bool:
    """True if a forked process that calls `child` ends well."""
    gc.collect()  # garbage of other tests
    pid = os.fork()
    if pid == 0:
        gc.unfreeze()
        with contextlib.suppress(BaseException):
            child()
            os._exit(0)
        os._exit(1)
    ended = os.pidfd_open(pid)
    hangs = select.poll()
    hangs.register(ended, select.POLLIN)
    if not hangs.poll(HANG_SECONDS * 1000):
        os.kill(pid, signal.SIGKILL)
    os.close(ended)
    _, status = os.waitpid(pid, 0)
    return status == 0


def group() -> AllToAll:
    shape = MoeShape(experts=2, top_k=1, hidden=64, max_tokens=4)
    return AllToAll(shape, rank=0, ranks=1, cluster_key=KEY, addresses=[""], torch=False)


@contextlib.contextmanager
def asyncio_engine() -> Iterator[Engine]:
    """An engine entered on a loop that does not run while its process forks."""
    with asyncio.Runner() as runner:
        engine = Engine(cluster_key=KEY, fabrics=["tcp"])
        runner.run(engine.__aenter__())
        yield engine
        runner.run(engine.close())


def in_public(call: Callable[[], object]) -> None:
    """Calls, and turns native errors into public ones."""
    try:
        call()
    except native.Error as error:
        raise error_of(*error.args) from None


def parent() -> str:
    """Returns a pattern for how an error describes the parent process."""
    return rf"process {os.getppid()}, from which this one was forked"


def test_a_forked_process_may_drop_engines_of_its_parent() -> None:
    engines = [SynchronousEngine(cluster_key=KEY, fabrics=["tcp"])]

    def drop() -> None:
        engines.clear()
        gc.collect()

    assert ends(drop)
    engines[0].close()


def test_a_forked_process_may_drop_groups_of_its_parent() -> None:
    groups = [group()]

    def drop() -> None:
        groups.clear()
        gc.collect()

    assert ends(drop)
    groups[0].close()


@pytest.mark.parametrize("kind", [SynchronousEngine, PolledEngine])
def test_a_forked_process_can_only_close_an_engine_of_its_parent(kind: Any) -> None:
    engine = kind(cluster_key=KEY, fabrics=["tcp"])
    other = kind(cluster_key=KEY, fabrics=["tcp"])
    counter = engine.counter()
    region = engine.alloc(4096)

    def use() -> None:
        calls: list[Callable[[], object]] = [
            engine.stats,
            engine.native.drain,
            engine.native.poll,
            lambda: engine.alloc(4096),
            lambda: engine.native.connect(other.address, 1.0),
            engine.counter,
        ]
        for call in calls:
            with pytest.raises(EngineClosed, match=parent()):
                in_public(call)
        for end in (region.close, counter.release, engine.close, engine.close):
            end()

    assert ends(use)
    assert engine.stats()["peers"] == 0
    region.close()
    engine.close()
    other.close()


def test_an_engine_of_a_loop_goes_on_after_a_forked_process_has_closed_it() -> None:
    with asyncio_engine() as engine, asyncio.Runner() as runner:

        def use() -> None:
            with pytest.raises(EngineClosed, match=parent()):
                engine.counter()
            asyncio.run(engine.close())

        assert ends(use)

        async def connected() -> None:
            async with Engine(cluster_key=KEY, fabrics=["tcp"]) as other:
                await other.connect(engine.address)

        runner.run(connected())
        assert engine.stats()["peers"] >= 0


def test_a_forked_process_can_only_close_a_group_of_its_parent() -> None:
    one = group()
    rows = np.zeros((1, 64), np.float32)

    def use() -> None:
        with pytest.raises(EngineClosed, match=parent()):
            one.dispatch_send(rows, np.zeros((1, 1), np.int64), np.ones((1, 1), np.float32))
        one.close()

    assert ends(use)
    one.close()


def test_a_forked_process_can_only_close_a_trainer_of_its_parent() -> None:
    trainer = Trainer(Holdings(()), dict, rank=0, world_size=1, cluster_key=KEY, fabrics=["tcp"])

    def use() -> None:
        with pytest.raises(EngineClosed, match=parent()):
            trainer.wait_for(1, 1.0)
        trainer.close()

    assert ends(use)
    trainer.close()


SCRIPT: Final = """
import contextlib, multiprocessing, os, sys
from kvxfer.engine import PolledEngine
from kvxfer.engine.native import error_of, native
from kvxfer.engine.synchronous import SynchronousEngine

def child():
    os.write(1, b"child ran;")

with contextlib.closing(ENGINE(cluster_key="KEY", fabrics=["tcp"])) as engine:
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    pid = os.fork()
    if pid == 0:
        sys.exit(0)  # leaves the block, then Python's finalisation
    _, status = os.waitpid(pid, 0)
    os.write(1, b"status %d;" % status)
"""


@pytest.mark.parametrize("kind", ["PolledEngine", "SynchronousEngine"])
def test_a_forked_process_ends_without_a_hang(kind: str) -> None:
    script = SCRIPT.replace("ENGINE", kind).replace("KEY", KEY)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        said, _ = process.communicate(timeout=HANG_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail("a forked process, or its parent, hangs at its end")
    assert said == "child ran;status 0;"


ORPHAN: Final = """
import os, sys
from kvxfer.engine.synchronous import SynchronousEngine

engine = SynchronousEngine(cluster_key="KEY", fabrics=["tcp"])
if os.fork() == 0:
    os.write(1, b"child\\n")  # it has let go of the engine's sockets
    os.read(0, 1)  # until the test has ended
    os._exit(0)
os.write(1, engine.address.encode() + b"\\n")
os._exit(0)
"""


def test_the_port_of_a_dead_process_is_free_even_if_a_child_lives() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ORPHAN.replace("KEY", KEY)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        said = {process.stdout.readline().decode().strip() for _ in range(2)}
        (address,) = said - {"child"}
        process.wait()
        port = int(address.split("/")[2].rpartition(":")[2])
        SynchronousEngine(cluster_key=KEY, fabrics=["tcp"], port=port).close()
