"""`kvxfer instances`, `transfers`, `drain`, `undrain` and `role`: tables, JSON, and one-line
errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest

from kvxfer.client import (
    ControlPlaneClient,
    Credentials,
    Registration,
    SyncControlPlaneClient,
)
from kvxfer.instances import Instance, InstanceState, Load, Role, Snapshot
from kvxfer.model_identity import ModelIdentity
from kvxfer.scheduler.lease_policy import LeasePolicy
from kvxfer.scheduler.redis_registry import RedisRegistry
from kvxfer.web.tokens import watch_tokens
from kvxfer.weight_updates import AnnounceUpdate, Decision, PartReport, PartState, ReportUpdate
from tests.virtual_time import VirtualClock
from verify.polling import PATIENCE, wait_until
from verify.processes.control_plane import RunningControlPlane, worker
from verify.processes.redis_server import RedisServer

pytestmark = pytest.mark.native

READY = InstanceState.READY


@pytest.fixture
def server() -> Iterator[RunningControlPlane]:
    with RunningControlPlane(lease_seconds=600) as running:
        yield running


@pytest.fixture
def client(server: RunningControlPlane) -> Iterator[SyncControlPlaneClient]:
    with SyncControlPlaneClient(server.url) as client:
        yield client


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A Redis that the test may stop."""
    with RedisServer() as running:
        yield running


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


