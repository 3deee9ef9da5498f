"""A peer whose thread has no core is kept; a peer that was stopped is given up."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer import Engine
from tests.engine.conftest import KEY
from verify.polling import PATIENCE, eventually
from verify.processes.process import Process

pytestmark = pytest.mark.realtime

_PEER = f"""
import asyncio, threading
from kvxfer import Engine

async def main():
    # It does not judge: where both are stopped, one that is throttled stops later.
    async with Engine(
        cluster_key={KEY!r}, name="starved", fabrics=["local"], peer_timeout={PATIENCE}
    ) as engine:
        print('{{"address": "%s"}}' % engine.address, flush=True)
        await asyncio.to_thread(compute)

def compute():
    while True:
        pass

asyncio.run(main())
"""
_CPU = Path("/sys/fs/cgroup/cpu")


@pytest.fixture
def throttled() -> Iterator[Path]:
    """A control group whose processes have no core for most of each second."""
    group = _CPU / f"kvxfer-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group of CPU time can be made here: {error}")
    try:
        (group / "cpu.cfs_period_us").write_text("1000000")
        (group / "cpu.cfs_quota_us").write_text("50000")
        yield group
    finally:
        group.rmdir()


async def test_a_peer_without_a_core_is_kept_and_a_stopped_one_is_given_up(throttled: Path) -> None:
    async with Engine(cluster_key=KEY, name="watcher", fabrics=["local"]) as watcher:
        with Process("starved", sys.executable, "-c", _PEER) as process:
            address = (await process.becomes_ready())["address"]
            peer = await watcher.connect(address, PATIENCE)
            (throttled / "cgroup.procs").write_text(str(process.pid))

            def periods() -> int:
                told = dict(map(str.split, (throttled / "cpu.stat").read_text().splitlines()))
                return int(told["nr_throttled"])

            await eventually(lambda: periods() > 5)
            assert peer.error is None

            (_CPU / "cgroup.procs").write_text(str(process.pid))
            process.freeze()
            await eventually(lambda: peer.error is not None)
            assert "no heartbeat" in str(peer.error)
