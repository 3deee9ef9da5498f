"""Two agents of the vLLM connector that the tests of its worker side drive, and plans for them."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator

from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.connectors.transfer_engine import MakeCache
from kvxfer.connectors.vllm.agent import Agent
from kvxfer.connectors.vllm.plan import Receive, Send, StepPlan, TransferParams
from kvxfer.connectors.vllm.settings import ConnectorSettings
from kvxfer.instances import Role
from kvxfer.layout import KvLayout
from kvxfer.model_identity import ModelIdentity
from kvxfer.ticket import Ticket, sign_ticket
from verify.polling import PATIENCE
from verify.processes.control_plane import CLUSTER_KEY

LAYOUT = KvLayout(
    num_layers=3,
    num_kv_heads=2,
    head_size=8,
    dtype="float32",
    block_size=16,
    order="HND",
    kv="opaque",
)
LAYERS = ["layer.0", "layer.1", "layer.2"]
BLOCKS = 12
DIGEST = b"digest"


@contextlib.contextmanager
def agent_of(
    role: Role, url: str, make_cache: MakeCache, lease_seconds: float = 10 * PATIENCE
) -> Iterator[Agent]:
    settings = ConnectorSettings(
        role=role,
        instance_id=role.value,
        model="tiny",
        http_address="http://127.0.0.1:9",  # nothing listens there, so the agent stays joining
        control_plane=url,
        cluster_key=CLUSTER_KEY,
        lease_seconds=lease_seconds,
        options={"peer_timeout": PATIENCE},
    )
    agent = Agent(settings)
    try:
        agent.join([agent.start(make_cache, ModelIdentity())])
        agent.endpoint._connections.connect_timeout = PATIENCE
        yield agent
    finally:
        agent.close()


def params(
    prefill: Agent, decode: Agent, *, seconds: float = 20 * PATIENCE, bearer: bool = False
) -> TransferParams:
    ticket = Ticket(
        transfer_id=uuid.uuid4().hex,
        request_id="r",
        prefill_id="prefill",
        prefill_epoch=prefill.endpoint.epoch,
        decode_id="" if bearer else "decode",
        decode_epoch=0 if bearer else decode.endpoint.epoch,
        expires_at=SYSTEM_CLOCK.unix() + seconds,
        prompt_digest=DIGEST if bearer else b"",
    )
    return TransferParams(sign_ticket(ticket, CLUSTER_KEY), prefill.engine_address)


def sent(of: TransferParams, ids: tuple[int, ...], until: int, total: int = 4) -> StepPlan:
    return StepPlan(sends=[Send("p", of, DIGEST, total, (ids,), until)])


def offered(of: TransferParams, ids: tuple[int, ...], first: int = 0) -> StepPlan:
    return StepPlan(receives=[Receive("d", of, DIGEST, first, (ids,))])
