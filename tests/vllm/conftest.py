"""A disaggregated cluster with the real vLLM: a producer, a consumer, and one that is neither."""

from __future__ import annotations

import contextlib
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.prefix_hashes import as_text, asked_hashes
from kvxfer.ticket import Ticket, sign_ticket
from verify.polling import wait_until
from verify.processes.fleet import CONTROL_PLANE, Fleet
from verify.processes.programs import Server
from verify.processes.vllm import servers
from verify.processes.vllm.servers import VLLM_PYTHON, add_vllm, make_model, vllm

HERE = Path(__file__).parent
CLUSTER_KEY = "0123456789abcdef0123456789abcdef"
# The cores of a test machine are busy, and these tests measure no time.
PEER_TIMEOUT = 5.0
LEASE_SECONDS = 20.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not VLLM_PYTHON:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="run by `make test SUITE=vllm`"))


def checkpoint(kind: str, folder: Path) -> Path:
    """Makes a tiny model (verify/processes/vllm/tiny_models.py) once; returns its checkpoint."""
    made = folder / kind
    if not made.exists():
        maker = Path(servers.__file__).with_name("tiny_models.py")
        subprocess.run([servers.VLLM_PYTHON, str(maker), kind, str(made)], check=True)
    return made


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def model(folder: Path) -> Path:
    return make_model(folder)


def ask(
    server: Server, prompt: list[int], *, seconds: float = 90.0, **more: Any
) -> httpx2.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, **more}
    return httpx2.post(server.url + "/v1/completions", json=body, timeout=seconds)


def keep(server: Server, prompt: list[int], **more: Any) -> dict[str, Any]:
    """Sends the request to prefill alone, as vLLM's proxies do first, and returns the
    kv_transfer_params of the reply, which say where the prompt can be fetched."""
    nothing = dict.fromkeys(("engine_id", "block_ids", "host", "port"))
    params = {f"remote_{name}": None for name in nothing}
    asked = {"do_remote_decode": True, "do_remote_prefill": False, **params}
    more |= {"max_tokens": 1, "stream": False, "kv_transfer_params": asked}
    answer = ask(server, prompt, **more)
    assert answer.is_success, answer.text
    return dict(answer.json()["kv_transfer_params"])


@dataclass
class Cluster:
    """A fleet, and a server that computes everything itself."""

    fleet: Fleet
    aggregated: Server

    @property
    def control_plane(self) -> Server:
        return self.fleet.running[CONTROL_PLANE]

    @property
    def router(self) -> Server:
        return self.fleet.router

    @property
    def prefill(self) -> Server:
        return self.fleet.running["prefill"]

    @property
    def decode(self) -> Server:
        return self.fleet.running["decode"]

    def ask(self, server: Server, prompt: list[int], **more: Any) -> httpx2.Response:
        return ask(server, prompt, **more)

    def tokens(self, server: Server, prompt: list[int], **more: Any) -> list[int]:
        answer = self.ask(server, prompt, **more)
        assert answer.is_success, (len(prompt), answer.text)
        [choice] = answer.json()["choices"]
        return list(choice["token_ids"])

    def open_transfer(self, request_id: str) -> dict[str, Any]:
        """Opens a transfer and returns its kv_transfer_params."""
        answer = httpx2.post(
            self.control_plane.url + "/v1/transfers",
            json={"request_id": request_id, "model": "tiny"},
        )
        assert answer.is_success, answer.text
        opened = answer.json()
        return {
            "ticket": opened["ticket"],
            "prefill_engine_address": opened["prefill"]["engine_address"],
        }

    def cached_tokens(self, prompt: list[int]) -> int:
        """Returns how many tokens of the prompt the control plane knows in prefill's cache."""
        hashes, tokens_per_hash = asked_hashes(prompt, "tiny")
        body = {"prefix_hashes": as_text(hashes), "tokens_per_hash": tokens_per_hash}
        with httpx2.Client(base_url=self.control_plane.url) as http:
            opened = http.post("/v1/transfers", json={**body, "explain": True}).json()
            http.delete(f"/v1/transfers/{opened['transfer_id']}")
        return int(opened["score"]["prefix_tokens"])

    def keep(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        return keep(self.prefill, prompt, **more)

    def ticket(self, prefill: str, decode: str) -> dict[str, Any]:
        """The kv_transfer_params of a transfer between two instances."""
        sides = self.fleet.instances()
        epochs = [sides[name].epoch for name in (prefill, decode)]
        ticket = Ticket(
            uuid.uuid4().hex, "r", prefill, epochs[0], decode, epochs[1], SYSTEM_CLOCK.unix() + 60
        )
        return {
            "ticket": sign_ticket(ticket, CLUSTER_KEY),
            "prefill_engine_address": sides[prefill].engine_address,
        }

    def wait_until_ready(self) -> None:
        """Returns when the control plane would pair the instances of the fleet."""
        for server in self.fleet.workers.values():
            server.serves("/health")
        wait_until(self.fleet.whole)

    def wait_until_idle(self, *servers: Server) -> None:
        """Returns when no request is left and every KV block is free again."""
        self.wait_until_idle_within(LEASE_SECONDS + 10, *servers)

    def wait_until_idle_within(self, seconds: float, *servers: Server) -> None:
        names = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
        left: dict[str, list[float]] = {}

        def idle() -> bool:
            for server in servers:
                left[server.name] = [server.metric(f"vllm:{name}") for name in names]
            return not any(any(values) for values in left.values())

        try:
            wait_until(idle, seconds, pause=0.2)
        except TimeoutError as error:
            error.add_note(str(left))
            raise


def fleet_in(folder: Path) -> Fleet:
    return Fleet(folder, KVXFER_CLUSTER_KEY=CLUSTER_KEY)


def settings(
    lease_seconds: float = LEASE_SECONDS, peer_timeout: float = PEER_TIMEOUT
) -> dict[str, Any]:
    """Returns the settings of a connector. Every transfer is verified with checksums."""
    return {"peer_timeout": peer_timeout, "lease_seconds": lease_seconds, "checksums": True}


@contextlib.contextmanager
def cluster_of(
    folder: Path,
    model: Path,
    aggregated: Server | None,
    *,
    prefill: Sequence[str] = (),
    decode: Sequence[str] = (),
    control_plane: Sequence[str | Path] = (),
    lease_seconds: float = LEASE_SECONDS,
) -> Iterator[Cluster]:
    """A pair with its control plane and router; `prefill` and `decode` are arguments of vLLM's.
    Without `aggregated`, prefill also computes requests that have no ticket."""
    with fleet_in(folder) as fleet:
        fleet.start_control_plane(*control_plane)
        fleet.start_router("--attempts", "1")
        sides = (("prefill", "kv_producer", prefill), ("decode", "kv_consumer", decode))
        for name, role, more in sides:
            add_vllm(fleet, name, model, *more, role=role, **settings(lease_seconds))
        started = Cluster(fleet, aggregated or fleet.running["prefill"])
        started.wait_until_ready()
        started.aggregated.serves("/health")
        yield started


@pytest.fixture(scope="session")
def aggregated(folder: Path, model: Path) -> Iterator[Server]:
    """A server that computes everything itself. It may still be starting."""
    with vllm("aggregated", folder, model) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(folder: Path, model: Path, aggregated: Server) -> Iterator[Cluster]:
    # Long prompts are computed in chunks that end within blocks. A few of them take all blocks, so
    # freed blocks are soon overwritten.
    chunks = ("--max-num-batched-tokens", "600", "--num-gpu-blocks-override", "200")
    with cluster_of(folder / "pair", model, aggregated, prefill=chunks) as started:
        yield started
