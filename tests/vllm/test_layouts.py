"""Instances whose KV caches differ, each with each other: block sizes, tensor parallel sizes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from verify.polling import wait_until

from .conftest import ask, keep, side
from .servers import Server, kvxfer, vllm
from .tiny_prompts import prompts

pytestmark = [pytest.mark.native, pytest.mark.timeout(900)]

FLEETS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "block sizes": {
        "of-128": ("--block-size", "128"),
        # Long prompts in chunks, which end within blocks.
        "of-32": ("--block-size", "32", "--max-num-batched-tokens", "600"),
    },
    "ranks": {
        "one": ("--block-size", "32"),
        "two": ("--tensor-parallel-size", "2"),
    },
}
PROMPTS = {"block sizes": 200, "ranks": 40}


@dataclass
class Fleet:
    """Instances of which each can prefill and decode."""

    name: str
    control_plane: Server
    router: Server
    servers: dict[str, Server]

    def instances(self) -> list[dict[str, Any]]:
        fleet = httpx.get(self.control_plane.url + "/v1/instances").json()["instances"]
        assert len(fleet) == len(self.servers)
        return list(fleet)

    def let_prefill(self, name: str) -> None:
        """One prefills, the others decode."""
        for other in self.servers:
            role = "prefill" if other == name else "decode"
            answer = httpx.post(
                f"{self.control_plane.url}/v1/instances/{other}/role", json={"role": role}
            )
            assert answer.is_success, answer.text

    def received(self) -> dict[str, float]:
        """Tokens that each has from others."""
        metric = "vllm:external_prefix_cache_hits_total"
        return {name: server.metric(metric) for name, server in self.servers.items()}


def tokens_of(server: Server, prompt: list[int], **more: Any) -> list[int]:
    """Without a ticket it asks again after an error: on overcommitted cores a lease may end."""

    def answered() -> list[int]:
        answer = ask(server, prompt, seconds=120.0, **more)
        if not answer.is_success:
            assert not more, (len(prompt), answer.text)
            return []
        [choice] = answer.json()["choices"]
        return list(choice["token_ids"])

    return wait_until(answered, 120, pause=0.5)


def transfer(control_plane: Server) -> dict[str, Any]:
    # More workers than cores.
    return side(control_plane, "kv_both", lease_seconds=40.0, peer_timeout=15.0)


@pytest.fixture(scope="module", params=FLEETS)
def fleet(request: pytest.FixtureRequest, folder: Path, model: Path) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        kind = request.param.replace(" ", "-")
        control_plane = stack.enter_context(
            kvxfer(f"serve-{kind}", folder, "serve", "--allow-anonymous", "--lease-seconds", "30")
        )
        control_plane.wait("/openapi.json")
        router = stack.enter_context(
            kvxfer(
                *(f"router-{kind}", folder, "router", "--allow-anonymous"),
                *("--control-plane", control_plane.url),
            )
        )
        servers = {
            name: stack.enter_context(
                vllm(name, folder, model, *more, transfer=transfer(control_plane))
            )
            for name, more in FLEETS[request.param].items()
        }
        for server in servers.values():
            server.wait()
        started = Fleet(request.param, control_plane, router, servers)
        wait_until(lambda: all(one["state"] == "ready" for one in started.instances()))
        yield started


def test_tokens_are_those_of_an_aggregated_server(
    aggregated: Server, fleet: Fleet, rng: random.Random
) -> None:
    """Every instance prefills for every other one."""
    aggregated.wait()
    asked = prompts(rng, PROMPTS[fleet.name])
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        whole = list(threads.map(lambda prompt: tokens_of(aggregated, prompt), asked))
        for prefill in fleet.servers:
            fleet.let_prefill(prefill)
            before = fleet.received()
            apart = list(threads.map(lambda prompt: tokens_of(fleet.router, prompt), asked))
            different = [len(p) for p, a, b in zip(asked, apart, whole, strict=True) if a != b]
            assert not different
            got = {name: tokens - before[name] for name, tokens in fleet.received().items()}
            assert got.pop(prefill) == 0
            assert all(got.values()), f"{prefill} has not prefilled for every other one: {got}"


def test_any_instance_fetches_what_any_other_one_keeps(
    aggregated: Server, fleet: Fleet, rng: random.Random
) -> None:
    """The protocol of vLLM's own proxies."""
    aggregated.wait()
    for prefill, decode in itertools.permutations(fleet.servers.values(), 2):
        asked = prompts(rng, 10)
        before = fleet.received()[decode.name]
        for prompt in asked:
            params = keep(prefill, prompt)
            apart = tokens_of(decode, prompt, kv_transfer_params=params)
            assert apart == tokens_of(aggregated, prompt), len(prompt)
        assert fleet.received()[decode.name] - before > sum(map(len, asked)) / 4


def test_all_ranks_are_registered_as_one_instance(fleet: Fleet) -> None:
    for instance in fleet.instances():
        ranks = 2 if instance["instance_id"].startswith("two") else 1
        assert instance["layout"]["tp_size"] == ranks
        assert len(instance["rank_addresses"]) == (ranks if ranks > 1 else 0)
        assert instance["layout"]["packing"] in ("vec", "amx")
