"""The agents of an instance with two ranks, beside a real control plane."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest
import torch

from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.connectors.transfer_engine import pci_address
from kvxfer.connectors.vllm.agent import Agent
from kvxfer.connectors.vllm.kv_events import CacheChanges
from kvxfer.connectors.vllm.plan import Counted
from kvxfer.connectors.vllm.settings import ConnectorSettings
from kvxfer.engine import Engine
from kvxfer.errors import ConnectFailed, InvalidArgument, UnknownRegion
from kvxfer.instances import InstanceState, Role
from kvxfer.kv.cache import KvCache
from kvxfer.layout import KvLayout
from kvxfer.model_identity import ModelIdentity
from kvxfer.ticket import Ticket, sign_ticket
from tests.topology import machines
from verify.polling import PATIENCE, wait_until
from verify.processes.control_plane import CLUSTER_KEY, RunningControlPlane

pytestmark = pytest.mark.native

MODEL = ModelIdentity(checkpoint="a" * 32, weights_version=3, connector="test/1")
LAYOUT = KvLayout(
    num_layers=1,
    num_kv_heads=2,
    head_size=8,
    dtype="float32",
    block_size=16,
    tp_size=2,
    order="HND",
    kv="opaque",
    packing="vec",
)


def test_two_ranks_are_one_instance_of_one_epoch() -> None:
    with RunningControlPlane() as control_plane, contextlib.ExitStack() as stack:
        settings = ConnectorSettings(
            role=Role.PREFILL,
            instance_id="prefill",
            model="tiny",
            http_address="http://127.0.0.1:9",  # nothing listens there, so the agent stays joining
            control_plane=control_plane.url,
            cluster_key=CLUSTER_KEY,
            options={"peer_timeout": PATIENCE},
        )
        agents, addresses = [], []
        for rank in range(2):
            agent = Agent(settings)
            stack.callback(agent.close)
            layout = dataclasses.replace(LAYOUT, tp_rank=rank)
            plane = np.zeros((4, layout.part_bytes), np.uint8)
            addresses.append(
                agent.start(
                    lambda engine, layout=layout, plane=plane: KvCache.register(
                        engine, layout, 4, [[plane]]
                    ),
                    MODEL,
                )
            )
            agents.append(agent)
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda agent: agent.join(addresses), agents))
        [instance] = httpx2.get(control_plane.url + "/v1/instances").json()["instances"]
        assert instance["rank_addresses"] == addresses
        assert instance["engine_address"] == addresses[0]
        assert [agent.endpoint.epoch for agent in agents] == [instance["epoch"]] * 2


def settings_of(control_plane: RunningControlPlane) -> ConnectorSettings:
    return ConnectorSettings(
        role=Role.DECODE,
        instance_id="decode",
        model="tiny",
        http_address="http://127.0.0.1:9",
        control_plane=control_plane.url,
        cluster_key=CLUSTER_KEY,
        options={"peer_timeout": PATIENCE},
    )


def cache_of(engine: Engine) -> KvCache:
    plane = np.zeros((4, LAYOUT.part_bytes), np.uint8)
    return KvCache.register(engine, LAYOUT, 4, [[plane]])


def test_transfers_are_traced_if_their_tickets_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with RunningControlPlane() as control_plane:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", control_plane.url)
        agent = Agent(settings_of(control_plane))
        try:
            agent.start(cache_of, MODEL)
            ticket = Ticket(
                transfer_id="t-1",
                request_id="r-1",
                prefill_id="prefill",
                prefill_epoch=1,
                decode_id="decode",
                decode_epoch=0,
                expires_at=SYSTEM_CLOCK.unix() + 20 * PATIENCE,
                traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            )
            nobody = "kvx://127.0.0.1:9/" + "0" * 32
            with pytest.raises(ConnectFailed):
                token = sign_ticket(ticket, CLUSTER_KEY)
                agent.run(agent.endpoint.decode_session(token, nobody, 1), PATIENCE)
        finally:
            agent.close()
        [span] = httpx2.get(control_plane.url + "/v1/traces/r-1").json()["spans"]
    assert (span["service"], span["instance_id"], span["name"]) == ("vllm", "decode", "kv.receive")
    assert span["parent_id"] == "b7ad6b7169203331"
    assert span["attributes"]["error.type"] == "connect-failed"


def test_variables_of_other_programs_do_not_prevent_a_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")  # text
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with RunningControlPlane() as control_plane:
        agent = Agent(settings_of(control_plane))
        try:
            assert agent.start(cache_of, MODEL)
        finally:
            agent.close()
    assert "transfers are not traced: OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'" in caplog.text


def test_heartbeats_are_not_logged_by_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.NOTSET, logger="httpx2")  # restored by caplog
    with RunningControlPlane() as control_plane:
        agent = Agent(settings_of(control_plane))
        try:
            agent.join([agent.start(cache_of, MODEL)])
        finally:
            agent.close()
    assert not [record for record in caplog.records if record.name == "httpx2"]


def test_new_weights_give_a_new_epoch_and_another_identity() -> None:
    with RunningControlPlane() as control_plane:
        agent = Agent(settings_of(control_plane))
        try:
            agent.join([agent.start(cache_of, MODEL)])
            agent.cached(CacheChanges(added={1: None, 2: None}))
            with pytest.raises(InvalidArgument, match="version 3 is not above 3; pass a greater"):
                agent.run(agent.take_weights(3), PATIENCE)
            before = agent.endpoint.epoch
            agent.run(agent.take_weights(4), PATIENCE)
            [instance] = httpx2.get(control_plane.url + "/v1/instances").json()["instances"]
            assert instance["identity"]["weights_version"] == 4
            assert instance["identity"]["checkpoint"] == "a" * 32
            assert instance["epoch"] == agent.endpoint.epoch > before
            assert agent.endpoint.model == msgspec.structs.replace(MODEL, weights_version=4)
        finally:
            agent.close()


@contextlib.contextmanager
def api(port: int = 0) -> Iterator[int]:
    """An HTTP API of a healthy engine."""

    class Well(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Well) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_an_instance_is_ready_while_its_api_answers(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's engine keeps running when its API server is killed."""
    with RunningControlPlane() as control_plane, contextlib.ExitStack() as stack:

        def state() -> str:
            [one] = httpx2.get(control_plane.url + "/v1/instances").json()["instances"]
            return str(one["state"])

        with api() as port:
            settings = settings_of(control_plane)
            url = f"http://127.0.0.1:{port}"
            agent = Agent(dataclasses.replace(settings, http_address=url))
            stack.callback(agent.close)
            agent.join([agent.start(cache_of, MODEL)])
            wait_until(lambda: state() == "ready")
            before = agent.endpoint.epoch
        wait_until(lambda: state() == "joining")
        wait_until(lambda: agent.endpoint.epoch > before)  # earlier tickets are void
        told = f"nothing listens at {url} any more: instance decode gets no"
        wait_until(lambda: told in caplog.text)  # logged once the change of state is answered
        with api(port):
            wait_until(lambda: state() == "ready")


