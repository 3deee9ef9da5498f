"""vLLM's own weight transfer with the backend `kvxfer`: the part that a trainer needs. docs/vllm.md
describes its use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvxfer.connectors.vllm.weight_transfer.clients import PausingClient
    from kvxfer.connectors.vllm.weight_transfer.infos import KvxferTrainerInitInfo
    from kvxfer.connectors.vllm.weight_transfer.trainer import ShardSource, StateSource

# Imported when they are used: each process of vLLM loads the plugin, and few are trainers.
_HOMES: Final = {
    "KvxferTrainerInitInfo": "infos",
    "PausingClient": "clients",
    "ShardSource": "trainer",
    "StateSource": "trainer",
}

__all__ = ["KvxferTrainerInitInfo", "PausingClient", "ShardSource", "StateSource"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
