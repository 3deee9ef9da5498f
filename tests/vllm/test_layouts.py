"""Instances whose KV caches differ, in all pairs: block sizes and tensor parallel sizes, also with
recurrent layers and with blocks of different sizes."""

from __future__ import annotations

import concurrent.futures
import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvxfer.instances import Instance, Role
from verify.polling import wait_until
from verify.processes.fleet import Fleet
from verify.processes.programs import Server
from verify.processes.vllm.servers import add_vllm
from verify.processes.vllm.tiny_prompts import prompts

from .conftest import ask, checkpoint, fleet_in, keep, settings

pytestmark = [pytest.mark.native, pytest.mark.timeout(900)]

FLEETS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "block sizes": {
        "of-128": ("--block-size", "128"),
        # Long prompts are computed in chunks that end within blocks.
        "of-32": ("--block-size", "32", "--max-num-batched-tokens", "600"),
    },
    "ranks": {
        "one": ("--block-size", "32"),
        "two": ("--tensor-parallel-size", "2"),
    },
    "states": {
        "one": ("--no-enable-prefix-caching",),
        "two": ("--no-enable-prefix-caching", "--tensor-parallel-size", "2"),
    },
    "large blocks": {
        "one": ("--max-num-batched-tokens", "600"),
        "two": ("--tensor-parallel-size", "2"),
    },
}
# The other fleets have the model of `aggregated`.
MODELS = {"states": "mamba", "large blocks": "large"}
PROMPTS = {"block sizes": 200, "ranks": 40, "states": 40, "large blocks": 40}


@dataclass
class Peers:
    """Instances that can each prefill and decode."""

    name: str
    fleet: Fleet
    aggregated: Server

    @property
    def router(self) -> Server:
        return self.fleet.router

    @property
    def servers(self) -> Mapping[str, Server]:
        return self.fleet.workers

    def instances(self) -> list[Instance]:
        found = self.fleet.instances()
        assert set(found) == set(self.servers)
        return list(found.values())

    def let_prefill(self, name: str) -> None:
        """Makes one instance prefill and the others decode."""
        for other in self.servers:
            role = Role.PREFILL if other == name else Role.DECODE
            self.fleet.client.change_role(other, role)

    def received(self) -> dict[str, float]:
        """Returns how many tokens each server has received from others."""
        metric = "vllm:external_prefix_cache_hits_total"
        return {name: server.metric(metric) for name, server in self.servers.items()}


def tokens_of(server: Server, prompt: list[int], **more: Any) -> list[int]:
    """Asks again after an error if there is no ticket: with more workers than cores, a lease may
    end."""

    def answered() -> list[int]:
        answer = ask(server, prompt, seconds=120.0, **more)
        if not answer.is_success:
            assert not more, (len(prompt), answer.text)
            return []
        [choice] = answer.json()["choices"]
        return list(choice["token_ids"])

    return wait_until(answered, 120, pause=0.5)


@pytest.fixture(scope="module", params=FLEETS)
def peers(
    request: pytest.FixtureRequest, folder: Path, model: Path, aggregated: Server
) -> Iterator[Peers]:
    if request.param in MODELS:
        model = checkpoint(MODELS[request.param], folder)
    with fleet_in(folder / request.param.replace(" ", "-")) as fleet:
        fleet.start_control_plane("--lease-seconds", "30")
        fleet.start_router()
        for name, more in FLEETS[request.param].items():
            # Long limits, as there are more workers than cores.
            add_vllm(fleet, name, model, *more, **settings(lease_seconds=40.0, peer_timeout=15.0))
        for server in fleet.workers.values():
            server.serves("/health")
        wait_until(fleet.whole)
        if request.param in MODELS:
            aggregated = fleet.workers["one"]
        aggregated.serves("/health")
        yield Peers(request.param, fleet, aggregated)


def test_tokens_are_those_of_an_aggregated_server(peers: Peers, rng: random.Random) -> None:
    """Every instance prefills for every other one."""
    asked = prompts(rng, PROMPTS[peers.name])
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        whole = list(threads.map(lambda prompt: tokens_of(peers.aggregated, prompt), asked))
        for prefill in peers.servers:
            peers.let_prefill(prefill)
            before = peers.received()
            apart = list(threads.map(lambda prompt: tokens_of(peers.router, prompt), asked))
            different = [len(p) for p, a, b in zip(asked, apart, whole, strict=True) if a != b]
            assert not different
            got = {name: tokens - before[name] for name, tokens in peers.received().items()}
            assert got.pop(prefill) == 0
            assert all(got.values()), f"{prefill} has not prefilled for every other one: {got}"


def test_any_instance_fetches_what_any_other_one_keeps(peers: Peers, rng: random.Random) -> None:
    """Uses the protocol of vLLM's own proxies."""
    for prefill, decode in itertools.permutations(peers.servers.values(), 2):
        asked = prompts(rng, 10)
        before = peers.received()[decode.name]
        for prompt in asked:
            params = keep(prefill, prompt)
            apart = tokens_of(decode, prompt, kv_transfer_params=params)
            assert apart == tokens_of(peers.aggregated, prompt), len(prompt)
        assert peers.received()[decode.name] - before > sum(map(len, asked)) / 4


def test_all_ranks_are_registered_as_one_instance(peers: Peers) -> None:
    for instance in peers.instances():
        ranks = 2 if instance.instance_id == "two" else 1
        assert instance.layout.tp_size == ranks
        assert len(instance.rank_addresses) == (ranks if ranks > 1 else 0)
        assert instance.layout.packing in ("vec", "amx")
