"""`kvxfer serve` as a process."""

from __future__ import annotations

import json
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from verify.polling import wait_until
from verify.processes.control_plane import CLUSTER_KEY
from verify.processes.programs import clean_environment, kvxfer

pytestmark = pytest.mark.native

WORKER = {
    "instance_id": "p",
    "role": "prefill",
    "model": "m",
    "engine_address": "kvx://127.0.0.1:1/a",
    "http_address": "http://127.0.0.1:2",
    "num_blocks": 8,
    "layout": {
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": "float32",
        "block_size": 16,
    },
}


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a control plane that must not start, to its end."""
    return subprocess.run(
        kvxfer("serve", *arguments),
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@contextmanager
def serving(
    *arguments: str, key: bytes = CLUSTER_KEY, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        kvxfer("serve", *arguments),
        env=clean_environment(KVXFER_CLUSTER_KEY=key.decode(), **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], 60)
    assert readable, "nothing was printed"
    return process.stdout.readline()


def test_json_names_the_url_in_one_line_once_connections_are_accepted():
    with serving("--port", "0", "--json") as process:
        announced = json.loads(first_line(process))
        assert list(announced) == ["url"]
        answer = httpx2.get(announced["url"] + "/readyz", trust_env=False)
        assert answer.status_code == 200


def test_without_json_the_url_is_in_a_sentence():
    with serving("--port", "0") as process:
        line = first_line(process)
    assert line.startswith("kvxfer control plane at http://127.0.0.1:")
    assert line.endswith("/docs\n")


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_it_gracefully_with_a_watch_open(stop):
    with serving("--port", "0", "--json") as process:
        url = json.loads(first_line(process))["url"]
        with httpx2.stream(
            "GET", url + "/v1/instances/watch", trust_env=False, timeout=20
        ) as response:
            lines = response.iter_lines()
            assert next(lines) == "retry: 1000"
            process.send_signal(stop)
            assert list(lines)[-1] == "", "the stream ends with a whole event"
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "", "")


def test_lease_and_transfer_times_are_those_asked_for():
    with serving("--port", "0", "--json", "--lease-seconds", "90") as process:
        url = json.loads(first_line(process))["url"]
        lease = httpx2.post(url + "/v1/instances", json=WORKER, trust_env=False).json()
    assert (lease["lease_seconds"], lease["heartbeat_interval"]) == (90, 30)


def test_taken_port_is_one_line_and_exit_1():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run("--port", str(port), KVXFER_CLUSTER_KEY=CLUSTER_KEY.decode())
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "[address-in-use]" in ended.stderr
    assert f"port {port}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_taken_port_as_json():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run("--port", str(port), "--json", KVXFER_CLUSTER_KEY=CLUSTER_KEY.decode())
    assert ended.returncode == 1
    assert json.loads(ended.stdout)["error"]["code"] == "address-in-use"


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        ((), {}, "no cluster key: set KVXFER_CLUSTER_KEY"),
        ((), {"KVXFER_CLUSTER_KEY": "short"}, "has 5 bytes; use at least 16"),
        (("--cluster-key-file", "/nowhere/key"), {}, "/nowhere/key cannot be read"),
    ],
)
def test_missing_key_is_one_clear_error(arguments, variables, words):
    ended = run("--port", "0", *arguments, **variables)
    assert ended.returncode == 1
    assert "[invalid-argument]" in ended.stderr
    assert words in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("option", "value"), [("--lease-seconds", "0"), ("--transfer-seconds", "-1")]
)
def test_time_that_is_not_positive_is_refused_by_name(option, value):
    ended = run("--port", "0", option, value, KVXFER_CLUSTER_KEY=CLUSTER_KEY.decode())
    assert ended.returncode == 1
    assert option.removeprefix("--").replace("-", "_") in ended.stderr


def test_key_from_a_file(tmp_path: Path):
    file = tmp_path / "key"
    file.write_text("k" * 32 + "\n")
    with serving("--port", "0", "--json", "--cluster-key-file", str(file), key=b"") as process:
        assert "url" in json.loads(first_line(process))


def test_address_that_others_reach_needs_tokens():
    ended = run("--host", "0.0.0.0", "--port", "0", KVXFER_CLUSTER_KEY=CLUSTER_KEY.decode())
    assert (ended.returncode, ended.stdout) == (1, "")
    error = " ".join(ended.stderr.split())
    assert (
        "[invalid-argument] every client that reaches 0.0.0.0 could use the control plane" in error
    )
    assert "--tokens-file" in error
    assert "--allow-anonymous" in error


def test_address_that_others_reach_is_warned_of_if_anonymous_calls_are_allowed():
    arguments = ("--host", "0.0.0.0", "--allow-anonymous", "--port", "0", "--json")
    with serving(*arguments) as process:
        assert json.loads(first_line(process))["url"].startswith("http://0.0.0.0:")
        process.terminate()
        _, err = process.communicate(timeout=20)
    assert "every client that reaches 0.0.0.0 can use the control plane" in " ".join(err.split())


TOKEN = "the-token-of-the-admin"


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    file = tmp_path / "tokens"
    file.write_text(f"ops admin,router,worker {TOKEN}\n")
    return file


def test_tokens_file_is_obeyed_and_may_change(tokens_file: Path):
    arguments = ("--host", "0.0.0.0", "--port", "0", "--json", "--tokens-file", str(tokens_file))
    with serving(*arguments) as process:
        url = json.loads(first_line(process))["url"].replace("0.0.0.0", "127.0.0.1")
        with httpx2.Client(base_url=url, trust_env=False) as client:
            assert client.get("/readyz").status_code == 200
            assert client.get("/v1/instances").status_code == 401
            ours = {"Authorization": f"Bearer {TOKEN}"}
            assert client.get("/v1/instances", headers=ours).status_code == 200
            new = tokens_file.with_suffix(".new")
            new.write_text("ops admin another-token-of-theirs\n")
            new.replace(tokens_file)
            wait_until(lambda: client.get("/v1/instances", headers=ours).status_code == 401)
            theirs = {"Authorization": "Bearer another-token-of-theirs"}
            assert client.get("/v1/instances", headers=theirs).status_code == 200


def test_malformed_tokens_file_is_one_clear_error(tmp_path: Path):
    file = tmp_path / "tokens"
    file.write_text("ops admin short\n")
    ended = run("--port", "0", "--tokens-file", str(file), KVXFER_CLUSTER_KEY=CLUSTER_KEY.decode())
    assert ended.returncode == 1
    assert "[invalid-argument] the token on line 1" in ended.stderr
    assert "short" not in ended.stderr.replace("shorter", "")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_logs_have_each_request_and_no_secret(tokens_file: Path, log_format: str):
    arguments = ("--port", "0", "--json", "--lease-seconds", "600")
    arguments = (*arguments, "--tokens-file", str(tokens_file))
    with serving(*arguments, "--log-level", "debug", "--log-format", log_format) as process:
        url = json.loads(first_line(process))["url"]
        ours = {"Authorization": f"Bearer {TOKEN}"}
        with httpx2.Client(base_url=url, trust_env=False, headers=ours) as client:
            for name, role in (("p", "prefill"), ("d", "decode")):
                body = {**WORKER, "instance_id": name, "role": role, "state": "ready"}
                assert client.post("/v1/instances", json=body).status_code == 201
            opened = client.post("/v1/transfers", json={}, headers={"X-Request-ID": "mine"})
            ticket = opened.json()["ticket"]
            # Secrets in wrong places, which an error could quote.
            client.get(f"/v1/instances/{ticket[:64]}")
            client.post("/v1/transfers", json={"ticket": ticket})
            client.get("/v1/instances", headers={"Authorization": "Bearer wrong-but-secret-too"})
            client.get("/v1/instances", headers={"X-Request-ID": f"Bearer {TOKEN}"})
        process.terminate()
        _, err = process.communicate(timeout=20)
    for secret in (
        TOKEN,
        ticket,
        ticket.split(".")[2],
        "wrong-but-secret-too",
        CLUSTER_KEY.decode(),
    ):
        assert secret not in err
    lines = [line for line in err.splitlines() if "POST" in line and "mine" in line]
    assert len(lines) == 1
    if log_format == "json":
        line = json.loads(lines[0])
        assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/transfers", 201)
        assert (line["request_id"], line["caller"], line["level"]) == ("mine", "ops", "info")
        assert (line["logger"], line["event"]) == ("kvxfer.api.requests", "request")
        assert line["seconds"] > 0
        for line in err.splitlines():
            json.loads(line)


def test_missing_server_extra_names_its_install_command():
    code = (
        "import sys; sys.modules['uvicorn'] = None; sys.argv[0] = 'kvxfer'\n"
        "from kvxfer.cli import main; main()"
    )
    ended = subprocess.run(
        (sys.executable, "-c", code, "serve"),
        env=clean_environment(KVXFER_CLUSTER_KEY=CLUSTER_KEY.decode()),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "[not-built]" in ended.stderr
    assert "pip install 'kvxfer[server]'" in " ".join(ended.stderr.split())


def test_pairing_policy_decides_and_a_bad_one_keeps_serve_from_starting(tmp_path):
    policy = tmp_path / "pairing.toml"
    policy.write_text("[weights]\nrunning = 7\n")
    arguments = ("--port", "0", "--json", "--lease-seconds", "600")
    with serving(*arguments, "--pairing-policy", str(policy)) as process:
        url = json.loads(first_line(process))["url"]
        with httpx2.Client(base_url=url, trust_env=False) as client:
            for name, role in (("p", "prefill"), ("d", "decode")):
                body = {**WORKER, "instance_id": name, "role": role, "state": "ready"}
                lease = client.post("/v1/instances", json=body).json()
            beat = {"epoch": lease["epoch"], "load": {"running": 2}}
            client.put("/v1/instances/d/heartbeat", json=beat).raise_for_status()
            opened = client.post("/v1/transfers", json={"explain": True}).json()
            assert opened["score"]["decode"]["running"] == 14.0
    policy.write_text("[weights]\nrunning = -7\n")
    key = CLUSTER_KEY.decode()
    ended = run("--port", "0", "--pairing-policy", str(policy), KVXFER_CLUSTER_KEY=key)
    assert ended.returncode == 1
    assert "running is -7.0; write 0 to 1000000" in " ".join(ended.stderr.split())
