"""Instances with other weights, with other adapters, and with another version of the protocol."""

from __future__ import annotations

import concurrent.futures
import contextlib
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx2
import pytest

from kvxfer.instances import InstanceState
from verify.polling import wait_until
from verify.processes.programs import Server
from verify.processes.vllm import servers
from verify.processes.vllm.servers import add_vllm, make_model

from .conftest import Cluster, cluster_of, settings
from .test_pull import fetched

pytestmark = [pytest.mark.native, pytest.mark.timeout(900)]

WRONG: Final = 25
LORA: Final = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
# Makes decode speak version 7 of the protocol. It is imported when a process starts.
_AS_BEFORE: Final = """
from kvxfer import kv_versions
kv_versions.NEWEST, kv_versions.VERSIONS = 7, (7, 7)
from kvxfer.kv import connection
told = connection.hello_from
def hello_from(cache, identity, *, checksums=False):
    hello = told(cache, identity, checksums=checksums)
    left_out = {"newest": 0, "model": None}
    fields = {name: getattr(hello, name) for name in hello.__struct_fields__}
    return type(hello)(**{**fields, **left_out})
connection.hello_from = hello_from
"""

# Stops the agent's loop when the file exists.
_DIES: Final = """
import asyncio, os
from kvxfer.connectors.vllm.agent import Agent
serve = Agent._serve
async def dies(self):
    async def watch():
        while not os.path.exists("{path}"):
            await asyncio.sleep(0.02)
        self._loop.stop()
    self._watching = asyncio.create_task(watch())
    await serve(self)
Agent._serve = dies
"""


def adapter(folder: Path, seed: int) -> Path:
    maker = Path(servers.__file__).with_name("tiny_lora.py")
    subprocess.run([servers.VLLM_PYTHON, str(maker), str(folder), str(seed)], check=True)
    return folder


@pytest.fixture(scope="module")
def cluster(folder: Path, model: Path) -> Iterator[Cluster]:
    """A pair with the adapters `blue`, `red`, and `green`, which differs between the two sides.
    Decode also calls `blue` `azure`."""
    adapters = [adapter(folder / f"lora-{seed}", seed) for seed in range(4)]
    blue, red, *green = adapters

    def loras(own: Path, **more: Path) -> tuple[str, ...]:
        named = {"blue": blue, "red": red, "green": own, **more}
        return (*LORA, "--lora-modules", *(f"{name}={path}" for name, path in named.items()))

    policy = folder / "scaling.yaml"
    policy.write_text("decode: {max: 4, requests: 8}\n")
    with cluster_of(
        folder / "identity",
        model,
        None,
        prefill=loras(green[0]),
        decode=loras(green[1], azure=blue),
        control_plane=("--scaling-policy", policy),
    ) as started:
        yield started


@pytest.fixture(scope="module")
def stranger(cluster: Cluster, folder: Path) -> Iterator[Server]:
    """A decode server with other weights of the same names and shapes, under the same model
    name."""
    other = make_model(folder / "other", "--seed", "1")
    server = add_vllm(cluster.fleet, "stranger", other, role="kv_consumer", **settings())
    server.serves("/health")
    wait_until(lambda: cluster.fleet.instances()["stranger"].state is InstanceState.READY)
    yield server
    cluster.fleet.end("stranger")


def random_prompt(rng: random.Random, length: int = 300) -> list[int]:
    return [rng.randrange(3, 512) for _ in range(length)]


def test_instances_with_other_weights_are_not_paired(cluster: Cluster, stranger: Server) -> None:
    told = {name: one.identity for name, one in cluster.fleet.instances().items()}
    assert told["prefill"] is not None
    assert told["prefill"] == told["decode"]
    assert told["stranger"] is not None
    assert told["prefill"].checkpoint != told["stranger"].checkpoint
    body = {"prefill_id": "prefill", "decode_id": "stranger"}
    refused = httpx2.post(cluster.control_plane.url + "/v1/handshakes", json=body)
    assert (refused.status_code, refused.json()["field"]) == (409, "checkpoint")