def test_an_instance_that_sleeps_is_not_ready() -> None:
    memory = np.zeros((4, LAYOUT.part_bytes), np.uint8)
    with RunningControlPlane() as control_plane:
        agent = Agent(settings_of(control_plane))

        def instance() -> dict[str, Any]:
            [one] = httpx2.get(control_plane.url + "/v1/instances").json()["instances"]
            return dict(one)

        try:
            make_cache = partial(KvCache.register, layout=LAYOUT, num_blocks=4, arrays=[[memory]])
            agent.join([agent.start(make_cache, MODEL)])
            # The control plane would report it ready itself, but no API answers here.
            agent.run(agent._registration.advance(InstanceState.READY), PATIENCE)
            before = instance()
            assert before["state"] == "ready"
            [[plane]] = agent.endpoint._cache.planes
            descriptor = plane.region.descriptor
            agent.run(agent.suspend(), PATIENCE)
            assert (instance()["state"], instance()["epoch"] > before["epoch"]) == ("joining", True)
            with pytest.raises(UnknownRegion):
                plane.region.write(b"x")
            agent.run(agent.suspend(), PATIENCE)  # a second call changes nothing
            agent.run(agent.resume(), PATIENCE)
            assert instance()["state"] == "ready"
            assert plane.region.descriptor != descriptor, "it was not registered again"
            plane.region.write(b"x")
        finally:
            agent.close()


