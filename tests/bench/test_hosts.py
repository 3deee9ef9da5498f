"""`kvxfer bench --serve` and `--to`, as two processes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvxfer.bench import machine
from kvxfer.bench import messages as m
from kvxfer.bench.channel import PeerChannel
from kvxfer.bench.host_client import FABRICS as HOST_FABRICS
from kvxfer.bench.host_client import Ask, Server, line_rate, measure_host
from kvxfer.bench.host_report import HostReport
from kvxfer.bench.settings import LatencySettings, Settings
from kvxfer.engine import Engine
from kvxfer.engine.core import Nic
from kvxfer.errors import BenchError, InvalidArgument
from kvxfer.version import __version__
from tests.cuda.on_driver import DOUBLE
from tests.engine.fabrics import chosen, rdma_devices
from verify.chaos.link import Host, link, why_no_links
from verify.processes.process import ROOT, START_SECONDS, Process
from verify.processes.programs import clean_environment, kvxfer

pytestmark = pytest.mark.native

MIB = 1 << 20
KEY = "a cluster key for the two hosts"
SMALL = ("--quick", "--total", "1", "--pool", "16", "--rounds", "2", "--sizes", "4,64")
FABRICS = [each for each in chosen() if each in HOST_FABRICS and each != "ofi"]
SETTINGS = Settings(
    cases=(),
    page_bytes=(64 << 10,),
    request_bytes=MIB,
    pool_bytes=16 * MIB,
    rounds=1,
    seed=3,
    requests=2,
    latency=(LatencySettings(gap_ns=0, rounds=1, writes=3),),
    connect_rounds=1,
    registration_bytes=MIB,
    registration_rounds=1,
)


def run(name: str, *arguments: str, key: str = KEY, host: Host | None = None) -> Process:
    command = kvxfer("bench", *arguments)
    environment = clean_environment(KVXFER_CLUSTER_KEY=key)
    if "--gpu" in arguments and "KVXFER_TEST_CUDA" not in os.environ:
        environment["LD_LIBRARY_PATH"] = str(DOUBLE)
    return Process(
        name, *(command if host is None else host.command(*command)), environment=environment
    )


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[Process, str]]:
    """Starts a server; yields it with its address for --to."""
    with run("server", "--serve", "--port", "0", *arguments) as server:
        line = server.ready(lambda: "--to " in server.output and server.output)
        assert "on the other host, with the same cluster key: kvxfer bench --to " in line
        yield server, line.split("--to ")[1].split()[0]


def report_of(client: Process) -> dict[str, Any]:
    client.ends(START_SECONDS)
    report: dict[str, Any] = json.loads(client.output[client.output.index("{\n") :])
    return report


def measured(address: str, *arguments: str) -> dict[str, Any]:
    with run("client", "--to", address, *SMALL, "--json", *arguments) as client:
        return report_of(client)


@pytest.mark.parametrize("fabric", FABRICS)
def test_a_report_has_both_ends_and_every_figure_and_the_server_serves_the_next(
    fabric: str,
) -> None:
    with serving() as (server, address):
        report = measured(address, "--fabrics", fabric, "--seed", "5")
        assert (report["server"], report["seed"], report["rounds"]) == (address, 5, 2)
        assert report["page_bytes"] == [4 << 10, 64 << 10]
        for end in (report["sender"], report["receiver"]):
            assert fabric in end["fabrics"]
            assert end["version"] == __version__
            assert end["machine"]["cores"] > 0
        (figures,) = report["fabrics"]
        assert (figures["fabric"], figures["skipped"], figures["pull"]) == (fabric, None, None)
        nics = rdma_devices() if fabric == "verbs" else []
        pinned = nics if len(nics) > 1 else []
        assert [way["nic"] for way in figures["ways"]] == [None, *pinned]
        for way in figures["ways"]:
            assert [each["page_bytes"] for each in way["throughput"]] == report["page_bytes"]
            assert [each["gap_ns"] for each in way["round_trips"]] == [0, 5_000_000]
            for each in way["throughput"]:
                assert each["verified_bytes"] == (2 + 1) * 2 * MIB
                assert len(each["engine_ns"]) == 2
                assert len(each["limit_ns"]) == (2 if fabric == "tcp" else 0)
                assert min(each["gb_per_s"], each["limit_gbit_per_s"], each["ratio"]) > 0
                assert each["gbit_per_s"] == pytest.approx(8 * each["gb_per_s"])
            for each in way["round_trips"]:
                assert 0 < each["p50_ns"] <= each["p99_ns"]
        assert report["verified_bytes"] == len(figures["ways"]) * 2 * (2 + 1) * 2 * MIB
        again = measured(address, "--fabrics", fabric, "--rounds", "1")
        assert again["verified_bytes"] == len(figures["ways"]) * 2 * (1 + 1) * 2 * MIB
        server.ready(lambda: server.output.count("has its figures") == 2)


@pytest.mark.parametrize(("sends", "receives"), [(0, 0), (0, None), (None, 0)])
def test_memory_of_gpus_is_measured(sends: int | None, receives: int | None) -> None:
    def of(gpu: int | None) -> tuple[str, ...]:
        return () if gpu is None else ("--gpu", str(gpu))

    with serving(*of(receives)) as (_, address):
        report = measured(address, *of(sends), "--fabrics", "tcp")
    assert (report["sender"]["gpu"], report["receiver"]["gpu"]) == (sends, receives)
    assert report["verified_bytes"] == 2 * (2 + 1) * 2 * MIB


def test_the_error_names_a_gpu_that_does_not_exist() -> None:
    with run("server", "--serve", "--port", "0", "--gpu", "77") as server:
        server.ready(lambda: server.exit_code is not None)
        assert server.exit_code == 1
        assert "there is no GPU 77" in server.output


def test_the_figures_are_a_table_and_once_ends_the_server() -> None:
    with serving("--once") as (server, address):
        with run("client", "--to", address, *SMALL, "--fabrics", "tcp", "--pull") as client:
            client.ends(START_SECONDS)
            for text in ("Gbit/s", "raw TCP", "Round trip", "bytes verified", "takes two NICs"):
                assert text in client.output
        server.ends(START_SECONDS)


def test_another_key_is_refused_and_the_server_goes_on() -> None:
    with serving() as (_, address):
        with run("client", "--to", address, *SMALL, key="another key, of as many bytes") as client:
            client.ends(START_SECONDS, code=1)
            assert f"the server at {address} has another cluster key" in client.output
            assert "Traceback" not in client.output
        assert measured(address, "--fabrics", "tcp")["verified_bytes"]


def test_the_error_names_an_address_without_a_server_and_the_remedy() -> None:
    with serving() as (server, address):
        server.kill()
        with run("client", "--to", address, *SMALL) as client:
            client.ends(START_SECONDS, code=1)
            assert f"no server at {address}" in client.output
            assert "start `kvxfer bench --serve" in client.output


async def test_another_version_is_refused_and_the_server_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving() as (server, address):
        with monkeypatch.context() as patch:
            patch.setattr(machine, "__version__", "0.0.9")
            with pytest.raises(BenchError, match=r"has kvxfer 0\.0\.9, .* same version on both"):
                await measure(address)
        await server.becomes_ready(lambda: "was not served to the end" in server.output)
        assert (await measure(address)).verified_bytes == (1 + 1) * 2 * MIB


async def measure(address: str) -> HostReport:
    server = Server.parse(address, 1)
    ask = Ask(progress=lambda _: None, pull=None)
    return await measure_host(server, KEY.encode(), SETTINGS, ("tcp",), None, ask)


async def test_a_second_client_is_told_who_is_being_served() -> None:
    with serving() as (_, address):
        async with Engine(cluster_key=KEY, name="the first") as engine:
            server = Server.parse(address, 1)
            peer = await engine.connect(server.engine_address("0" * 32), START_SECONDS)
            channel = PeerChannel(peer, address)
            await channel.call(m.Greet(machine.this_end(engine, None)), m.Welcome)
            with pytest.raises(BenchError, match="is measuring with the first"):
                await measure(address)
            await channel.call(m.Leave(), m.Done)
        assert (await measure(address)).verified_bytes


async def test_a_request_that_no_server_knows_ends_one_client_only() -> None:
    with serving() as (_, address):
        async with Engine(cluster_key=KEY, name="the odd one") as engine:
            server = Server.parse(address, 1)
            peer = await engine.connect(server.engine_address("0" * 32), START_SECONDS)
            channel = PeerChannel(peer, address)
            with pytest.raises(
                BenchError, match="a server of this version does not know this request"
            ):
                await channel.call(m.ReadPages(SETTINGS.draw(64 << 10), 1, 0), m.Durations)
            # The first client is still connected, but has had its last answer.
            assert (await measure(address)).verified_bytes


def test_the_server_serves_the_next_client_after_one_is_killed() -> None:
    with serving() as (server, address):
        endless = ("--fabrics", "tcp", "--rounds", "100000")
        with run("client", "--to", address, *SMALL, *endless) as client:
            server.ready(lambda: "has come" in server.output)
            client.kill()
        server.ready(lambda: "was not served to the end: it was lost" in server.output)
        assert measured(address, "--fabrics", "tcp")["verified_bytes"]


def test_a_server_that_is_killed_ends_the_client_with_an_error() -> None:
    with serving() as (server, address):
        endless = ("--fabrics", "tcp", "--rounds", "100000")
        with run("client", "--to", address, *SMALL, *endless) as client:
            server.ready(lambda: "has come" in server.output)
            server.kill()
            client.ends(START_SECONDS, code=1)
            # The client may notice it in a call, in a write, or when the next engine connects.
            [line] = client.output.splitlines()
            assert line.startswith("error ["), line
            assert f"the server at {address}" in line or "peer 'bench on" in line, line


async def test_two_hosts_with_a_cable_between_them() -> None:
    if reason := why_no_links():
        pytest.skip(reason)
    async with link() as cable:
        here, there = cable.hosts
        arguments = ("--serve", "--once", "--host", there.address)
        with run("server", *arguments, host=there) as server:
            await server.becomes_ready(lambda: f"--to {there.address}:" in server.output)
            command = ("--to", there.address, *SMALL, "--json")
            with run("client", *command, host=here) as client:
                await client.becomes_ready(lambda: client.exit_code is not None)
                report = report_of(client)
        (figures,) = report["fabrics"]
        assert (figures["fabric"], figures["ways"][0]["without_limit"]) == ("tcp", None)
        assert report["verified_bytes"] == 2 * (2 + 1) * 2 * MIB


# Two devices of scripts/rxe-machine are the ends of one cable, so both go down together.
@pytest.mark.skipif(
    "verbs" not in FABRICS or len(rdma_devices()) < 3, reason="needs three Soft-RoCE devices"
)
def test_a_nic_that_goes_down_is_seen_and_every_byte_still_arrives() -> None:
    number = len(rdma_devices()) - 1
    with serving() as (_, address):
        command = ("--to", address, *SMALL, "--fabrics", "verbs", "--pull", "--json")
        with run("client", *command) as client:
            client.ready(lambda: "Pull the cable" in client.output)
            subprocess.run(["ip", "link", "set", f"rx{number}", "down"], check=True)
            try:
                report = report_of(client)
            finally:
                put_back(number, number + 1)
    pull = report["fabrics"][0]["pull"]
    assert pull["skipped"] is None
    notice = f"NIC rxe{number} is down"
    assert notice in pull["sender_notices"]
    assert notice in pull["receiver_notices"]
    assert min(pull["before_gb_per_s"], pull["after_gb_per_s"], pull["verified_bytes"]) > 0


def put_back(number: int, count: int) -> None:
    """Brings an interface of scripts/rxe-machine up, as it was before."""
    script = ROOT / "scripts/rxe/guest-interface"
    batch = subprocess.run([script, str(number), str(count)], check=True, stdout=subprocess.PIPE)
    subprocess.run(["ip", "-batch", "-"], input=batch.stdout, check=True)


@pytest.mark.parametrize(
    ("text", "server"),
    [
        ("127.0.0.1", "127.0.0.1:7480"),  # text
        ("127.0.0.1:81", "127.0.0.1:81"),  # text
        ("::1", "[::1]:7480"),  # text
        ("[::1]:81", "[::1]:81"),  # text
    ],
)
def test_a_server_is_an_address_with_or_without_a_port(text: str, server: str) -> None:
    assert str(Server.parse(text, 7480)) == server


@pytest.mark.parametrize("text", ["", ":81", "127.0.0.1:x", "127.0.0.1:70000"])  # text
def test_an_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="write it as HOST or HOST:PORT"):
        Server.parse(text, 7480)


@pytest.mark.parametrize(
    ("pinned", "gigabits"), [(None, 250), (0, 200), (1, 200)], ids=["all", "fast", "faster"]
)
def test_the_line_rate_is_that_of_the_slower_end(pinned: int | None, gigabits: int) -> None:
    def nic(network: str, gigabits: int) -> Nic:
        return Nic(f"{network}{gigabits}", network, gigabits * 10**9)

    ours = [nic("roce", 200), nic("roce", 400)]
    theirs = [nic("roce", 200), nic("roce", 50), nic("ofi-efa", 100)]
    assert line_rate(ours, theirs, pinned) == gigabits * 10**9
    assert line_rate(ours, [], pinned) is None