def test_other_weights_are_refused_by_push_and_pull(
    cluster: Cluster, stranger: Server, rng: random.Random
) -> None:
    """No request is answered from the wrong KV, even if a router pairs the wrong sides."""
    for _ in range(WRONG):
        prompt = random_prompt(rng)
        params = cluster.ticket("prefill", "stranger")
        assert cluster.ask(stranger, prompt, kv_transfer_params=params).status_code == 500
        kept = cluster.keep(prompt)
        assert cluster.ask(stranger, prompt, kv_transfer_params=kept).status_code == 500
    log = stranger.log.read_text()
    checkpoints = [cluster.fleet.instances()[name].identity for name in ("prefill", "stranger")]
    ours, theirs = (each.checkpoint for each in checkpoints if each is not None)
    said = f"checkpoint is {ours!r} at prefill and {theirs!r} at decode"
    assert log.count(said) >= 2 * WRONG
    cluster.wait_until_idle(cluster.prefill, stranger)


@pytest.mark.parametrize("name", ["tiny", "blue", "red"])
def test_adapters_of_one_base_are_served_by_their_names(
    cluster: Cluster, rng: random.Random, name: str
) -> None:
    prompts = [random_prompt(rng) for _ in range(8)]
    # Prefill computes requests without a ticket itself.
    whole = [cluster.tokens(cluster.prefill, prompt, model=name) for prompt in prompts]
    pushed = [cluster.tokens(cluster.router, prompt, model=name) for prompt in prompts]
    assert pushed == whole
    other = {"tiny": "blue", "blue": "red", "red": "tiny"}[name]
    assert whole != [cluster.tokens(cluster.prefill, prompt, model=other) for prompt in prompts]
    for prompt, expected in zip(prompts, whole, strict=True):
        kept = cluster.keep(prompt, model=name)
        got = cluster.tokens(cluster.decode, prompt, model=name, kv_transfer_params=kept)
        assert got == expected


@pytest.mark.parametrize("protocol", ["pull", "push"])
def test_one_adapter_has_two_names(cluster: Cluster, rng: random.Random, protocol: str) -> None:
    prompt = random_prompt(rng)
    expected = cluster.tokens(cluster.prefill, prompt, model="blue")
    before = fetched(cluster.decode)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        if protocol == "pull":
            params = cluster.keep(prompt, model="blue")
        else:
            params = cluster.ticket("prefill", "decode")
            one = {"model": "blue", "max_tokens": 1, "kv_transfer_params": params}
            threads.submit(cluster.ask, cluster.prefill, prompt, **one)
        got = cluster.tokens(cluster.decode, prompt, model="azure", kv_transfer_params=params)
    assert got == expected
    assert fetched(cluster.decode) - before == len(prompt) - 1


def test_a_cache_is_not_used_for_another_adapter_or_the_base(
    cluster: Cluster, rng: random.Random
) -> None:
    for kept_as, asked_as in (("tiny", "azure"), ("blue", "tiny"), ("red", "azure")):
        prompt = random_prompt(rng)
        params = cluster.keep(prompt, model=kept_as)
        answer = cluster.ask(cluster.decode, prompt, model=asked_as, kv_transfer_params=params)
        assert answer.status_code == 500
    cluster.wait_until_idle(cluster.prefill, cluster.decode)


def test_one_name_for_two_adapters_is_refused(cluster: Cluster, rng: random.Random) -> None:
    prompt = random_prompt(rng)
    kept = cluster.keep(prompt, model="green")
    answer = cluster.ask(cluster.decode, prompt, model="green", kv_transfer_params=kept)
    assert answer.status_code == 500
    assert "adapter is" in cluster.decode.tail()
    assert cluster.ask(cluster.router, prompt, model="green").status_code >= 500
    cluster.wait_until_idle(cluster.prefill, cluster.decode)


