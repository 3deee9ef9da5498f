"""KV cache transfer between two workers, on top of `kvxfer.Engine`.

A worker says how its cache lies in memory (`KvLayout`), registers that memory (`KvCache`), and
makes one `KvEndpoint` of both and its engine. A transfer is a session on each side, under one
ticket of the control plane:

    # decode
    async with await endpoint.decode_session(ticket, prefill_address, num_blocks) as session:
        await session.wait()                     # every block is there, or a named error
        blocks = session.take()

    # prefill
    async with await endpoint.prefill_session(ticket, blocks) as session:
        for layer in range(num_layers):
            session.write_layer(layer)           # as soon as the layer is computed
        await session.finish()                   # every byte is delivered, or a named error

Either side may begin. A session that is left before its end is cancelled on both sides, and no byte
lands in its blocks afterwards. `kvxfer.reference.worker` is the worked example.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvxfer.kv.block_pool import BlockIds, BlockPool, BlockState
    from kvxfer.kv.cache import KvCache, KvPlane, Permute, permute_on_host
    from kvxfer.kv.decode_session import DecodeSession
    from kvxfer.kv.endpoint import KvEndpoint
    from kvxfer.kv.prefill_session import PrefillSession
    from kvxfer.layout import KvLayout
    from kvxfer.model_identity import ModelIdentity
    from kvxfer.ticket import Ticket, TicketKeys, sign_ticket, verify_ticket, watch_ticket_keys

# Imported when they are used: the control plane needs records of KV transfers, and no engine.
_HOMES: Final = {
    "BlockIds": "kvxfer.kv.block_pool",
    "BlockPool": "kvxfer.kv.block_pool",
    "BlockState": "kvxfer.kv.block_pool",
    "DecodeSession": "kvxfer.kv.decode_session",
    "KvCache": "kvxfer.kv.cache",
    "KvEndpoint": "kvxfer.kv.endpoint",
    "KvLayout": "kvxfer.layout",
    "KvPlane": "kvxfer.kv.cache",
    "ModelIdentity": "kvxfer.model_identity",
    "Permute": "kvxfer.kv.cache",
    "PrefillSession": "kvxfer.kv.prefill_session",
    "Ticket": "kvxfer.ticket",
    "TicketKeys": "kvxfer.ticket",
    "permute_on_host": "kvxfer.kv.cache",
    "sign_ticket": "kvxfer.ticket",
    "verify_ticket": "kvxfer.ticket",
    "watch_ticket_keys": "kvxfer.ticket",
}

__all__ = [
    "BlockIds",
    "BlockPool",
    "BlockState",
    "DecodeSession",
    "KvCache",
    "KvEndpoint",
    "KvLayout",
    "KvPlane",
    "ModelIdentity",
    "Permute",
    "PrefillSession",
    "Ticket",
    "TicketKeys",
    "permute_on_host",
    "sign_ticket",
    "verify_ticket",
    "watch_ticket_keys",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kvxfer.kv' has no attribute {name!r}")
