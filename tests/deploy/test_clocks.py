"""A worker on a host whose wall clock is wrong by a minute and a half."""

from __future__ import annotations

import os
from pathlib import Path

import httpx2
import pytest

from verify.polling import wait_until
from verify.processes.fleet import Fleet

pytestmark = [pytest.mark.native, pytest.mark.timeout(300)]
FAKETIME = "/usr/$LIB/faketime/libfaketime.so.1"


@pytest.mark.parametrize(
    ("seconds", "how", "code", "said"),
    [
        (90, "ahead of", "ticket-expired", "these clocks differ: synchronise them (NTP)"),
        (-90, "behind", "ticket-invalid", "synchronise the clocks of the hosts (NTP)"),
    ],
)
def test_an_error_and_the_log_name_the_clock(
    tmp_path: Path, seconds: int, how: str, code: str, said: str
) -> None:
    wrong = {
        "LD_PRELOAD": os.pathsep.join(filter(None, [FAKETIME, os.environ.get("LD_PRELOAD")])),
        "FAKETIME": f"{seconds:+}s",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    with Fleet(tmp_path) as fleet:
        fleet.start_control_plane()
        fleet.begin_worker("prefill-0", "--threads", "1")
        decode = fleet.begin_worker("decode-0", "--threads", "1", **wrong)
        fleet.start_router("--attempts", "1")
        wait_until(fleet.whole, 120)
        assert f"s {how} the control plane's" in decode.output
        body = {"model": "kvxfer-demo-8l", "prompt": "what time is it?", "max_tokens": 4}
        answer = httpx2.post(f"{fleet.router.url}/v1/completions", json=body, timeout=60.0)
        assert not answer.is_success
        error = answer.json()["error"]
        assert (error["code"], said in error["message"]) == (code, True), error
