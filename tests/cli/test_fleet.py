"""`kvxfer instances`, `transfers`, `drain` and `role`: tables, JSON, and one-line errors."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer.api.tokens import watch_tokens
from kvxfer.client import ControlPlaneClient, SyncControlPlaneClient
from kvxfer.instances import InstanceState, Load, Role
from kvxfer.registration import Registration
from tests.control_plane import FakeClock, RunningControlPlane, worker

READY = InstanceState.READY


@pytest.fixture
def server() -> Iterator[RunningControlPlane]:
    with RunningControlPlane(lease_seconds=600) as running:
        yield running


@pytest.fixture
def client(server: RunningControlPlane) -> Iterator[SyncControlPlaneClient]:
    with SyncControlPlaneClient(server.url) as client:
        yield client


def kvxfer(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVXFER_")}
    return subprocess.run(
        [sys.executable, "-m", "kvxfer.cli", *arguments],
        env={**kept, "COLUMNS": "200", **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def shown(url: str, *arguments: str) -> str:
    ended = kvxfer(*arguments, KVXFER_CONTROL_PLANE=url)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def rows(table: str) -> list[list[str]]:
    """The words of each line below the header."""
    return [line.split() for line in table.splitlines()[1:]]


def test_instances_as_a_table_and_as_json(server, client):
    assert shown(server.url, "instances") == "no instance is registered\n"
    lease = client.register(worker("p"), state=READY)
    client.register(worker("d", "decode", model="qwen"))
    client.heartbeat("p", lease.epoch, load=Load(running=3, waiting=1, free_blocks=5))
    d, p = rows(shown(server.url, "instances"))
    assert d[:9] == ["d", "decode", "joining", "qwen", "0", "0", "0", "?", "of"]
    assert p[:10] == ["p", "prefill", "ready", "llama", "3", "1", "0", "5", "of", "64"]
    listed = json.loads(shown(server.url, "instances", "--json", "--role", "prefill"))
    (told,) = listed["instances"]
    assert (told["instance_id"], told["epoch"]) == ("p", lease.epoch)
    assert (told["load"]["running"], told["layout"]["num_layers"]) == (3, 2)
    assert shown(server.url, "instances", "--model", "x") == "no instance matches\n"


def test_transfers_as_a_table_and_as_json(server, client):
    assert shown(server.url, "transfers") == "no transfer is open\n"
    client.register(worker("p"), state=READY)
    client.register(worker("d", "decode"), state=READY)
    opened = client.open_transfer(request_id="cmpl-7", prompt_tokens=40)
    (row,) = rows(shown(server.url, "transfers"))
    assert row[:9] == [opened.transfer_id, "cmpl-7", "llama", "p", "d", "40", "3", "+", "3"]
    out = shown(server.url, "transfers", "--json", "--instance", "d")
    assert [t["transfer_id"] for t in json.loads(out)["transfers"]] == [opened.transfer_id]
    assert opened.ticket not in out
    assert json.loads(shown(server.url, "transfers", "--json", "--instance", "x")) == {
        "transfers": []
    }


def test_role_is_changed(server, client):
    client.register(worker("p"), state=READY)
    assert shown(server.url, "role", "p", "decode") == "p takes the role decode\n"
    assert client.instance("p").role is Role.DECODE
    assert json.loads(shown(server.url, "role", "p", "both", "--json"))["role"] == "both"


def test_drain_without_waiting(server, client):
    lease = client.register(worker("p"), state=READY)
    client.heartbeat("p", lease.epoch, load=Load(running=3))
    out = shown(server.url, "drain", "p", "--no-wait", "--deadline", "500")
    assert out.startswith("p drains: 3 running, 0 waiting, 0 transfers open, ")
    (row,) = rows(shown(server.url, "instances"))
    assert (row[2], row[-2:]) == ("draining", ["s", "left"])
    told = json.loads(shown(server.url, "drain", "p", "--no-wait", "--json"))
    assert (told["left"], told["instance"]["state"]) == (False, "draining")


def test_drain_waits_until_the_worker_has_left():
    """A worker of its own event loop hears of the drain, ends its request, and leaves."""
    with RunningControlPlane(lease_seconds=1.5) as server:
        load, registered = Load(running=1), threading.Event()

        async def live() -> None:
            async with (
                ControlPlaneClient(server.url) as client,
                Registration(client, worker("p"), load=lambda: load) as registration,
            ):
                registered.set()
                await registration.drained()

        thread = threading.Thread(target=lambda: asyncio.run(live()), daemon=True)
        thread.start()
        assert registered.wait(20)
        draining = subprocess.Popen(
            [sys.executable, "-m", "kvxfer.cli", "drain", "p", "--json"],
            env={**os.environ, "KVXFER_CONTROL_PLANE": server.url},
            stdout=subprocess.PIPE,
            text=True,
        )
        with SyncControlPlaneClient(server.url) as client:
            watch = client.watch()
            for item in watch:
                seen = getattr(item, "instance", None)
                if seen is not None and seen.state is InstanceState.DRAINING:
                    break
            watch.close()
        assert draining.poll() is None
        load = Load()
        out, _ = draining.communicate(timeout=30)
        thread.join(20)
        assert not thread.is_alive()
        assert draining.returncode == 0
        assert json.loads(out)["left"] is True


def test_worker_that_does_not_leave_is_an_error(server, client, monkeypatch):
    client.register(worker("p"), state=READY)
    code = (
        "import kvxfer.cli.drain as d, sys; d._GRACE_SECONDS = 0.1; sys.argv[0] = 'kvxfer'\n"
        "from kvxfer.cli import main; main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, "drain", "p", "--deadline", "0"],
        env={**os.environ, "KVXFER_CONTROL_PLANE": server.url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "[deadline-exceeded] instance 'p' is still there" in ended.stderr


COMMANDS = [("instances",), ("transfers",), ("drain", "p"), ("role", "p", "decode")]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_no_control_plane_is_one_line(command):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        ended = kvxfer(*command, "--control-plane", url)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("error [control-plane-unavailable] no control plane answers")
    assert url in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[RunningControlPlane]:
    file = tmp_path / "tokens"
    file.write_text("ops admin token-of-the-admin\nnode worker token-of-a-worker\n")
    with RunningControlPlane(tokens=watch_tokens(file), clock=FakeClock()) as running:
        yield running


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize(
    ("token", "code"),
    [("", "unauthenticated"), ("not-the-right-token", "unauthenticated")],
)
def test_missing_or_wrong_token_is_one_line(guarded, command, token, code):
    ended = kvxfer(*command, KVXFER_CONTROL_PLANE=guarded.url, KVXFER_TOKEN=token)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"error [{code}] the control plane")
    assert len(ended.stderr.splitlines()) == 1
    assert "not-the-right-token" not in ended.stderr


def test_wrong_scope_is_one_line_that_names_the_right_one(guarded, tmp_path):
    file = tmp_path / "token"
    file.write_text("token-of-a-worker\n")
    arguments = ("--control-plane", guarded.url, "--token-file", str(file))
    assert kvxfer("instances", *arguments).returncode == 0
    ended = kvxfer("role", "p", "decode", *arguments)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error [forbidden] POST /v1/instances/p/role takes a token")
    assert "scope admin" in ended.stderr


def test_errors_as_json(guarded):
    ended = kvxfer("instances", "--json", KVXFER_CONTROL_PLANE=guarded.url)
    assert ended.returncode == 1
    assert json.loads(ended.stdout)["error"]["code"] == "unauthenticated"
