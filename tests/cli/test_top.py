"""`kvxfer top`: a frame, JSON, a terminal that it draws on, and one clear error."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer.cli.top_frame import bytes_per_second
from kvxfer.client import SyncControlPlaneClient
from kvxfer.instances import InstanceState, Load, Traffic
from kvxfer.web.tokens import watch_tokens
from verify.polling import PATIENCE, wait_until
from verify.processes.control_plane import RunningControlPlane, worker

from .test_fleet import kvxfer, shown

pytestmark = pytest.mark.native


@pytest.fixture
def server():
    with RunningControlPlane(lease_seconds=600) as running:
        yield running


@pytest.fixture
def busy(server):
    """A pair with a transfer, and 5 GB/s over verbs."""
    sent = (Traffic(to="d", fabric="verbs", bytes_per_second=5e9),)
    with SyncControlPlaneClient(server.url) as client:
        lease = client.register(worker("p", labels={"zone": "z"}), state=InstanceState.READY)
        client.register(worker("d", "decode"), state=InstanceState.READY)
        client.heartbeat("p", lease.epoch, load=Load(running=3, free_blocks=16, sent=sent))
        client.open_transfer(request_id="cmpl-7", prompt_tokens=40)
    return server


def test_a_frame_without_a_terminal(busy):
    for arguments in (["top"], ["top", "--once"]):
        text = shown(busy.url, *arguments)
        lines = [line.split() for line in text.splitlines()]
        assert text.startswith("kvxfer  2 instances   1 open transfers   5 GB/s (verbs 5 GB/s)")
        (role,) = [line for line in lines if line[:2] == ["prefill", "1"]]
        assert role[3:7] == ["75%", "3", "+", "0"]
        assert any(line[:5] == ["p", "→", "d", "verbs", "5"] for line in lines)
        assert any("cmpl-7" in line for line in lines)
        assert any(line[:4] == ["p", "prefill", "ready", "z"] for line in lines)
        assert "stale" not in text


def test_json_is_the_answer_of_the_route(busy):
    told = json.loads(shown(busy.url, "top", "--json", "--zone", "z"))
    assert (told["total"], told["matching"]) == (2, 1)
    assert [row["instance_id"] for row in told["instances"]] == ["p"]
    assert told["pairs"][0]["bytes_per_second"] == 5e9


def test_an_empty_fleet_says_so(server):
    assert "none is registered" in shown(server.url, "top")


def test_without_a_control_plane_there_is_one_error():
    ended = kvxfer("top", KVXFER_CONTROL_PLANE="http://127.0.0.1:1")
    assert ended.returncode == 1
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error [control-plane-unavailable] no control plane answers at")


def test_a_token_without_the_scope_is_refused(tmp_path: Path):
    tokens = tmp_path / "tokens"
    tokens.write_text("node worker token-of-the-node\n")
    with RunningControlPlane(tokens=watch_tokens(tokens)) as server:
        ended = kvxfer("top", KVXFER_CONTROL_PLANE=server.url, KVXFER_TOKEN="token-of-the-node")
    assert ended.returncode == 1
    assert "[forbidden]" in ended.stderr
    assert "admin or monitor" in ended.stderr


def test_on_a_terminal_it_follows_the_fleet_and_says_when_it_cannot(busy):
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvxfer.cli", "top", "--interval", "0.2"],
        env={**os.environ, "KVXFER_CONTROL_PLANE": busy.url, "TERM": "xterm", "COLUMNS": "200"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    try:
        drawn_until(master, "1 open transfers")
        with SyncControlPlaneClient(busy.url) as client:
            client.register(worker("newcomer"), state=InstanceState.READY)
        drawn_until(master, "newcomer")
        busy.stop()
        text = drawn_until(master, "no control plane answers")
        assert "stale for" in text
        process.send_signal(signal.SIGINT)
        drawn_until(master, None)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)


def drawn_until(master: int, words: str | None) -> str:
    """Returns the output until `words` appear, or to its end if `words` is None."""
    text = ""

    def drawn() -> bool:
        nonlocal text
        if select.select([master], [], [], 0)[0]:
            try:
                text += os.read(master, 65536).decode(errors="replace")
            except OSError:  # the other end is closed
                assert words is None, text[-2000:]
                return True
        return words is not None and words in text

    try:
        wait_until(drawn)
    except TimeoutError as error:
        error.add_note(text[-2000:])
        raise
    return text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B/s"), (999, "999 B/s"), (1500, "1.5 kB/s"), (9.4e9, "9.4 GB/s"), (2e15, "2e+03 TB/s")],
)
def test_rates_are_short(value, text):
    assert bytes_per_second(value) == text
