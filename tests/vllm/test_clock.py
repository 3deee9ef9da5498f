"""A chat template with the time in it, at workers in two time zones: a prompt is rendered once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from verify.processes.programs import Server
from verify.processes.vllm.servers import add_vllm, make_model

from .conftest import LEASE_SECONDS, Cluster, fleet_in, settings

pytestmark = [pytest.mark.native, pytest.mark.timeout(600)]

CHATS = 40
TEMPLATE = "{{ strftime_now('%H:%M:%S') }} {% for said in messages %}{{ said.content }}{% endfor %}"
# POSIX time zones, which need no time zone database.
ZONES = {"prefill": "UTC0", "decode": "JST-9"}
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


@pytest.fixture(scope="module")
def pair(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = make_model(tmp_path_factory.mktemp("bytes"), "--tokenizer", "bytes")
    arguments = ("--chat-template", TEMPLATE, "--enable-scale-out")
    with fleet_in(folder / "clock") as fleet:
        fleet.start_control_plane()
        fleet.start_router("--attempts", "1")
        for name, zone in ZONES.items():
            add_vllm(
                fleet,
                name,
                model,
                *arguments,
                role=ROLES[name],
                variables={"TZ": zone},
                **settings(LEASE_SECONDS),
            )
        started = Cluster(fleet, fleet.running["prefill"])
        started.wait_until_ready()
        yield started


def body(number: int) -> dict[str, object]:
    content = f"Chat {number}. " + "What time is it where you are? " * 20
    return {"model": "tiny", "messages": [{"role": "user", "content": content}]}


def tokens(server: Server) -> list[int]:
    answer = httpx2.post(server.url + "/tokenize", json=body(0), timeout=30.0)
    return list(answer.raise_for_status().json()["tokens"])


def test_the_workers_render_different_prompts(pair: Cluster) -> None:
    assert tokens(pair.prefill) != tokens(pair.decode)


def test_every_chat_is_answered_over_moved_kv(pair: Cluster) -> None:
    statuses, moved = [], 0
    for number in range(CHATS):
        before = pair.decode.metric("vllm:external_prefix_cache_hits_total")
        asked = {**body(number), "max_tokens": 4, "stream": number % 2 == 0}
        answer = httpx2.post(pair.router.url + "/v1/chat/completions", json=asked, timeout=90.0)
        statuses.append(answer.status_code)
        moved += pair.decode.metric("vllm:external_prefix_cache_hits_total") > before
    assert (statuses, moved) == ([200] * CHATS, CHATS)
