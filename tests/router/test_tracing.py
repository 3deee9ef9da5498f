"""A trace from the router to decode's first step, of real processes, and its timeline."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from .cluster import Cluster, until
from .completions import asked

pytestmark = pytest.mark.native

LAYERS = 3
CLIENT = "00-11112222333344445555666677778888-1234567890abcdef"


@pytest.fixture(scope="module")
def traced(model: Path) -> Iterator[Cluster]:
    with Cluster(model, traced=True) as cluster:
        cluster.start_workers("prefill-0", "decode-0")
        yield cluster


async def complete(cluster: Cluster, request_id: str, **headers: str) -> None:
    await until(lambda: {"prefill-0", "decode-0"} <= set(cluster.instances()))
    async with httpx2.AsyncClient(base_url=cluster.router.url, timeout=None) as client:
        headers = {"X-Request-ID": request_id, **headers}
        body = asked("x" * 90, stream=True)
        answer = await client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text


def kvxfer_trace(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvxfer.cli", "trace", *arguments]
    return subprocess.run(
        [*command, "--control-plane", cluster.url, "--wait", "20"],
        capture_output=True,
        text=True,
        env={"COLUMNS": "140", "PATH": "/usr/bin"},
    )


async def test_one_trace_goes_from_the_router_to_the_first_step_of_decode(traced: Cluster) -> None:
    await complete(traced, "seen-through")
    done = await asyncio.to_thread(kvxfer_trace, traced, "seen-through", "--json")
    spans: list[dict[str, Any]] = json.loads(done.stdout)["spans"]
    assert len({span["trace_id"] for span in spans}) == 1
    assert not [span["error"] for span in spans if span["error"]]
    by_id = {span["span_id"]: span for span in spans}

    def path(span: dict[str, Any] | None) -> list[str]:
        """The chain of calls, outermost first."""
        if span is None:
            return []
        where = span["instance_id"] or span["service"]
        return [*path(by_id.get(span["parent_id"])), f"{where}: {span['name']}"]

    root = "router: POST /v1/completions"
    prefill = [root, "router: prefill", "prefill-0: POST /v1/completions"]
    decode = [root, "router: decode", "decode-0: POST /v1/completions"]
    expected = [
        [root],
        [root, "router: ticket"],
        [root, "control-plane: POST /v1/transfers"],
        [root, "control-plane: DELETE /v1/transfers/{transfer_id}"],
        prefill[:2],
        prefill,
        [*prefill, "prefill-0: prefill.compute"],
        [*prefill, "prefill-0: kv.send"],
        *[[*prefill, "prefill-0: kv.send", "prefill-0: kv.write"]] * LAYERS,
        decode[:2],
        decode,
        [*decode, "decode-0: kv.receive"],
        [*decode, "decode-0: decode.first_step"],
    ]
    assert sorted(map(path, spans)) == sorted(expected)

    def only(name: str) -> dict[str, Any]:
        [found] = [span for span in spans if span["name"] == name]
        return found

    writes = [span for span in spans if span["name"] == "kv.write"]
    assert {span["attributes"]["kvxfer.layer"] for span in writes} == set(range(LAYERS))
    sent = sum(span["attributes"]["kvxfer.bytes"] for span in writes)
    assert sent == only("kv.send")["attributes"]["kvxfer.bytes"] > 0
    assert sent == only("kv.receive")["attributes"]["kvxfer.bytes"]
    # One host, one clock: an effect comes after its cause.
    assert only("ticket")["end"] <= only("prefill")["start"]
    for write in writes:
        assert write["start"] <= write["end"] <= only("kv.send")["end"]
    events = {event["name"]: event["at"] for event in only("kv.receive")["events"]}
    assert list(events) == ["accepted", "every byte is there", "complete"]
    # The receiver counts a write before the sender hears that it was delivered.
    assert events["complete"] >= max(span["start"] for span in writes)
    assert only("decode.first_step")["start"] >= events["complete"]
    assert [event["name"] for event in only("decode")["events"]] == ["first token"]


async def test_the_trace_of_a_client_goes_on(traced: Cluster) -> None:
    await complete(traced, "from-outside", traceparent=f"{CLIENT}-01")
    done = await asyncio.to_thread(kvxfer_trace, traced, CLIENT[3:35], "--json")
    spans = json.loads(done.stdout)["spans"]
    assert {"router", "worker", "control-plane"} <= {span["service"] for span in spans}
    [first] = [span for span in spans if span["name"] == "ticket"]
    [root] = [span for span in spans if span["span_id"] == first["parent_id"]]
    assert root["parent_id"] == "1234567890abcdef"


async def test_a_client_that_does_not_want_its_trace_recorded_has_none(traced: Cluster) -> None:
    await complete(traced, "not-recorded", traceparent=f"{CLIENT}-00")
    await complete(traced, "recorded-after-it")
    done = await asyncio.to_thread(kvxfer_trace, traced, "recorded-after-it", "--json")
    assert done.returncode == 0, done.stderr
    async with httpx2.AsyncClient(base_url=traced.url) as client:
        answer = await client.get("/v1/traces/not-recorded")
    assert answer.json()["code"] == "unknown-trace"


async def test_the_timeline_has_a_line_for_each_span(traced: Cluster) -> None:
    await complete(traced, "drawn")
    done = await asyncio.to_thread(kvxfer_trace, traced, "drawn")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    named = [line.split("  ━")[0].strip() for line in lines]
    assert named[1].startswith("POST /v1/completions")
    for layer in range(LAYERS):
        assert any(line.startswith(f"kv.write {layer}") for line in named)
    assert sum("━" in line or "◆" in line for line in lines) == len(lines) - 1
    assert max(map(len, lines)) <= 140


async def test_a_request_without_a_trace_is_an_error_that_says_why(traced: Cluster) -> None:
    command = [sys.executable, "-m", "kvxfer.cli", "trace", "nobody", "--wait", "0"]
    done = await asyncio.to_thread(
        subprocess.run,
        [*command, "--control-plane", traced.url],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "[unknown-trace]" in done.stderr
    assert "not recorded" in done.stderr
