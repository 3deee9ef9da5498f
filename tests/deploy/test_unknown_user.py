"""The programs under a UID that the platform assigns: it has no name and no home, and may write
only to folders that are open to all."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import httpx2
import pytest

from verify.polling import wait_until
from verify.processes import fleet as processes
from verify.processes.fleet import Fleet
from verify.processes.programs import kvxfer

pytestmark = [
    pytest.mark.native,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="another user needs root"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv (util-linux)"),
]
# A developer's Python may be in a home that is closed to others, so the user may read all files.
READS = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
USER = ("setpriv", "--reuid=1000680000", "--regid=0", "--clear-groups", *READS)
NAMELESS = ("env", "-u", "USER", "-u", "LOGNAME")
HOMES = itertools.cycle((("-u", "HOME"), ("HOME=/",)))  # no home, or one that cannot be written


def started(*words: str | Path) -> list[str]:
    return [*USER, *NAMELESS, *next(HOMES), *kvxfer(*words)]


def test_a_fleet_runs_under_a_uid_that_its_image_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "kvxfer", started)
    monkeypatch.chdir("/")
    with Fleet(tmp_path) as fleet:
        fleet.start_control_plane()
        for name in ("prefill-0", "decode-0"):
            fleet.begin_worker(name, "--threads", "1")
        fleet.start_router()
        wait_until(fleet.whole, 120)
        status = Path(f"/proc/{fleet.running['decode-0'].pid}/status").read_text()
        assert "\nUid:\t1000680000\t" in status
        body = {"model": "kvxfer-demo-8l", "prompt": "who am I?", "max_tokens": 4}
        answer = httpx2.post(f"{fleet.router.url}/v1/completions", json=body, timeout=60.0)
        assert answer.status_code == 200, answer.text
        moved = {"direction": "receive", "outcome": "delivered"}
        assert fleet.running["decode-0"].metric("kvxfer_kv_transfers_total", **moved) == 1
