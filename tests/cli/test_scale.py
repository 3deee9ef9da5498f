"""`kvxfer scale plan`, `kvxfer scale replay` and `kvxfer serve --scaling-policy` as processes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import httpx2
import pytest

from verify.polling import wait_until
from verify.processes.control_plane import CLUSTER_KEY
from verify.processes.programs import clean_environment, kvxfer

from .test_serve import first_line, serving
from .test_serve import run as serve

pytestmark = pytest.mark.native

WHO = ("worker", "admin")
ADMIN = {"Authorization": "Bearer token-of-the-admin"}


def scale(*arguments: str, columns: int = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        kvxfer("scale", *arguments),
        env=clean_environment(COLUMNS=str(columns)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_replay_prints_each_change_with_its_reasons():
    ended = scale("replay", "step")
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    assert lines[0].strip() == "decisions under step"
    (first,) = [line for line in lines if line.strip().startswith("0:10:01")]
    assert "prefill  1 → 4" in first
    assert "rate: 3.86 workers for 60,000 tokens/s at 20,000 per worker, 78% of it used" in first
    assert lines[-4].startswith("420 decisions, 30 of them change something; 66,000 requests")
    assert lines[-3] == "94.0% of the requests came while the TTFT target was kept"


def test_replay_as_json():
    changes = json.loads(scale("replay", "step", "--json").stdout)
    everything = json.loads(scale("replay", "step", "--json", "--all").stdout)
    assert (changes["trace"], len(changes["steps"]), len(everything["steps"])) == ("step", 30, 420)
    first = changes["steps"][0]
    assert (first["at"], first["prefill"]["wanted"], first["prefill"]["direction"]) == (
        601,
        4,
        "up",
    )
    assert first["prefill"]["demands"][0]["rule"] == "rate"


def test_replay_of_a_file_under_a_policy(tmp_path):
    trace, policy = tmp_path / "load.csv", tmp_path / "policy.yaml"
    trace.write_text(
        "seconds,requests_per_second,prompt_tokens,output_tokens\n0,30,2000,250\n60,30,2000,250\n"
    )
    policy.write_text("prefill: {min: 3, max: 3}\nworker_model: {start_seconds: 5}\n")
    result = json.loads(scale("replay", str(trace), "--policy", str(policy), "--json").stdout)
    assert {step["prefill"]["wanted"] for step in result["steps"]} == {3}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("replay", "/nowhere.csv"), "one of the bundled traces step, day, burst"),
        (("replay", "step", "--policy", "/nowhere.yaml"), "/nowhere.yaml cannot be read"),
    ],
)
def test_files_that_cannot_be_read(arguments, words):
    ended = scale(*arguments)
    assert ended.returncode == 1
    assert "[invalid-argument]" in ended.stderr
    assert words in " ".join(ended.stderr.split())


def test_plan_without_a_control_plane_is_one_line():
    ended = scale("plan", "--control-plane", "http://127.0.0.1:1")
    assert ended.returncode == 1
    assert "[control-plane-unavailable]" in ended.stderr


def test_bad_policy_keeps_serve_from_starting(tmp_path):
    policy = tmp_path / "scaling.yaml"
    policy.write_text("prefill: {max: 0}\n")
    ended = serve(
        "--port", "0", "--scaling-policy", str(policy), KVXFER_CLUSTER_KEY=CLUSTER_KEY.decode()
    )
    assert ended.returncode == 1
    assert "prefill: max is 0; write 1 or more" in " ".join(ended.stderr.split())


def test_one_of_two_replicas_leads_and_the_other_takes_over(tmp_path: Path, empty_redis):
    policy = tmp_path / "scaling.yaml"
    policy.write_text("interval: 0.1\n")
    options = ("--port", "0", "--json", "--registry", empty_redis.url)
    options = (*options, "--scaling-policy", str(policy))

    def leads(url: str) -> bool:
        return bool(httpx2.get(url + "/v1/scale/plan", trust_env=False).json()["leads"])

    with serving(*options) as one, serving(*options) as other:
        processes = {json.loads(first_line(p))["url"]: p for p in (one, other)}
        (leader,) = wait_until(lambda: [url for url in processes if leads(url)])
        ended = processes.pop(leader)
        with empty_redis.client() as redis:
            term = redis.get("kvxfer:{scaling}:leader")
            assert term
            ended.terminate()
            assert ended.wait(60) == 0
            assert redis.get("kvxfer:{scaling}:leader") != term, "its term of 30 s ends with it"
        (follower,) = processes
        wait_until(lambda: leads(follower))


def test_serve_starts_the_workers_that_the_policy_wants(tmp_path: Path):
    (tmp_path / "tokens").write_text("".join(f"{n} {n} token-of-the-{n}\n" for n in WHO))
    for name in WHO:
        (tmp_path / name).write_text(f"token-of-the-{name}\n")
    (tmp_path / "ticket-keys").write_text("the-ticket-key-of-this-month\n")
    policy = tmp_path / "scaling.toml"
    policy.write_text(
        "interval = 0.2\n"
        "[prefill]\nmax = 1\n[decode]\nmax = 1\n"
        '[backend]\nkind = "processes"\n'
        'arguments = ["--blocks", "64", "--threads", "1", "--fabrics", "tcp"]\n'
    )
    files = ("--tokens-file", tmp_path / "tokens", "--ticket-keys-file", tmp_path / "ticket-keys")
    with serving(
        *("--port", "0", "--json", "--scaling-policy", str(policy), *map(str, files)),
        KVXFER_TOKEN_FILE=str(tmp_path / "worker"),
    ) as process:
        url = json.loads(first_line(process))["url"]

        def both() -> list[dict[str, Any]]:
            answer = httpx2.get(url + "/v1/instances", headers=ADMIN, trust_env=False)
            fleet: list[dict[str, Any]] = answer.json()["instances"]
            return fleet if len(fleet) == 2 else []

        fleet = wait_until(both, 100)
        assert sorted(instance["role"] for instance in fleet) == ["decode", "prefill"]

        where = ("plan", "--control-plane", url)
        assert "[unauthenticated]" in scale(*where).stderr
        where = (*where, "--token-file", str(tmp_path / "admin"))
        plan = json.loads(scale(*where, "--json").stdout)
        assert (plan["backend"], plan["leads"], plan["policy"]) == ("processes", True, str(policy))
        assert (plan["prefill"]["current"], plan["prefill"]["direction"]) == (1, "hold")
        shown = scale(*where).stdout
        assert "requests: 0.00 workers for 0 requests running and 0 waiting" in shown
        assert "backend processes: this replica applies it" in shown

        process.terminate()
        process.communicate(timeout=30)
        assert process.returncode == 0
    for instance in fleet:
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(instance["http_address"] + "/healthz", trust_env=False)
