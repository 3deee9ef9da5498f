"""Prints which data parallel engines the connector takes: `python ranks_probe.py DENSE_MODEL
MOE_MODEL`.

Each configuration goes through vLLM's own start of an engine process, up to the engine.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvxfer.connectors.vllm.connector import KvxferConnector
from kvxfer.errors import InvalidArgument

SETTINGS = {"control_plane": "http://127.0.0.1:1", "http_address": "http://127.0.0.1:2"}
EXTERNAL = {"data_parallel_size": 2, "data_parallel_rank": 1}
HYBRID = {
    "data_parallel_size": 4,
    "data_parallel_size_local": 2,
    "data_parallel_start_rank": 2,
}


class Made(BaseException):
    """Raised where vLLM would make an engine."""


def taken(model: str, rank: int, **options: Any) -> str:
    transfer = KVTransferConfig(
        kv_connector="KvxferConnector",
        kv_connector_module_path="kvxfer.connectors.vllm.connector",
        kv_role="kv_producer",
        kv_connector_extra_config=SETTINGS,
    )
    args = EngineArgs(model=model, kv_transfer_config=transfer, **options)
    config = args.create_engine_config()
    try:
        EngineCoreProc.run_engine_core(vllm_config=config, dp_rank=rank, local_dp_rank=0)
    except Made:
        return connected(config)
    raise AssertionError("vLLM has made no engine")


def connected(config: VllmConfig) -> str:
    nothing = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    try:
        KvxferConnector(config, KVConnectorRole.SCHEDULER, nothing)
    except InvalidArgument as error:
        assert "several data parallel engines behind one API" in str(error), error
        return "refused"
    return "taken"


def stop(_: object, vllm_config: VllmConfig, **__: Any) -> None:
    raise Made


def main() -> None:
    os.environ["KVXFER_CLUSTER_KEY"] = "0123456789abcdef"
    EngineCoreProc.__init__ = DPEngineCoreProc.__init__ = stop
    dense, experts = sys.argv[1:]
    for name, found in {
        "one": taken(dense, 0),
        "dense": taken(dense, 1, data_parallel_size=2),
        "experts 0": taken(experts, 0, data_parallel_size=2),
        "experts 1": taken(experts, 1, data_parallel_size=2),
        "hybrid": taken(experts, 2, **HYBRID),
        "external": taken(experts, 1, **EXTERNAL),
    }.items():
        print(f"{name} {found}", end=", ")


if __name__ == "__main__":
    main()