def test_the_load_is_that_of_the_engine(cluster: Cluster, rng: random.Random) -> None:
    with concurrent.futures.ThreadPoolExecutor(32) as threads:
        asked = [
            threads.submit(
                cluster.ask, cluster.router, random_prompt(rng, 40), max_tokens=600, seconds=300.0
            )
            for _ in range(32)
        ]

        def told() -> bool:
            load = cluster.fleet.instances()["decode"].load
            return load.running == 16 and load.waiting > 8  # --max-num-seqs 16

        wait_until(told, 120, pause=0.1)
        plan = httpx2.get(cluster.fleet.url + "/v1/scale/plan").json()
        assert plan["decode"]["wanted"] > 1, plan
        assert all(one.result().is_success for one in asked)
    cluster.wait_until_idle(cluster.prefill, cluster.decode)

    def idle() -> bool:
        loads = [one.load for one in cluster.fleet.instances().values()]
        return all(not load.running and not load.waiting for load in loads)

    wait_until(idle, 60)
    instances = cluster.fleet.instances()
    assert instances["decode"].load.itl_p90 is not None
    assert instances["decode"].load.free_blocks == instances["decode"].num_blocks - 1
    assert set(instances["decode"].load.models) == {"blue", "red", "green", "azure"}


@contextlib.contextmanager
def patched_decode(
    name: str, cluster: Cluster, folder: Path, model: Path, patch: str
) -> Iterator[Server]:
    """A second decode server, whose processes run `patch` when they start."""
    modules = folder / f"patch-of-{name}"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(patch)
    cluster.fleet.variables["PYTHONPATH"] = str(modules)
    try:
        server = add_vllm(cluster.fleet, name, model, role="kv_consumer", **settings())
        server.serves("/health")
        wait_until(lambda: cluster.fleet.instances()[name].state is InstanceState.READY)
    finally:
        del cluster.fleet.variables["PYTHONPATH"]
    try:
        yield server
    finally:
        cluster.fleet.end(name)


def test_a_side_with_the_previous_version_is_served(
    cluster: Cluster, folder: Path, model: Path, rng: random.Random
) -> None:
    """Simulates a rolling upgrade in which decode is the last."""
    with patched_decode("old", cluster, folder, model, _AS_BEFORE) as old:
        assert cluster.fleet.instances()["old"].kv_versions == (7, 7)
        for _ in range(5):
            prompt = random_prompt(rng)
            kept = cluster.keep(prompt)
            got = cluster.tokens(old, prompt, kv_transfer_params=kept)
            assert got == cluster.tokens(cluster.prefill, prompt)
        assert "instance 'old' does not report the model" in cluster.prefill.log.read_text()


def test_an_engine_whose_transfer_thread_dies_still_answers(
    cluster: Cluster, folder: Path, model: Path, rng: random.Random
) -> None:
    now = folder / "now"
    with patched_decode("doomed", cluster, folder, model, _DIES.format(path=now)) as doomed:
        prompts = [random_prompt(rng) for _ in range(3)]
        expected = [cluster.tokens(cluster.prefill, prompt) for prompt in prompts]
        kept = cluster.keep(prompts[0])
        assert cluster.tokens(doomed, prompts[0], kv_transfer_params=kept) == expected[0]
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            # It waits for a prompt that prefill is never asked for.
            params, after = (cluster.ticket("prefill", "doomed") for _ in range(2))
            waits = threads.submit(cluster.ask, doomed, prompts[1], kv_transfer_params=params)
            wait_until(lambda: doomed.metric("vllm:num_requests_waiting"))
            now.touch()
        assert waits.result().status_code == 500
        assert cluster.tokens(doomed, prompts[2]) == expected[2]
        wait_until(lambda: "doomed" not in cluster.fleet.instances())
        assert cluster.ask(doomed, prompts[1], kv_transfer_params=after).status_code == 500
        assert cluster.tokens(doomed, prompts[1]) == expected[1]
        assert "the transfer engine of this process has ended" in doomed.log.read_text()
        closed = {"direction": "receive", "outcome": "engine-closed"}
        assert doomed.metric("vllm:kvxfer_transfers_total", **closed) == 2