def test_an_agent_that_gives_up_its_transfers_leaves_the_fleet() -> None:
    with RunningControlPlane() as control_plane:
        agent = Agent(settings_of(control_plane))
        try:
            agent.join([agent.start(cache_of, MODEL)])
            agent.abandon()
            assert agent.lost
            instances = control_plane.url + "/v1/instances"
            wait_until(lambda: not httpx2.get(instances).json()["instances"])
        finally:
            agent.close()


def test_the_load_is_what_the_scheduler_reported() -> None:
    with RunningControlPlane(lease_seconds=3) as control_plane:
        agent = Agent(settings_of(control_plane))
        try:
            agent.join([agent.start(cache_of, MODEL)])
            agent.counted = Counted(32, 5, 1, 7, requests=40, prompt_tokens=900, output_tokens=70)

            def told() -> bool:
                found = httpx2.get(control_plane.url + "/v1/instances").json()["instances"]
                if not found:
                    return False  # after a stall, the lease has ended, and another follows
                load = found[0]["load"]
                names = ("running", "waiting", "free_blocks", "cached_blocks")
                same = [load[name] for name in names] == [32, 5, 1, 7]
                return same and load["tokens_per_second"] > 0 < load["requests_per_second"]

            wait_until(told)
        finally:
            agent.close()


# --- the NICs of a rank ----------------------------------------------------------------------


def test_each_rank_opens_the_nics_of_its_gpu(
    tmp_path: Path, engines: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    settings = ConnectorSettings(
        role=Role.PREFILL,
        instance_id="prefill",
        model="tiny",
        http_address="http://127.0.0.1:9",
        cluster_key=CLUSTER_KEY,
        options={"exclude_nics": ["mlx5_7"], "traffic_class": 106},
    )
    caplog.set_level(logging.INFO, "vllm.kvxfer")
    dgx = machines.write("dgx", tmp_path)
    for gpu in ("0000:1b:00.0", "0000:9d:00.0", None):
        agent = Agent(settings, gpu, root=dgx)
        agent.start(cache_of, MODEL)
        agent.close()
    own = {"cluster_key": CLUSTER_KEY, "name": "prefill", "traffic_class": 106}
    assert engines[:2] == [own | {"nics": ["mlx5_0"]}, own | {"nics": ["mlx5_4"]}]
    assert {"mlx5_7"}.isdisjoint(engines[2]["nics"])
    first, second, _ = (each.message for each in caplog.records if each.name == "vllm.kvxfer")
    assert first.startswith(
        "NICs for GPU 0 (0000:1b:00.0): mlx5_0; not mlx5_7 (exclude_nics names it); not mlx5_1, "
    )
    assert second.startswith("NICs for GPU 4 (0000:9d:00.0): mlx5_4; ")


def test_a_gpu_is_identified_by_its_pci_address(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [
        SimpleNamespace(pci_domain_id=0, pci_bus_id=0x9D, pci_device_id=0),
        SimpleNamespace(pci_domain_id=0x10000, pci_bus_id=0x1B, pci_device_id=4),
        SimpleNamespace(),  # an older torch
    ]
    monkeypatch.setattr(torch.cuda, "get_device_properties", places.__getitem__)
    assert [pci_address("cuda", index) for index in range(3)] == [
        "0000:9d:00.0",
        "10000:1b:04.0",
        None,
    ]
    assert pci_address("cpu", None) is None