@contextlib.contextmanager
def nobody_listens() -> Iterator[str]:
    """Yields an address on which nothing listens, reserved until the block ends."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def shown(url: str, *arguments: str) -> str:
    ended = kvxfer(*arguments, KVXFER_CONTROL_PLANE=url)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def rows(table: str) -> list[list[str]]:
    """Returns the words of each line below the header."""
    return [line.split() for line in table.splitlines()[1:]]


def test_instances_as_a_table_and_as_json(server, client):
    assert shown(server.url, "instances") == "no instance is registered\n"
    lease = client.register(worker("p"), state=READY)
    client.register(worker("d", "decode", model="qwen"))
    client.heartbeat(
        "p", lease.epoch, load=Load(running=3, waiting=1, free_blocks=5, cached_blocks=9)
    )
    d, p = rows(shown(server.url, "instances"))
    assert d[:9] == ["d", "decode", "joining", "qwen", "0", "+", "0", "0", "?"]
    assert p[:11] == ["p", "prefill", "ready", "llama", "3", "+", "1", "0", "5", "of", "64,"]
    assert p[11:13] == ["9", "cached"]
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
        "transfers": [],
        "stale_seconds": None,
    }


def test_weight_updates_as_a_table_and_as_json(server, client):
    assert shown(server.url, "weights", "updates") == "no weight update is known\n"
    client.register(worker("a", identity=ModelIdentity(weights_version=6)))
    client.register(worker("b"))
    client.announce_weight_update(AnnounceUpdate(update_id="u", model="llama", version=7))
    staged = PartReport(instance_id="a", state=PartState.STAGED, pause_seconds=0.25)
    client.report_weight_update("u", ReportUpdate(instances=(staged,)))
    (row,) = rows(shown(server.url, "weights", "updates"))
    assert row[:8] == ["u", "llama", "7", "staging", "1", "staged,", "1", "receiving"]
    assert row[8:10] == ["0.250", "s"]
    client.decide_weight_update("u", Decision.ABORT)
    table = shown(server.url, "weights", "updates")
    assert "u: weight-update-aborted: it was decided to abort it" in table
    listed = json.loads(shown(server.url, "weights", "updates", "--json", "--model", "llama"))
    assert [(u["update_id"], u["state"]) for u in listed["updates"]] == [("u", "aborted")]
    assert listed["stale_seconds"] is None
    a, b = rows(shown(server.url, "instances"))
    assert (a[-1], b[-1]) == ("6", "?")


def test_lists_say_how_stale_they_are(redis):
    registry = RedisRegistry(redis.url, LeasePolicy(600), timeout=PATIENCE)
    with RunningControlPlane(registry=registry) as server:
        with SyncControlPlaneClient(server.url) as client:
            client.register(worker("p"), state=READY)
            client.register(worker("d", "decode"), state=READY)
            client.open_transfer()
        assert "stale" not in shown(server.url, "instances")
        redis.kill()
        for command, listed in (("instances", 2), ("transfers", 1)):
            *table, last = shown(server.url, command).splitlines()
            assert len(table) == 1 + listed
            assert last.startswith("stale: this was known ")
            told = json.loads(shown(server.url, command, "--json"))
            assert len(told[command]) == listed
            assert 0 <= told["stale_seconds"] < 600


def test_instances_are_waited_for(server, client):
    client.register(worker("p"), state=READY)
    with started(server.url, "instances", "--until-count", "2") as waiting:
        wait_until(lambda: asked(server.url, "/v1/instances") >= 2)
        assert waiting.poll() is None
        client.register(worker("d", "decode"), state=READY)
        out, _ = waiting.communicate(timeout=60)
    assert (waiting.returncode, len(rows(out))) == (0, 2)
    late = ("instances", "--role", "decode", "--until-count", "0", "--deadline", "0")
    ended = kvxfer(*late, KVXFER_CONTROL_PLANE=server.url)
    told = "error [deadline-exceeded] not 0 such instances within 0 s: the last count was 1\n"
    assert (ended.returncode, ended.stderr) == (1, told)


def test_a_stale_count_does_not_end_the_wait(redis):
    registry = RedisRegistry(redis.url, LeasePolicy(600), timeout=PATIENCE)
    with RunningControlPlane(registry=registry) as server:
        with SyncControlPlaneClient(server.url) as client:
            client.register(worker("p"), state=READY)
        redis.kill()
        ended = kvxfer(
            *("instances", "--until-count", "1", "--deadline", "0"),
            KVXFER_CONTROL_PLANE=server.url,
        )
    assert ended.returncode == 1
    assert "the last count was 1, and stale: the control plane cannot" in ended.stderr


def test_a_control_plane_that_does_not_answer_yet_is_waited_for():
    arguments = ("instances", "--until-count", "0", "--deadline", "1")
    with nobody_listens() as address:
        ended = kvxfer(*arguments, KVXFER_CONTROL_PLANE=f"http://{address}")
    assert ended.returncode == 1
    assert ended.stderr.startswith("error [deadline-exceeded] not 0 such instances within 1 s: no")


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


@contextlib.contextmanager
def living(
    url: str, load: Callable[[], Load], token: str | None = None
) -> Iterator[threading.Thread]:
    """Runs a worker on a separate event loop; it leaves when it is drained and idle."""
    registered = threading.Event()

    async def live() -> None:
        async with (
            ControlPlaneClient(url, credentials=Credentials(token=token)) as client,
            Registration(client, worker("p"), load=load) as registration,
        ):
            registered.set()
            await registration.drained()

    thread = threading.Thread(target=lambda: asyncio.run(live()), daemon=True)
    thread.start()
    assert registered.wait(20)
    yield thread
    thread.join()


def asked(url: str, route: str) -> int:
    """Returns the number of GETs of a route that the control plane has answered."""
    text = httpx2.get(f"{url}/metrics", trust_env=False).text
    name = "kvxfer_http_request_seconds_count"
    found = re.search(
        rf'^{name}{{method="GET",route="{re.escape(route)}"}} (.*)$', text, re.MULTILINE
    )
    return 0 if found is None else int(float(found[1]))


def drain_is_answered(url: str) -> None:
    """Waits for the answer to a drain: the watch shows a drain before its caller has the answer."""
    answered = re.compile(r'kvxfer_http_requests_total{.*/drain",status="202"} 1')
    wait_until(lambda: answered.search(httpx2.get(f"{url}/metrics").text))


def until(client: SyncControlPlaneClient, seen: Callable[[Instance], bool]) -> Instance:
    """Follows the watch until the worker is as wanted, and returns the worker."""
    with contextlib.closing(client.watch()) as watch:
        for item in watch:
            for instance in item.instances if isinstance(item, Snapshot) else (item.instance,):
                if seen(instance):
                    return instance
    raise AssertionError("a watch has no end")


def test_drain_waits_until_the_worker_has_left():
    load = Load(running=1)
    with (
        RunningControlPlane(lease_seconds=4.5) as server,
        SyncControlPlaneClient(server.url) as client,
        living(server.url, lambda: load),
    ):
        with started(server.url, "drain", "p", "--json") as draining:
            until(client, lambda p: p.state is InstanceState.DRAINING)
            assert draining.poll() is None
            load = Load()
            out, _ = draining.communicate(timeout=30)
        assert draining.returncode == 0
        assert json.loads(out)["left"] is True


def test_drain_with_a_workers_token_sends_the_secret_from_the_runtime_folder(tmp_path, monkeypatch):
    tokens = tmp_path / "tokens"
    tokens.write_text("w worker token-of-a-worker\nops admin token-of-operators\n")
    monkeypatch.setenv("KVXFER_RUNTIME_DIR", str(tmp_path / "here"))
    load = Load(running=1)
    with (
        RunningControlPlane(lease_seconds=4.5, tokens=watch_tokens(tokens)) as server,
        living(server.url, lambda: load, "token-of-a-worker"),
    ):

        def drain(token: str, folder: str) -> subprocess.CompletedProcess[str]:
            return kvxfer(
                *("drain", "p", "--no-wait"),
                KVXFER_CONTROL_PLANE=server.url,
                KVXFER_TOKEN=token,
                KVXFER_RUNTIME_DIR=str(tmp_path / folder),
            )

        refused = drain("token-of-a-worker", "elsewhere")
        assert refused.returncode == 1
        assert (
            "[forbidden] a call that acts as instance 'p' needs the secret of its lease"
            in refused.stderr
        )
        assert drain("token-of-operators", "elsewhere").returncode == 0
        accepted = drain("token-of-a-worker", "here")
        assert accepted.returncode == 0, accepted.stderr
        load = Load()


def test_undrain_waits_until_the_worker_is_ready():
    load = Load(running=1)
    with (
        RunningControlPlane(lease_seconds=4.5) as server,
        SyncControlPlaneClient(server.url) as client,
        living(server.url, lambda: load),
    ):
        shown(server.url, "drain", "p", "--no-wait")
        assert shown(server.url, "undrain", "p") == "p is ready\n"
        assert client.instance("p").state is READY
        told = json.loads(shown(server.url, "undrain", "p", "--json"))
        assert (told["state"], told["drain_deadline"]) == ("ready", None)
        shown(server.url, "drain", "p", "--no-wait")
        load = Load()


@pytest.mark.parametrize("late", [False, True])
def test_undrain_of_a_worker_that_leaves_is_an_error(server, client, late):
    lease = client.register(worker("p"), state=READY)
    client.drain("p")
    if not late:
        client.heartbeat("p", lease.epoch, state=InstanceState.DRAINING)
    with started(server.url, "undrain", "p") as undraining:
        if late:
            until(client, lambda p: p.state is InstanceState.JOINING)
            client.heartbeat("p", lease.epoch, state=InstanceState.DRAINING)
        out, said = undraining.communicate(timeout=60)
    assert (undraining.returncode, out) == (1, "")
    assert "[instance-leaving] the worker of instance 'p' ha" in said


def test_drain_until_idle_does_not_wait_for_the_worker_to_leave(server, client):
    lease = client.register(worker("p"), state=READY)
    client.heartbeat("p", lease.epoch, load=Load(running=1))
    where = {"KVXFER_INSTANCE_ID": "p"}
    with started(server.url, "drain", "--until", "idle", **where) as draining:
        until(client, lambda p: p.state is InstanceState.DRAINING)
        client.heartbeat("p", lease.epoch, load=Load(waiting=1))
        before = asked(server.url, "/v1/instances/{instance_id}")
        # After the second answer, the command has seen that load.
        wait_until(lambda: asked(server.url, "/v1/instances/{instance_id}") >= before + 2)
        assert draining.poll() is None
        client.heartbeat("p", lease.epoch, load=Load())
        out, _ = draining.communicate(timeout=30)
    assert (draining.returncode, out) == (0, "p is idle\n")
    assert client.instance("p").state is InstanceState.DRAINING


def test_drain_until_idle_ignores_the_load_from_before_the_drain(server, client):
    """A request that arrived since the last heartbeat is in no figure yet."""
    client.register(worker("p"), state=READY)
    with started(server.url, "drain", "p", "--until", "idle", "--deadline", "0", grace=1) as late:
        _, said = late.communicate(timeout=60)
    assert late.returncode == 1
    assert "[deadline-exceeded] instance 'p' has not left" in said


def test_drain_continues_with_a_worker_that_redis_forgot(redis):
    load = Load(running=1)
    registry = RedisRegistry(redis.url, LeasePolicy(4.5))
    with (
        RunningControlPlane(registry=registry) as server,
        SyncControlPlaneClient(server.url) as client,
        living(server.url, lambda: load),
    ):
        with started(server.url, "drain", "p") as draining:
            first = until(client, lambda p: p.state is InstanceState.DRAINING)
            drain_is_answered(server.url)
            redis.kill()
            redis.start()
            # The worker registers again as draining; the command sends the deadline again.
            again = until(client, lambda p: p.epoch > first.epoch and p.drain_deadline is not None)
            assert again.state is InstanceState.DRAINING
            assert draining.poll() is None
            load = Load()
            out, said = draining.communicate(timeout=30)
        assert (draining.returncode, out) == (0, "p has left\n"), said


def test_drain_does_not_take_a_worker_that_redis_forgot_for_one_that_has_left(redis):
    with (
        RunningControlPlane(registry=RedisRegistry(redis.url, LeasePolicy(600))) as server,
        SyncControlPlaneClient(server.url) as client,
    ):
        client.register(worker("p"), state=READY)
        with started(server.url, "drain", "p", grace=0.5) as draining:
            until(client, lambda p: p.state is InstanceState.DRAINING)
            drain_is_answered(server.url)
            redis.kill()
            redis.start()
            out, said = draining.communicate(timeout=60)
    assert (draining.returncode, out) == (1, "")
    assert "the control plane lost its memory while instance 'p' drained" in said


@contextlib.contextmanager
def started(
    url: str, *arguments: str, grace: float = 15.0, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """Runs a command; it is killed when the block ends."""
    code = (
        f"import kvxfer.cli.drain as d, sys; d._GRACE_SECONDS = {grace}; sys.argv[0] = 'kvxfer'\n"
        "from kvxfer.cli import main; main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "KVXFER_CONTROL_PLANE": url, "COLUMNS": "200", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_worker_that_does_not_leave_is_an_error(server, client):
    client.register(worker("p"), state=READY)
    with started(server.url, "drain", "p", "--deadline", "0", grace=0.1) as draining:
        _, said = draining.communicate(timeout=60)
    assert draining.returncode == 1
    assert "[deadline-exceeded] instance 'p' has not left" in said


COMMANDS = [
    ("instances",),
    ("transfers",),
    ("drain", "p"),
    ("undrain", "p"),
    ("role", "p", "decode"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_no_control_plane_is_one_line(command):
    with nobody_listens() as address:
        ended = kvxfer(*command, "--control-plane", f"http://{address}")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("error [control-plane-unavailable] no control plane answers")
    assert address in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[RunningControlPlane]:
    file = tmp_path / "tokens"
    file.write_text("ops admin token-of-the-admin\nnode worker token-of-a-worker\n")
    with RunningControlPlane(tokens=watch_tokens(file), clock=VirtualClock()) as running:
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
