"""A fleet on a host without IPv4: it has `::1` and an address of a private IPv6 network."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from tests.deploy.chart import Container, render
from verify.chaos.link import Host, why_no_links
from verify.polling import wait_until
from verify.processes.fleet import CONTROL_PLANE, Fleet
from verify.processes.process import Process
from verify.processes.programs import free_port

pytestmark = [
    pytest.mark.native,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_no_links()), reason=str(why_no_links())),
]
ADDRESS = "fd00:6b76::1"
REQUESTS = 20
PASSWORD = "a-password-of-redis"


@pytest.fixture
def host() -> Iterator[Host]:
    name = f"kvx6-{os.getpid()}"
    inside = ["ip", "-n", name]
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run([*inside, "link", "set", "lo", "up"], check=True)
        subprocess.run([*inside, "addr", "add", f"{ADDRESS}/64", "dev", "lo", "nodad"], check=True)
        subprocess.run([*inside, "addr", "del", "127.0.0.1/8", "dev", "lo"], check=True)
        yield Host(name, ADDRESS, "lo")
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


def container(component: str) -> Container:
    release = render({"registry": {"kind": "bundled"}})
    [found] = [one for one in release.containers() if one.component == component]
    return found


def listening(component: str) -> str:
    """Returns the address that the chart's program of a component listens on."""
    [host] = [each for each in container(component).arguments if each.startswith("--host=")]
    return host.removeprefix("--host=").replace("$(POD_IP)", ADDRESS)


@contextlib.contextmanager
def running_redis(port: int, folder: Path) -> Iterator[str]:
    """Runs the chart's Redis and yields its URL."""
    program = shutil.which("redis-server")
    assert program, "redis-server is missing: run `scripts/setup test`"
    secret = folder / "auth.conf"
    secret.write_text(f"requirepass {PASSWORD}\n")
    arguments = [
        argument.replace("/etc/kvxfer/redis/auth.conf", str(secret))
        for argument in container("registry").arguments
    ]
    with Process("redis", program, *arguments, "--port", str(port), folder=folder) as redis:
        redis.ready(lambda: "Ready to accept connections" in redis.output)
        yield f"redis://:{PASSWORD}@[{ADDRESS}]:{port}/0"


def answers(folder: Path, fleet: Fleet, redis_port: int) -> list[httpx2.Response]:
    with running_redis(redis_port, folder) as redis, fleet:
        fleet.start(
            *(CONTROL_PLANE, "serve", "--port", fleet.port, "--allow-anonymous"),
            *("--host", listening("control-plane"), "--registry", redis),
        )
        for role in ("prefill", "decode"):
            fleet.begin_worker(
                f"{role}-0", "--host", listening(role), "--fabrics", "tcp", "--threads", "1"
            )
        fleet.start(
            *("router", "router", "--port", "0", "--allow-anonymous"),
            *("--host", listening("router")),
        )
        wait_until(fleet.whole, 120)
        workers = fleet.instances().values()
        assert {one.http_address.rpartition(":")[0] for one in workers} == {f"http://[{ADDRESS}]"}
        assert all(one.engine_address.startswith(f"kvx://[{ADDRESS}]:") for one in workers)
        body = {"model": "kvxfer-demo-8l", "max_tokens": 4}
        url = fleet.router.url.replace("[::]", f"[{ADDRESS}]") + "/v1/completions"
        with httpx2.Client(timeout=60.0, trust_env=False) as client:
            given = [
                client.post(url, json={**body, "prompt": f"{number} is a number of a request"})
                for number in range(REQUESTS)
            ]
        moved = {"direction": "receive", "outcome": "delivered"}
        decode = fleet.running["decode-0"]
        assert decode.metric("kvxfer_kv_transfers_total", **moved) == REQUESTS
        return given


def test_a_fleet_serves_without_ipv4(host: Host, tmp_path: Path) -> None:
    fleet, redis_port = Fleet(tmp_path), free_port()
    fleet.url = f"http://[{ADDRESS}]:{fleet.port}"
    with ThreadPoolExecutor(1, initializer=host.enter) as there:
        given = there.submit(answers, tmp_path, fleet, redis_port).result()
    assert {answer.status_code for answer in given} == {200}
    assert len(given) == REQUESTS
