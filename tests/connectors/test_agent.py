"""The agents of an instance with two ranks, beside a real control plane."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses

import httpx
import numpy as np

from kvxfer.connectors.vllm.agent import Agent
from kvxfer.connectors.vllm.settings import ConnectorSettings
from kvxfer.instances import Role
from kvxfer.kv.cache import KvCache
from kvxfer.kv.layout import KvLayout
from tests.control_plane import CLUSTER_KEY, RunningControlPlane

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
            http_address="http://127.0.0.1:9",  # nobody: it stays joining
            control_plane=control_plane.url,
            cluster_key=CLUSTER_KEY,
            peer_timeout=5.0,
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
                    )
                )
            )
            agents.append(agent)
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda agent: agent.join(addresses), agents))
        [instance] = httpx.get(control_plane.url + "/v1/instances").json()["instances"]
        assert instance["rank_addresses"] == addresses
        assert instance["engine_address"] == addresses[0]
        assert [agent.endpoint.epoch for agent in agents] == [instance["epoch"]] * 2
