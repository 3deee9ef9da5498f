"""A plugin of vLLM (`vllm.general_plugins`): the weight transfer backend `kvxfer`.

Engines are imported when one is made, so a vLLM without the backend imports nothing of it.
"""

from __future__ import annotations

from typing import Final

_ROOM: Final = "kvxfer.connectors.vllm.weight_transfer"
BACKEND: Final = "kvxfer"


def register() -> None:
    """Registers the backend. vLLM calls this in each of its processes, any number of times. A
    trainer calls vLLM's load_general_plugins()."""
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    for factory, module, name in (
        (WeightTransferEngineFactory, "engine", "KvxferWeightTransferEngine"),
        (WeightTransferTrainerFactory, "trainer", "KvxferTrainerWeightTransferEngine"),
    ):
        if BACKEND not in factory._registry:
            factory.register_engine(BACKEND, f"{_ROOM}.{module}", name)
