"""`kvxfer serve --registry`: several processes over one Redis, and one of them killed."""

from __future__ import annotations

import contextlib
import json
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from tests.api.conftest import registration
from verify.processes.control_plane import CLUSTER_KEY
from verify.processes.redis_server import audit

from .test_fleet import nobody_listens
from .test_serve import first_line, run, serving

pytestmark = pytest.mark.native


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://r1", "begins with 'http'"),
        ("redis+sentinel://s1", "names no service"),
    ],
)
def test_invalid_url_of_a_registry_is_one_clear_error(url, words):
    ended = run("--port", "0", "--registry", url, KVXFER_CLUSTER_KEY=CLUSTER_KEY.decode())
    assert ended.returncode == 1
    assert "[invalid-argument]" in ended.stderr
    assert words in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr


def test_registry_from_the_environment_that_does_not_answer_is_warned_of_once():
    with (
        nobody_listens() as address,
        serving("--port", "0", "--json", KVXFER_REGISTRY=f"redis://:secret@{address}") as process,
    ):
        api = json.loads(first_line(process))["url"]
        assert httpx2.get(api + "/readyz", trust_env=False).status_code == 503
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 0
    (line,) = err.splitlines()
    assert address in line
    assert "secret" not in line


def test_replica_that_is_killed_under_load_leaves_no_partial_reservation(empty_redis):
    options = ("--port", "0", "--json", "--registry", empty_redis.url)
    # No lease and no transfer expires.
    options = (*options, "--lease-seconds", "600", "--transfer-seconds", "600")
    with serving(*options) as dying, serving(*options) as living:
        doomed, url = (json.loads(first_line(p))["url"] for p in (dying, living))
        for name, role in (("p", "prefill"), ("d1", "decode"), ("d2", "decode")):
            body = registration(name, role, num_blocks=100_000)
            httpx2.post(url + "/v1/instances", json=body, trust_env=False).raise_for_status()
        opened: list[str] = []

        def load() -> None:
            client = httpx2.Client(base_url=doomed, trust_env=False)
            with client, contextlib.suppress(httpx2.TransportError):
                while True:
                    answer = client.post("/v1/transfers", json={"prompt_tokens": 64})
                    opened.append(answer.json()["transfer_id"])
                    if len(opened) % 2:
                        client.delete(f"/v1/transfers/{opened[-1]}")
                    if len(opened) > 40:
                        dying.kill()

        with ThreadPoolExecutor(4) as threads:
            ended = [threads.submit(load) for _ in range(4)]
        for one in ended:
            one.result()

        counted = audit(empty_redis)
        assert counted["p"] == counted["d1"] + counted["d2"] > 0
        listed = httpx2.get(url + "/v1/instances", trust_env=False).json()["instances"]
        assert {i["instance_id"]: i["reserved"]["transfers"] for i in listed} == dict(counted)
        held = [
            transfer_id
            for transfer_id in opened
            if httpx2.delete(f"{url}/v1/transfers/{transfer_id}", trust_env=False).is_success
        ]
        assert len(held) in range(counted["p"] - 4, counted["p"] + 1), "4 answers may be lost"
        assert audit(empty_redis)["p"] == counted["p"] - len(held)
