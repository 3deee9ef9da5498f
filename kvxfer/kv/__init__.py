"""KV cache transfer between two workers, on top of `kvxfer.Engine`.

A worker describes its cache in memory (`KvLayout`), registers that memory (`KvCache`), gives out
its blocks (`BlockPool`), and makes one `KvEndpoint` from these and its engine. A transfer is a
session on each side, under one ticket from the control plane or from `sign_ticket()`:

    # decode
    async with endpoint.decode_session(ticket, prefill_address, num_blocks) as session:
        await session.wait()                     # every block is there, or a named error
        blocks = session.take()

    # prefill
    async with endpoint.prefill_session(ticket, blocks) as session:
        for layer in range(num_layers):
            session.write_layer(layer)           # as soon as the layer is computed
        await session.finish()                   # every byte is delivered, or a named error

Either side may begin. A session that is left before its end is cancelled on both sides, and no byte
lands in its blocks afterwards. docs/own-engine.md explains the rest; examples/python/kv_transfer.py
and kv_fleet.py are programs to copy. A worker registers with a control plane through
`kvxfer.client.Registration`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvxfer.clock import Clock
    from kvxfer.kv.block_pool import (
        BlockHold,
        BlockIds,
        BlockLease,
        BlockPin,
        BlockPool,
        BlockState,
    )
    from kvxfer.kv.block_table import BlockTable, BlockTables
    from kvxfer.kv.blocks import HeldBlocks, Pin, SourceBlocks, TargetBlocks
    from kvxfer.kv.cache import KvCache, KvPlane, Permute, permute_on_host
    from kvxfer.kv.decode_session import DecodeSession
    from kvxfer.kv.endpoint import KvEndpoint
    from kvxfer.kv.opening import OpeningSession
    from kvxfer.kv.options import KvIdentity, KvOptions
    from kvxfer.kv.prefill_session import PrefillSession
    from kvxfer.kv.session_state import DecodeState, PrefillState
    from kvxfer.layout import KvLayout, LayerShape, Packing
    from kvxfer.model_identity import ModelIdentity
    from kvxfer.ticket import Ticket, TicketKeys, sign_ticket, verify_ticket, watch_ticket_keys
    from kvxfer.watched_file import WatchedFile

# Imported when they are used: the control plane needs records of KV transfers, but no engine.
_HOMES: Final = {
    "BlockHold": "kvxfer.kv.block_pool",
    "BlockIds": "kvxfer.kv.block_pool",
    "BlockLease": "kvxfer.kv.block_pool",
    "BlockPin": "kvxfer.kv.block_pool",
    "BlockPool": "kvxfer.kv.block_pool",
    "BlockState": "kvxfer.kv.block_pool",
    "BlockTable": "kvxfer.kv.block_table",
    "BlockTables": "kvxfer.kv.block_table",
    "Clock": "kvxfer.clock",
    "DecodeSession": "kvxfer.kv.decode_session",
    "DecodeState": "kvxfer.kv.session_state",
    "HeldBlocks": "kvxfer.kv.blocks",
    "KvCache": "kvxfer.kv.cache",
    "KvEndpoint": "kvxfer.kv.endpoint",
    "KvIdentity": "kvxfer.kv.options",
    "KvLayout": "kvxfer.layout",
    "KvOptions": "kvxfer.kv.options",
    "KvPlane": "kvxfer.kv.cache",
    "LayerShape": "kvxfer.layout",
    "ModelIdentity": "kvxfer.model_identity",
    "OpeningSession": "kvxfer.kv.opening",
    "Packing": "kvxfer.layout",
    "Permute": "kvxfer.kv.cache",
    "Pin": "kvxfer.kv.blocks",
    "PrefillSession": "kvxfer.kv.prefill_session",
    "PrefillState": "kvxfer.kv.session_state",
    "SourceBlocks": "kvxfer.kv.blocks",
    "TargetBlocks": "kvxfer.kv.blocks",
    "Ticket": "kvxfer.ticket",
    "TicketKeys": "kvxfer.ticket",
    "WatchedFile": "kvxfer.watched_file",
    "permute_on_host": "kvxfer.kv.cache",
    "sign_ticket": "kvxfer.ticket",
    "verify_ticket": "kvxfer.ticket",
    "watch_ticket_keys": "kvxfer.ticket",
}

__all__ = [
    "BlockHold",
    "BlockIds",
    "BlockLease",
    "BlockPin",
    "BlockPool",
    "BlockState",
    "BlockTable",
    "BlockTables",
    "Clock",
    "DecodeSession",
    "DecodeState",
    "HeldBlocks",
    "KvCache",
    "KvEndpoint",
    "KvIdentity",
    "KvLayout",
    "KvOptions",
    "KvPlane",
    "LayerShape",
    "ModelIdentity",
    "OpeningSession",
    "Packing",
    "Permute",
    "Pin",
    "PrefillSession",
    "PrefillState",
    "SourceBlocks",
    "TargetBlocks",
    "Ticket",
    "TicketKeys",
    "WatchedFile",
    "permute_on_host",
    "sign_ticket",
    "verify_ticket",
    "watch_ticket_keys",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kvxfer.kv' has no attribute {name!r}")
