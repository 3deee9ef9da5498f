"""Checks that a server told to return routed experts does not start: `python experts_probe.py
MODEL`."""

from __future__ import annotations

import os
import sys

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvxfer.connectors.vllm.connector import KvxferConnector
from kvxfer.errors import InvalidArgument

SETTINGS = {
    "instance_id": "i",
    "control_plane": "http://127.0.0.1:1",
    "http_address": "http://127.0.0.1:2",
}


def main() -> None:
    os.environ["KVXFER_CLUSTER_KEY"] = "0123456789abcdef"
    transfer = KVTransferConfig(
        kv_connector="KvxferConnector",
        kv_connector_module_path="kvxfer.connectors.vllm.connector",
        kv_role="kv_producer",
        kv_connector_extra_config=SETTINGS,
    )
    config = EngineArgs(model=sys.argv[1], kv_transfer_config=transfer).create_engine_config()
    # Set only now: on a CPU, create_engine_config() refuses it before the connector can.
    config.aux_output_config.enable_return_routed_experts = True
    nothing = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    try:
        KvxferConnector(config, KVConnectorRole.SCHEDULER, nothing)
    except InvalidArgument as error:
        assert "--enable-return-routed-experts" in str(error), error
        print("routed experts are refused")


if __name__ == "__main__":
    main()
